"""Laws of every decoder: drivers agree, rows are independent and rest when finished, one program
serves all knobs.

The decoders are the rows of `decoders.ROWS`, on stub networks. What they must produce there is in
`test_counts.py` and `test_stops.py`, what they must refuse in `test_refusals.py`;
`test_equivalences.py` has laws on small models.
"""

import dataclasses
import importlib
import inspect
import pkgutil
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoder_rows import BUDGET, STEPS
from decoders import (
    BY_CLASS,
    CLASSES,
    EACH_CLASS,
    EACH_SAMPLED_CLASS,
    EVERY,
    NEWS,
    ROWS,
    alone,
    traced,
    without_keys,
)
from results import listed, rows_of
from stubs import PROMPTS, tiny_request
from stubs.tiny import NEVER
from tracing import nothing_is_traced

from experiments import decoders as outside
from experiments import replicas
from paradec_jax import decode
from paradec_jax.decode.machine import drive
from paradec_jax.decode.machine.decoder import DecoderBase
from paradec_jax.decode.machine.knobs import alternatives, unneeded


def test_every_decoder_has_a_row():
    """Every class that the package or `experiments` defines."""
    for package in (decode, outside, replicas):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            importlib.import_module(module.name)
    defined, found = set(), [DecoderBase]
    while found:
        found += (kinds := found.pop().__subclasses__())
        ours = [
            kind for kind in kinds if kind.__module__.startswith(("paradec_jax.", "experiments."))
        ]
        defined |= {kind for kind in ours if not inspect.isabstract(kind)}
    listed_kinds = {row.kind for row in ROWS.values()}
    assert defined <= listed_kinds and len(defined) > 12, defined - listed_kinds
    own = [kind for kind in listed_kinds if not kind.__module__.startswith("experiments.replicas")]
    bases = {base for kind in own for base in kind.__bases__}
    assert all(inspect.isabstract(base) for base in bases), "a decoder subclasses another"


# 1. Drivers agree, and use a key once (law 13)


@BY_CLASS
def test_drivers_agree(name):
    row = ROWS[name]
    request = tiny_request(NEWS, stop=(0,))
    result = listed(decode.run(row.decoder(), row.params, request, row.values(temperature=3.0)))
    assert listed(traced(name, temperature=3.0)[0]) == result
    assert (np.array(result["reasons"]) > 0).all()


@EACH_CLASS
def test_a_rollout_is_a_trace(name):
    row = ROWS[name]
    decoder, request = row.decoder(), tiny_request(NEWS, stop=(0,))
    knobs = decoder.knobs(row.values(temperature=3.0))
    rollout = jax.jit(
        lambda r, k: decode.rollout(decoder, row.params, r, k, n=STEPS, segment=4, record=both)
    )
    rolled, records = rollout(request, knobs)
    result, (states, _, infos) = traced(name, temperature=3.0)
    assert listed(rolled) == listed(result)
    for some, others in zip(records, (states.rows, infos), strict=True):
        some, others = without_keys(some), without_keys(others)
        jax.tree.map(np.testing.assert_array_equal, some, others)


def both(state, info):
    return state.rows, info


@EACH_CLASS
def test_a_stream_is_a_run(name):
    """Of two rows, whose programs the queue shares."""
    row = ROWS[name]
    decoder, knobs = row.decoder(), row.values(temperature=3.0)
    request, params = tiny_request(NEWS, stop=(0,)), decoder.prepare(row.params)
    states, lengths, drafts = [], [], set()
    for state, info in decode.stream(decoder, params, request.take([0, 1]), knobs, every=2):
        assert (info is None) == (not states or jax.tree.leaves(info) == [])
        drafts.add(jax.eval_shape(decoder.drafts, state).shape)
        states.append(listed(drive.finish(decoder, state)))
        lengths.append(states[-1]["lengths"])
    together = decode.run(decoder, row.params, request, knobs)
    assert row.own(states[-1]) == row.own(rows_of(together, 0, 1))
    assert (np.diff(lengths, axis=0) >= 0).all() and len(drafts) == 1 and len(drafts.pop()) == 2


@EACH_SAMPLED_CLASS
def test_greedy_programs_are_those_of_temperature_0(name):
    """However seldom they look whether all rows have stopped."""
    row = ROWS[name]
    request = tiny_request(NEWS, stop=(0,))
    result = listed(decode.run(row.decoder(), row.params, request, row.values()))
    greedy = decode.run(row.decoder(greedy=True), row.params, request, row.values(), every=3)
    assert listed(greedy) == result
    with pytest.raises(ValueError, match=r"is greedy, so temperature must be 0, not 3\.0"):
        decode.run(row.decoder(greedy=True), row.params, request, row.values(temperature=3.0))


# 3. Row independence, and rows that are finished


@BY_CLASS
def test_rows_are_independent(name):
    """At another place of the batch; alone in a longer buffer, after a prompt that is padded
    further.
    """
    row = ROWS[name]
    knobs, request = row.values(temperature=3.0), tiny_request(NEWS, stop=(0,))
    together = decode.run(row.decoder(), row.params, request, knobs)
    swapped = decode.run(row.decoder(), row.params, request.take([2, 0, 1]), knobs)
    assert rows_of(swapped, 1, 2, 0) == listed(together)
    for i, (result, _) in enumerate(alone(name)):
        found = rows_of(result, 0, columns=together.tokens.shape[1])
        assert row.own(found) == row.own(rows_of(together, i))


@BY_CLASS
def test_finished_rows_do_not_move(name):
    states, cached, _ = traced(name, (BUDGET, 1, 4), stop=(NEVER,))[1]
    cache, cached = getattr(states, "cache", ()), np.asarray(cached)
    cache, rows = without_keys(cache), without_keys(states.rows)
    done = rows.reason > 0
    assert (np.diff(done.astype(int), axis=0) >= 0).all() and done[-1].all() and not done[0].all()
    for i in range(len(PROMPTS)):
        since = int(np.argmax(done[:, i]))
        length = rows.length[since, i]
        kept = jax.tree.map(lambda x, since=since, i=i: x[since:, i], rows)
        for values in (kept.length, kept.reason, *kept.counts.values()):
            assert (values == values[0]).all()
        assert (kept.tokens[:, :length] == kept.tokens[0, :length]).all()
        if cached.size:
            assert (cached[since:, i] == cached[since, i]).all() and cached[since, i] <= length
            trusted = jax.tree.map(lambda x, s=since, i=i, n=cached[since, i]: x[s:, i, :n], cache)
            jax.tree.map(
                lambda x: np.testing.assert_array_equal(x, np.broadcast_to(x[:1], x.shape)), trusted
            )


# 5. Compile once


@EVERY
def test_knobs_and_equal_decoders_share_a_program(name):
    row = ROWS[name]
    params, request = row.params, tiny_request(BUDGET, stop=(0,))
    given = {name: 0.5 for name in ALONE if hasattr(row.kind.Knobs, name)}
    row = dataclasses.replace(row, knobs=given | row.knobs)
    decode.run(row.decoder(), params, request, row.values())
    with nothing_is_traced(row.kind):
        for field in dataclasses.fields(row.kind.Knobs):
            if field.name == "temperature" and row.only_greedy:
                continue
            if field.name in unneeded(row.kind.Knobs(), row.decoder()):
                continue
            whole = int in (field.type, *typing.get_args(field.type))
            changed = (row.knobs.get(field.name, field.default) or 1) + 1 if whole else 0.5
            options = alternatives(row.kind.Knobs)[field.name]
            words = next(
                (typing.get_args(x) for x in options if typing.get_origin(x) is typing.Literal), ()
            )
            values = list(words or (changed, *spelled(1, WHOLE if whole else ANY)))
            values += [None] * (type(None) in options and field.name not in ALONE)
            for value in values:
                knobs = row.values(**{field.name: value})
                decode.run(row.decoder(row.network()), params, request, knobs, max_steps=1)
        for seed in range(5):
            again = dataclasses.replace(row.decoder(dataclasses.replace(row.network())))
            decode.run(
                again, params, tiny_request((3, 4, 5), seed=seed, stop=(seed,)), row.values()
            )
            decode.run(again, params, request, row.values(), max_steps=seed)


ALONE = ("repetition_penalty", "noise")  # knobs whose None is another program, without them
WHOLE = (int, np.int64, np.asarray, jnp.asarray)
ANY = (*WHOLE, bool, float, np.float64, jnp.bfloat16, jnp.float32)


def spelled(number, types):
    """The number as a value of each type."""
    return [kind(number) for kind in types]


@EACH_SAMPLED_CLASS
def test_knobs_can_be_mapped(name):
    row = ROWS[name]
    decoder, request = row.decoder(), tiny_request(BUDGET)
    if name == "speculative-denoising":  # whose stub is as sure of all: last bits would decide
        decoder = dataclasses.replace(decoder, order="random")
    temperatures = jnp.array([0.0, 0.5, 2.0])
    mapped = jax.vmap(
        lambda t: decode.run(decoder, row.params, request, row.values(temperature=t))
    )(temperatures)
    for i, temperature in enumerate(temperatures):
        single = decode.run(decoder, row.params, request, row.values(temperature=temperature))
        assert listed(jax.tree.map(lambda x, i=i: x[i], mapped)) == listed(single)


@pytest.mark.parametrize("name", CLASSES)
def test_one_number_for_all_rows(name):
    """A knob a row is refused before anything is traced."""
    row = ROWS[name]
    with nothing_is_traced(row.kind):
        for driver in (decode.run, lambda *given: next(decode.stream(*given))):
            with pytest.raises(
                ValueError, match=r"top_p must be one number for all rows, not of shape \(3,\)"
            ):
                driver(
                    row.decoder(),
                    row.params,
                    tiny_request(BUDGET),
                    row.values(top_p=np.full(3, 0.9)),
                )
