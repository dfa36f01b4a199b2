"""Laws of every decoder: drivers agree, rows are independent and rest when finished, one program serves all knobs.

The decoders are the rows of `decoders.ROWS`, on stub networks. What they must produce there is in `test_counts.py`
and `test_stops.py`, what they must refuse in `test_refusals.py`; `test_equivalences.py` has laws on small models.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoders import BUDGET, EVERY, ROWS, SIZE, STEPS
from results import listed, rows_of, take

from paradec_jax import decode
from paradec_jax.decode import drive
from paradec_jax.testing import PROMPTS, tiny_request


def whole(state: Any) -> Any:
    """Records a state as it is."""
    return state


def test_every_decoder_has_a_row():
    offered = {value for name in decode.__all__ if hasattr(value := getattr(decode, name), "Knobs")}
    offered.discard(decode.Decoder)
    assert offered == {row.kind for row in ROWS.values()}


# 1. Drivers agree


@EVERY
def test_drivers_agree(name):
    row = ROWS[name]
    decoder, knobs, request = (
        row.decoder(),
        row.values(temperature=3.0),
        tiny_request((BUDGET, 2, 5), stop=(0,)),
    )
    result = listed(decode.run(decoder, None, request, knobs))
    traced, states = decode.trace(decoder, None, request, knobs, n=STEPS, record=whole)
    assert listed(traced) == result
    rollout = jax.jit(lambda r, k: decode.rollout(decoder, None, r, k, n=STEPS, segment=4, record=whole))
    rolled, rolled_states = rollout(request, knobs)
    assert listed(rolled) == result
    jax.tree.map(
        np.testing.assert_array_equal, strip_keys(states.progress), strip_keys(rolled_states.progress)
    )
    streamed = [
        listed(decoder.finish(state)) for state in decode.stream(decoder, None, request, knobs, every=2)
    ]
    assert streamed[-1] == result
    lengths = np.array([state["lengths"] for state in streamed])
    assert (np.diff(lengths, axis=0) >= 0).all()
    assert (np.array(result["reasons"]) > 0).all()


@EVERY
def test_greedy_programs_are_those_of_temperature_0(name):
    row = ROWS[name]
    request = tiny_request((BUDGET, 2, 5), stop=(0,))
    result = listed(decode.run(row.decoder(), None, request, row.values()))
    assert listed(decode.run(row.decoder(greedy=True), None, request, row.values())) == result
    with pytest.raises(ValueError, match=r"is greedy, so temperature must be 0, not 3\.0"):
        decode.run(row.decoder(greedy=True), None, request, row.values(temperature=3.0))


# 3. Row independence, and rows that are finished


@EVERY
def test_rows_are_independent(name):
    row = ROWS[name]
    knobs = row.values(temperature=3.0)
    request = tiny_request((BUDGET, 2, 6), stop=(0,))
    together = decode.run(row.decoder(), None, request, knobs)
    longer = dataclasses.replace(request, tokens=jnp.pad(request.tokens, [(0, 0), (0, 3)], constant_values=9))
    longer = decode.run(row.decoder(size=SIZE + 7), None, longer, knobs)
    assert rows_of(longer, 0, 1, 2, columns=together.tokens.shape[1]) == listed(together)
    swapped = decode.run(row.decoder(), None, take(request, 2, 0, 1), knobs)
    assert rows_of(swapped, 1, 2, 0) == listed(together)
    alone = row.decoder()
    for i in range(len(PROMPTS)):
        assert listed(decode.run(alone, None, take(request, i), knobs)) == rows_of(together, i)


@EVERY
def test_finished_rows_do_not_move(name):
    row = ROWS[name]
    decoder, request = row.decoder(), tiny_request((BUDGET, 1, 4))
    _, states = decode.trace(decoder, None, request, row.values(), n=STEPS, record=whole)
    states = jax.tree.map(np.asarray, dataclasses.replace(states, progress=strip_keys(states.progress)))
    done = states.progress.reason > 0
    assert (np.diff(done.astype(int), axis=0) >= 0).all() and done[-1].all() and not done[0].all()
    for i in range(len(PROMPTS)):
        since = int(np.argmax(done[:, i]))
        length = states.progress.length[since, i]
        progress = jax.tree.map(lambda x, since=since, i=i: x[since:, i], states.progress)
        for field in ("length", "reason", "network_calls", "positions", "recurrences"):
            values = getattr(progress, field)
            assert (values == values[0]).all(), field
        assert (progress.tokens[:, :length] == progress.tokens[0, :length]).all()
        # Trusted entries are those before the newest token.
        trusted = jax.tree.map(lambda x, since=since, i=i, n=length: x[since:, i, : n - 1], states.cache)
        jax.tree.map(lambda x: np.testing.assert_array_equal(x, np.broadcast_to(x[:1], x.shape)), trusted)


def strip_keys(progress: Any) -> Any:
    return dataclasses.replace(progress, keys=None)


# 5. Compile once


@EVERY
def test_knobs_and_equal_decoders_share_a_program(name):
    row = ROWS[name]
    request = tiny_request(BUDGET)
    decode.run(row.decoder(), None, request, row.values())
    compiled = drive._run._cache_size()
    defaults = {f.name: getattr(row.values(), f.name) for f in dataclasses.fields(row.kind.Knobs)}
    for field, default in defaults.items():
        changed = default + 1 if isinstance(default, int) else 0.5
        for value in (changed, np.asarray(changed), jnp.asarray(changed)):
            decode.run(row.decoder(row.network()), None, request, row.values(**{field: value}))
    for seed in range(5):
        again = dataclasses.replace(row.decoder(dataclasses.replace(row.network())))
        decode.run(again, None, tiny_request((3, 4, 5), seed=seed, stop=(seed,)), row.values())
        decode.run(again, None, request, row.values(), max_steps=seed)
    assert drive._run._cache_size() == compiled


@EVERY
def test_knobs_can_be_mapped(name):
    row = ROWS[name]
    decoder, request = row.decoder(), tiny_request(BUDGET)
    temperatures = jnp.array([0.0, 0.5, 2.0])
    mapped = jax.vmap(lambda t: decode.run(decoder, None, request, row.values(temperature=t)))(temperatures)
    for i, temperature in enumerate(temperatures):
        single = decode.run(decoder, None, request, row.values(temperature=temperature))
        assert listed(jax.tree.map(lambda x, i=i: x[i], mapped)) == listed(single)
