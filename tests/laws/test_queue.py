"""A queue through few rows: no answer lost, doubled or changed, for every decoder."""

import numpy as np
import pytest
from decoder_rows import BUDGET
from decoders import ROWS
from marks import over
from results import listed, rows_of
from stubs import tiny_network, tiny_params
from tracing import nothing_is_traced

from paradec_jax import decode

COUNT = 12


def prompts(vocabulary: int = 9):
    """As wide as those of other laws, whose programs three of them share."""
    rng = np.random.default_rng(0)
    tokens = [rng.integers(1, vocabulary, rng.integers(1, 6)).tolist() for _ in range(COUNT)]
    budgets = rng.integers(1, BUDGET + 1, COUNT)
    return decode.make_request(tokens, max_new_tokens=budgets, stop=(0,))


QUICK = (
    "autoregressive",
    "wavefront",
    "masked",
    "block",
)


@over(ROWS, ROWS.keys() - QUICK)
def test_every_prompt_gets_what_it_gets_in_one_batch(name):
    row = ROWS[name]
    decoder, knobs, request = row.decoder(), row.values(temperature=3.0), prompts()
    params = decoder.prepare(row.params)
    served = decode.serve(decoder, params, request, knobs, rows=2, every=2)
    for i in range(0, COUNT, 3):
        together = decode.run(decoder, row.params, request.take([i, i + 1, i + 2]), knobs)
        assert row.own(rows_of(served.decoded, i, i + 1, i + 2)) == row.own(listed(together))
    assert 0 < served.occupancy <= 1


@pytest.mark.slow
@pytest.mark.parametrize(("cache", "rows"), [("shared", 4), ("shared", 64), ("full", 4)])
def test_rows_of_a_model(cache, rows):
    network = tiny_network(cache)
    decoder = decode.Static(network, 20, recurrence=2)
    request = prompts(network.vocab_size)
    together = listed(decode.run(decoder, tiny_params(), request))
    served = decode.serve(decoder, tiny_params(), request, rows=rows, every=3)
    assert listed(served.decoded)["tokens"] == together["tokens"]


@pytest.mark.slow
def test_busy_rows_need_fewer_steps_than_fixed_batches():
    row = ROWS["autoregressive"]
    request = prompts()
    served = decode.serve(row.decoder(), None, request, row.values(), rows=4, every=1)
    fixed = 0
    for start in range(0, COUNT, 4):
        some = request.take([*range(start, min(start + 4, COUNT))])
        fixed += int(decode.run(row.decoder(), None, some, row.values()).network_calls.max()) - 1
    assert served.steps < fixed
    # the first token of each comes with its prompt
    generated = int(served.decoded.generated.sum()) - COUNT
    assert served.occupancy == pytest.approx(generated / (4 * served.steps), abs=0.05)


@over(["wavefront"])
def test_groups_share_programs(name):
    """Those of the law of every prompt."""
    row, request = ROWS[name], prompts()
    decode.serve(row.decoder(), None, request, row.values(), rows=2, every=2)
    with nothing_is_traced(row.kind):
        decode.serve(row.decoder(), None, request, row.values(exit_threshold=0.5), rows=2, every=5)
