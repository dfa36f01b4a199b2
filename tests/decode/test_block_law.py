"""Block denoising: a step's choice is one pure function, and texts have the law that their rule keeps.

Laws are counted by enumeration, with the exact posterior of a joint law in the network's place.
"""

import dataclasses
import functools
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chi_square import excess
from stubs import JointBlocks

from paradec_jax import decode
from paradec_jax.config import TokenSpec
from paradec_jax.decode.block import rules
from paradec_jax.decode.machine.rows import begin

# The choice is one pure function


DECODER = types.SimpleNamespace(mask=10, greedy=False, top_p_rule="keep-renormalised")


def chosen(decoder, rule, logits, masked, positions, step, keys, knobs):
    """What rows with these keys choose."""
    request = decode.make_request(np.zeros((len(step), 1)), max_new_tokens=1, keys=keys)
    return rules.choose(decoder, rule, logits, masked, positions, step, begin(request, 2, 0), knobs)


def test_a_choice_depends_on_state_step_and_keys_alone():
    """Folded candidates choose what each chooses alone; another step draws with other noise."""
    logits = jax.random.normal(jax.random.key(0), (3, 4, 11))
    masked = jnp.asarray([[True, False, True, True], [True] * 4, [False, True, True, False]])
    positions = jnp.asarray([8, 4, 8])[:, None] + jnp.arange(4)
    step, keys = jnp.asarray([1, 0, 2]), jax.random.split(jax.random.key(1), 3)
    for rule in rules.RULES:
        knobs = rules.DenoisingKnobs(temperature=0.8, top_k=7, top_p=0.9)
        choose = jax.jit(functools.partial(chosen, DECODER, rule))
        whole = choose(logits, masked, positions, step, keys, knobs)
        assert (np.asarray(whole.where) <= np.asarray(masked)).all() and whole.where.any(axis=1).all()
        assert (whole.tokens != 10).all() and ((whole.scores > 0) & (whole.scores < 1)).all()
        for i in range(3):
            alone = choose(*(x[i : i + 1] for x in (logits, masked, positions, step, keys)), knobs)
            assert (alone.where[0] == whole.where[i]).all() and (alone.tokens[0] == whole.tokens[i]).all()
            np.testing.assert_allclose(alone.scores[0], whole.scores[i], rtol=1e-6)
    later = choose(logits, masked, positions, step + 1, keys, knobs)
    assert (later.tokens != whole.tokens).any()


def test_confidence_is_that_before_truncation():
    logits = jnp.asarray([[[2.0, 1.0, 0.0, 3.0]]])
    where = jnp.ones((1, 1), bool), jnp.zeros((1, 1), jnp.int32)
    decoder = types.SimpleNamespace(**{**vars(DECODER), "mask": 3})
    keys, step = jax.random.split(jax.random.key(0), 1), jnp.zeros(1, jnp.int32)
    for temperature in (0.0, 0.5, 2.0):
        knobs = rules.DenoisingKnobs(temperature=temperature, top_k=1)
        choice = chosen(decoder, "static", logits, *where, step, keys, knobs)
        want = jax.nn.softmax(logits / (temperature or 1.0))[0, 0, 0]
        assert choice.tokens.tolist() == [[0]], "the mask is the most probable one and never drawn"
        assert choice.scores[0, 0] == pytest.approx(float(want), rel=1e-6)


# The law


JOINT = JointBlocks(3, 4, tuple(np.random.default_rng(5).gamma(0.5, size=81).tolist()), 2)
OWN = TokenSpec(mask=JOINT.mask, alignment="own")


def texts(draws: int, network: JointBlocks = JOINT, given: int = 0, **options: Any) -> np.ndarray:
    """Texts of four symbols, the first `given` of which are zeros."""
    knobs = options.pop("knobs", {})
    spec = dataclasses.replace(OWN, alignment=network.alignment)
    decoder = decode.BlockDenoising(network, 4, spec, **options)
    keys = jax.random.split(jax.random.key(11), draws)
    request = decode.make_request(np.zeros((draws, given)), max_new_tokens=4 - given, keys=keys)
    return np.asarray(decode.run(decoder, None, request, decoder.Knobs(temperature=1.0, **knobs)).tokens)


def in_parallel(joint: JointBlocks) -> np.ndarray:
    """The law where a step reveals a whole block: the product of its marginals, given the blocks before."""
    every, law = joint.texts, joint.law
    found = np.ones(len(every))
    for i, text in enumerate(every):
        for p in range(joint.length):
            start = p // joint.block * joint.block
            before = (every[:, :start] == text[:start]).all(1)
            found[i] *= law[before & (every[:, p] == text[p])].sum() / law[before].sum()
    return found


@pytest.mark.parametrize(
    ("draws", "fused"),
    [(4_000, True), *(pytest.param(100_000, fused, marks=pytest.mark.slow) for fused in (True, False))],
)
def test_random_positions_one_at_a_time_have_the_joint_law(draws, fused):
    found = texts(draws, rule="random", fuse_store=fused, fuse_prompt=fused)
    assert excess(found, JOINT.law, 3) < 4
    assert excess(found, in_parallel(JOINT), 3) > 20, "another law would be noticed"


@pytest.mark.slow
def test_other_laws():
    """Left to right keeps the law too; a whole block a step has that of its marginals; the surest first has none."""
    assert excess(texts(20_000, rule="sequential"), JOINT.law, 3) < 4
    assert excess(texts(20_000, rule="random", knobs={"steps": 1}), in_parallel(JOINT), 3) < 4
    assert excess(texts(20_000, rule="static"), JOINT.law, 3) > 20


@pytest.mark.slow
def test_where_logits_are_about_the_next_position_the_order_matters():
    """A block's first row is that of the block before, which sees nothing of the block.

    From left to right that loses nothing. Where the second symbol of a block comes first, half of the time at
    random, the first one is drawn as if it had not.
    """
    network, start = dataclasses.replace(JOINT, alignment="next"), JOINT.texts[:, 0] == 0
    joint, apart = (np.where(start, law, 0.0) / law[start].sum() for law in (JOINT.law, in_parallel(JOINT)))
    found = texts(20_000, network, given=1, rule="sequential")
    assert excess(found, joint, 3) < 4 and excess(found, apart, 3) > 20
    # The first block has one symbol to reveal: beside what was given, both laws agree there.
    of_block = [joint.reshape(3, 3, 9).sum(2), apart.reshape(3, 3, 9).sum(2)]
    ratio = np.divide(of_block[0], of_block[1], out=np.zeros((3, 3)), where=of_block[1] > 0)
    apart = (apart.reshape(3, 3, 9) * ratio[..., None]).ravel()
    found = texts(20_000, network, given=1, rule="random")
    assert excess(found, (joint + apart) / 2, 3) < 4 and excess(found, joint, 3) > 20
