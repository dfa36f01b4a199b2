"""Why a row ends: stop tokens, budgets, a bound on steps, a full buffer, the caller; and that it
ends at all.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
from decoder_rows import BUDGET, SIZE, STEPS
from decoders import CUT, EACH_CLASS, EVERY, ROWS, SAMPLED, traced
from marks import over
from results import listed
from stubs import PROMPTS, Spoilt, StubNetwork, tiny_request
from stubs.tiny import NEVER

from paradec_jax import decode


@CUT
def test_stops_and_budgets_of_each_row(name):
    row = ROWS[name]
    decoder, knobs = row.decoder(), row.values()
    free = decode.run(decoder, row.params, tiny_request(BUDGET), knobs).completions()
    budgets, stops = (3, BUDGET, 5), (free[0][-1], free[1][4], -1)
    request = dataclasses.replace(tiny_request(budgets), stop=jnp.array(stops, jnp.int32)[:, None])
    result = decode.run(decoder, row.params, request, knobs)
    for tokens, got, budget, stop, reason in zip(
        free, result.completions(), budgets, stops, result.reasons, strict=True
    ):
        end = tokens.index(stop) + 1 if stop in tokens else BUDGET
        assert got == tokens[: min(budget, end)]
        assert reason == (decode.Reason.STOP if end <= budget else decode.Reason.BUDGET)
    tokens = np.asarray(result.tokens)
    for i, end in enumerate(np.asarray(result.lengths)):
        assert (tokens[i, end:] == decoder.spec.pad).all()


LEAPING = (
    "speculative",
    "wavefront-bursts",
    "prompt-lookup",
    "lookahead",
    "jacobi",
    "jacobi-blocks",
)


@over(LEAPING, ("wavefront-bursts", "prompt-lookup", "jacobi-blocks"))
def test_a_commit_is_cut_in_its_middle(name):
    """A stop token, or the end of the budget, inside several tokens that one step commits."""
    row = ROWS[name]
    stub = row.network(**{"errs": False} if row.net is StubNetwork else {})
    decoder = row.decoder(stub)
    _, (states, *_) = traced(name, BUDGET, stop=(NEVER,), network=stub)
    lengths = [len(PROMPTS[0]) + 1, *np.asarray(states.rows.length)[:, 0].tolist()]
    leap = next(i for i in range(STEPS) if lengths[i + 1] - lengths[i] >= 3)
    inside = lengths[leap] + 1 - len(PROMPTS[0])  # index of the second token of that commit
    want = stub.expected(PROMPTS[0], BUDGET)
    short = decode.run(decoder, row.params, tiny_request((inside + 1, 1, 1)), row.values())
    assert short.completions()[0] == want[: inside + 1] and short.reasons[0] == decode.Reason.BUDGET
    request = tiny_request(BUDGET, stop=(want[inside],))
    stopped = decode.run(decoder, row.params, request, row.values())
    assert stopped.completions()[0] == want[: want.index(want[inside]) + 1]
    assert stopped.reasons[0] == decode.Reason.STOP


@CUT
def test_max_steps_and_a_full_buffer(name):
    row = ROWS[name]
    decoder, knobs, request = row.decoder(), row.values(), tiny_request(BUDGET)
    free = decode.run(decoder, row.params, request, knobs)
    for steps in (0, 1, 3):
        cut = decode.run(decoder, row.params, request, knobs, max_steps=steps)
        for some, every in zip(cut.completions(), free.completions(), strict=True):
            assert some == every[: len(some)] and len(some) >= row.first[1]
        if steps == 0:
            assert cut.network_calls.tolist() == [row.first[0]] * len(PROMPTS)
            assert (cut.reasons == decode.Reason.RUNNING).all()
    full = decode.run(decoder, row.params, tiny_request(1_000), knobs)
    assert full.lengths.tolist() == [SIZE] * len(PROMPTS)
    assert (full.reasons == decode.Reason.BUDGET).all()


@EACH_CLASS
def test_the_caller_may_interrupt(name):
    row = ROWS[name]
    decoder = row.decoder()

    least = 0 if decoder.any_order else 4  # a canvas may be committed all at once

    def interrupt(state) -> np.ndarray:
        rows = state.rows
        written = rows.length - rows.prompt_lengths
        enough = rows.counts["network_calls"] >= 1 if decoder.any_order else written >= least
        return np.asarray(enough) & [True, False]

    request = tiny_request(BUDGET).take([0, 1])
    params = decoder.prepare(row.params)
    *_, (last, _) = decode.stream(decoder, params, request, row.values(), interrupt=interrupt)
    result = decoder.finish(last)
    assert result.reasons.tolist() == [decode.Reason.CALLER, decode.Reason.BUDGET]
    assert least <= result.generated[0] < BUDGET and (result.generated[1:] >= BUDGET).all()


# Scores that are no numbers, and temperatures near 0


BROKEN = {
    "NaN": Spoilt(shift=np.float32(np.nan), state=np.float32(np.nan)),
    "inf": Spoilt(shift=np.float32(np.inf), state=np.float32(np.inf)),
    "-inf": Spoilt(shift=np.float32(-np.inf), state=np.float32(-np.inf)),
    "equal": Spoilt(scale=np.float32(0)),
}
COLD = (1e-7, 1e-8, 1e-9, 1e-12, 1e-20, 1e-30, 1e-36, 1e-38, 1e-40, 1e-45)
# logits of some tens that no division leaves round
LARGE = Spoilt(scale=np.float32(4.7), shift=np.float32(7.3))


@EVERY
def test_every_row_ends_whatever_the_scores_are(name):
    row = ROWS[name]
    decoder, news = row.decoder(), (BUDGET, 2, 5)
    most = np.array([row.most(new) for new in news])
    further = row.kind.further_networks
    cases = {**BROKEN, "head NaN": Spoilt()} if further else BROKEN
    for said, broken in cases.items():
        heads = broken if said in BROKEN else BROKEN["NaN"]
        params = row.spoilt(broken, **dict.fromkeys(further, heads))
        for temperature in (0.0, 3.0):
            knobs = row.values(temperature=temperature)
            request = tiny_request(news, stop=(0,) if said == "equal" else (-1,))
            result = decode.run(decoder, params, request, knobs, max_steps=int(most.max()))
            assert (np.asarray(result.reasons) > 0).all(), (said, temperature)
            assert (np.asarray(result.network_calls) <= most).all(), (said, temperature)


@SAMPLED
def test_a_temperature_near_0_is_0(name):
    row = ROWS[name]
    decoder, request = row.decoder(), tiny_request((BUDGET, 2, 5), stop=(0,))
    params = row.spoilt(LARGE)
    want = listed(decode.run(decoder, params, request, row.values(temperature=0.0)))
    for temperature in COLD:
        found = listed(decode.run(decoder, params, request, row.values(temperature=temperature)))
        assert found == want, temperature
