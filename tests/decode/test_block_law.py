"""Block denoising: a step's choice is one pure function, and texts have the law that their rule
keeps.

Laws are counted by enumeration, with the exact posterior of a joint law in the network's place.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chi_square import excess
from marks import over, slow
from stubs import JointBlocks, StubDenoiser

from paradec_jax import decode
from paradec_jax.config import TokenSpec
from paradec_jax.decode.canvas import choose as rules
from paradec_jax.decode.machine.rows import begin

# The choice is one pure function


def deciding(rule: str, vocab: int = 11, **options: Any) -> Any:
    """A decoder whose last token is the mask."""
    spec = TokenSpec(mask=vocab - 1, alignment="own")
    return decode.BlockDenoising(
        StubDenoiser(vocab_size=vocab, block=4), 8, spec, rule=rule, **options
    )


@functools.partial(jax.jit, static_argnums=0)
def chosen(decoder, logits, masked, at, step, keys, knobs):
    """What rows with these keys choose."""
    request = decode.make_request(np.zeros((len(step), 1), int), max_new_tokens=1, keys=keys)
    return decoder.choose(logits, masked, at, step, begin(request, 2, 0), knobs)


@over(rules.RULES, {*rules.RULES} - {"random", "threshold"}, "rule")
def test_a_choice_depends_on_state_step_and_keys_alone(rule):
    """Folded candidates choose what each chooses alone; another step draws with other noise."""
    logits = jax.random.normal(jax.random.key(0), (3, 4, 11))
    masked = jnp.asarray([[True, False, True, True], [True] * 4, [False, True, True, False]])
    at = jnp.asarray([8, 4, 8])
    step, keys = jnp.asarray([1, 0, 2]), jax.random.split(jax.random.key(1), 3)
    knobs = rules.DenoisingKnobs(temperature=0.8, top_k=7, top_p=0.9)
    choose = functools.partial(chosen, deciding(rule))
    whole = choose(logits, masked, at, step, keys, knobs)
    assert (np.asarray(whole.where) <= np.asarray(masked)).all() and whole.where.any(axis=1).all()
    assert (whole.tokens != 10).all() and ((whole.scores > 0) & (whole.scores < 1)).all()
    for i in range(3):
        alone = choose(*(x[i : i + 1] for x in (logits, masked, at, step, keys)), knobs)
        assert (alone.where[0] == whole.where[i]).all() and (
            alone.tokens[0] == whole.tokens[i]
        ).all()
        np.testing.assert_allclose(alone.scores[0], whole.scores[i], rtol=1e-6)
    later = choose(logits, masked, at, step + 1, keys, knobs)
    assert (later.tokens != whole.tokens).any()


# p = .5, .3, .15, .05, the same at temperature 0.7, and that after a top-p of 0.9.
SHARES = {
    "raw": [0.5, 0.3, 0.15, 0.05],
    "tempered": [0.588797, 0.283817, 0.105438, 0.021948],
    "filtered": [0.602010, 0.290186, 0.107804, 0.0],
}
RAW = ("threshold", "factor", "certain")
PAPERS = {rule: "raw" if rule in RAW else "tempered" for rule in rules.RULES}


def shares(decoder, knobs, count=64):
    """The confidence of each token that some of many rows draw."""
    logits = jnp.append(jnp.log(jnp.asarray(SHARES["raw"])), -30.0)
    keys, zeros = jax.random.split(jax.random.key(0), count), jnp.zeros(count, jnp.int32)
    where = jnp.ones((count, 1), bool)
    choice = chosen(decoder, jnp.tile(logits, (count, 1, 1)), where, zeros, zeros, keys, knobs)
    return dict(zip(choice.tokens[:, 0].tolist(), choice.scores[:, 0].tolist(), strict=True))


ASKED = [(rule, confidence) for rule in rules.RULES for confidence in (None, *SHARES)]


@pytest.mark.parametrize(
    ("rule", "confidence"),
    [case if case[0] == "threshold" or not case[1] else slow(*case) for case in ASKED],
)
def test_a_confidence_is_that_of_the_paper_or_the_one_asked_for(rule, confidence):
    """Fast-dLLM and d3LLM score the raw softmax, SDAR and JetEngine the tempered one, before truncation."""
    decoder, knobs = deciding(rule, vocab=5, confidence=confidence), rules.DenoisingKnobs
    found = shares(decoder, knobs(temperature=0.7, top_p=0.9))
    assert found.keys() == {0, 1, 2}, "the fourth is drawn only without top-p"
    for token, share in found.items():
        assert share == pytest.approx(SHARES[confidence or PAPERS[rule]][token], abs=2e-6)
    for plain in (knobs(temperature=0.0), knobs(temperature=1.0)):
        for token, share in shares(decoder, plain).items():
            assert share == pytest.approx(SHARES["raw"][token], abs=2e-6)


def test_what_passes_a_bound_depends_on_the_confidence():
    """A threshold of 0.55, between .5 and .589; 2 nats for two positions, of .990 each tempered, of
    1.142 raw.
    """
    logits = jnp.tile(jnp.append(jnp.log(jnp.asarray(SHARES["raw"])), -30.0), (1, 2, 1))
    zero = jnp.zeros(1, jnp.int32)
    asked = (jnp.ones((1, 2), bool), zero, zero, jax.random.split(jax.random.key(0), 1))
    for rule, knob, bound in (("threshold", "threshold", 0.55), ("entropy", "entropy", 2.0)):
        knobs = rules.DenoisingKnobs(temperature=0.7, top_k=1, **{knob: bound})
        for confidence, count in (("raw", 1), ("tempered", 2), ("filtered", 2)):
            decoder = deciding(rule, vocab=5, confidence=confidence)
            assert chosen(decoder, logits, *asked, knobs).where.sum() == count


def test_the_mask_has_its_share_and_is_never_drawn():
    logits, zero = jnp.asarray([[[2.0, 1.0, 0.0, 3.0]]]), jnp.zeros(1, jnp.int32)
    keys = jax.random.split(jax.random.key(0), 1)
    for temperature in (0.0, 0.5, 2.0):
        knobs = rules.DenoisingKnobs(temperature=temperature, top_k=1)
        choice = chosen(
            deciding("static", 4), logits, jnp.ones((1, 1), bool), zero, zero, keys, knobs
        )
        want = jax.nn.softmax(logits / (temperature or 1.0))[0, 0, 0]
        assert choice.tokens.tolist() == [[0]], "the mask is the most probable one"
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
    request = decode.make_request(
        np.zeros((draws, given), int), max_new_tokens=4 - given, keys=keys
    )
    return np.asarray(
        decode.run(decoder, None, request, decoder.Knobs(temperature=1.0, **knobs)).tokens
    )


def in_parallel(joint: JointBlocks) -> np.ndarray:
    """The law where a step reveals a whole block: the product of its marginals, given the blocks
    before.
    """
    every, law = joint.texts, joint.law
    found = np.ones(len(every))
    for i, text in enumerate(every):
        for p in range(joint.length):
            start = p // joint.block * joint.block
            before = (every[:, :start] == text[:start]).all(1)
            found[i] *= law[before & (every[:, p] == text[p])].sum() / law[before].sum()
    return found


@pytest.mark.parametrize(
    ("draws", "fused"), [(4_000, True), *(slow(100_000, fused) for fused in (True, False))]
)
def test_random_positions_one_at_a_time_have_the_joint_law(draws, fused):
    found = texts(draws, rule="random", fuse_store=fused, fuse_prompt=fused)
    assert excess(found, JOINT.law, 3) < 4
    assert excess(found, in_parallel(JOINT), 3) > 20, "another law would be noticed"


@pytest.mark.slow
def test_other_laws():
    """Left to right keeps the law too; a whole block a step has that of its marginals; the surest
    first has none.
    """
    assert excess(texts(20_000, rule="sequential"), JOINT.law, 3) < 4
    assert excess(texts(20_000, rule="random", knobs={"steps": 1}), in_parallel(JOINT), 3) < 4
    assert excess(texts(20_000, rule="static"), JOINT.law, 3) > 20


@pytest.mark.slow
def test_where_logits_are_about_the_next_position_the_order_matters():
    """A block's first row is that of the block before, which sees nothing of the block.

    From left to right that loses nothing. Where the second symbol of a block comes first, half of
    the time at random, the first one is drawn as if it had not.
    """
    network, start = dataclasses.replace(JOINT, alignment="next"), JOINT.texts[:, 0] == 0
    joint, apart = (
        np.where(start, law, 0.0) / law[start].sum() for law in (JOINT.law, in_parallel(JOINT))
    )
    found = texts(20_000, network, given=1, rule="sequential")
    assert excess(found, joint, 3) < 4 and excess(found, apart, 3) > 20
    # The first block has one symbol to reveal: beside what was given, both laws agree there.
    of_block = [joint.reshape(3, 3, 9).sum(2), apart.reshape(3, 3, 9).sum(2)]
    ratio = np.divide(of_block[0], of_block[1], out=np.zeros((3, 3)), where=of_block[1] > 0)
    apart = (apart.reshape(3, 3, 9) * ratio[..., None]).ravel()
    found = texts(20_000, network, given=1, rule="random")
    assert excess(found, (joint + apart) / 2, 3) < 4 and excess(found, joint, 3) > 20
