"""Known answers and honest counts (law 4), for every row of the table of decoders."""

import collections

import jax
import pytest
from decoders import BUDGET, COUNTED, EVERY, ROWS
from results import listed, take

from paradec_jax import decode
from paradec_jax.testing import PROMPTS, tiny_request


@EVERY
def test_tokens_are_the_known_ones(name):
    row = ROWS[name]
    if row.recurrence is None:
        pytest.skip("positions of this row end at a number of recurrences that varies")
    result = decode.run(row.decoder(), None, tiny_request(BUDGET), row.values())
    stub = row.network()
    recurrence = row.recurrence if name != "adaptive-latent" else 1_000
    completions = result.completions()
    if row.faithful:
        assert all(len(tokens) >= BUDGET for tokens in completions)
        completions = [tokens[:BUDGET] for tokens in completions]
    assert completions == [stub.expected(prompt, BUDGET, recurrence) for prompt in PROMPTS]


@COUNTED
def test_counts_are_the_known_ones(name):
    row = ROWS[name]
    result = decode.run(row.decoder(), None, tiny_request((BUDGET, 1, 6)), row.values())
    stub = row.network()
    expected = [row.count(stub, len(p), n) for p, n in zip(PROMPTS, (BUDGET, 1, 6), strict=True)]
    assert list(zip(*(listed(result)[f] for f in ("network_calls", "positions", "recurrences")))) == expected  # noqa: B905


@EVERY
def test_counts_are_what_really_ran(name):
    row = ROWS[name]
    ran: collections.Counter = collections.Counter()

    def probe(part: str) -> None:
        ran[part] += 1

    request = take(tiny_request(BUDGET), 1)
    result = decode.run(row.decoder(row.network(probe=probe)), None, request, row.values())
    jax.effects_barrier()
    assert (ran["embed"], ran["iterate"]) == (int(result.network_calls[0]), int(result.recurrences[0]))
