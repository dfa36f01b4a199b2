"""Known answers and honest counts (law 4), for every row of the table of decoders."""

from collections import Counter

import pytest
from decoder_rows import BUDGET
from decoders import BY_CLASS, COUNTED, EVERY, ROWS, alone
from stubs import PROMPTS, tiny_request

from paradec_jax import decode


@EVERY
def test_tokens_are_the_known_ones(name):
    row = ROWS[name]
    if row.recurrence is None:
        pytest.skip("positions of this row end at a number of recurrences that varies")
    completions = decode.run(
        row.decoder(), row.params, tiny_request(BUDGET), row.values()
    ).completions()
    if row.overruns:
        assert all(len(tokens) >= BUDGET for tokens in completions)
        completions = [tokens[:BUDGET] for tokens in completions]
    assert completions == [row.expected(prompt, BUDGET) for prompt in PROMPTS]


@COUNTED
def test_counts_are_the_known_ones(name):
    row = ROWS[name]
    result = decode.run(row.decoder(), row.params, tiny_request((BUDGET, 1, 6)), row.values())
    counts = zip(*(result.counts[name].tolist() for name in names_of(row, result)), strict=True)
    stub = row.network()
    assert list(counts) == [
        row.count(stub, len(p), n) for p, n in zip(PROMPTS, (BUDGET, 1, 6), strict=True)
    ]


@BY_CLASS
def test_counts_are_what_really_ran(name):
    for result, ran in alone(name):
        calls, _, *declared = names_of(ROWS[name], result)
        assert ran == Counter(
            {counter: int(result.counts[counter][0]) for counter in (calls, *declared)}
        )


def names_of(row, result) -> list[str]:
    """Calls, positions, and what the networks declare."""
    declared = [
        counter for network in row.decoder().networks.values() for counter in network.counters
    ]
    assert sorted(result.counts) == sorted(["network_calls", "positions", *declared])
    return ["network_calls", "positions", *declared]
