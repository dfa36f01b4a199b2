"""Recorded runs of the original programs of baselines: prompt lookup and lookahead, call by call.

Names, settings and shapes come from each part's traces.json and arrays.
"""

import json
from functools import cache

import jax.numpy as jnp
import numpy as np
from marks import over
from recorded import GOLDEN, arrays_in, call, equal, imported

from experiments import replicas
from paradec_jax import decode
from paradec_jax.convert.engine import read_json
from paradec_jax.decode.causal.lookahead import RecordedLookahead
from paradec_jax.decode.causal.prompt_lookup import find_draft

FOLDER = GOLDEN / "baselines"
DUMMY = 100  # what the original notebook of prompt lookup drafts where it finds nothing


def traces(part: str) -> dict[str, dict]:
    path = FOLDER / part / "traces.json"
    return json.loads(path.read_text()) if path.is_file() else {}


def arrays(part: str, name: str) -> dict[str, np.ndarray]:
    return arrays_in(FOLDER / part / f"{name}.npz")


@cache
def model(part: str):
    """Network, parameters and end-of-text tokens of a folder of the `llama` layout, as the
    converter imports them.
    """
    fields = read_json(FOLDER / part / "config.json")
    assert fields["model_type"] == "llama", f"{part} holds a model of type {fields['model_type']}"
    network, params, spec = imported(FOLDER / part)
    return network, params, spec.stop


def request_of(part: str, trace: dict, prompt: np.ndarray, **recorded) -> decode.Request:
    return decode.make_request(
        prompt,
        max_new_tokens=trace["max_new_tokens"],
        stop=model(part)[2],
        recorded=RecordedLookahead(**recorded) if recorded else None,
    )


def bound(part: str, trace: dict, decoder):
    return decoder.bind(model(part)[0], trace["prompt_length"] + trace["max_new_tokens"])


def check_result(result: decode.Decoded, trace: dict, want: dict[str, np.ndarray]):
    length = int(result.lengths[0])
    equal(result.tokens[0, :length], want["sequence"])
    equal(want["greedy"][0, :length], want["sequence"])
    assert int(result.network_calls[0]) == trace["forwards"]
    assert int(result.generated[0]) == trace["new_tokens"]
    reason = decode.Reason.STOP if trace["stopped_by_eos"] else decode.Reason.BUDGET
    assert int(result.reasons[0]) == reason


def real(recorded: np.ndarray) -> list[int]:
    """A recorded row without its padding."""
    return recorded[recorded >= 0].tolist()


def test_folder_holds_recorded_runs():
    for part in ("prompt_lookup", "lookahead"):
        assert traces(part), f"{FOLDER / part} has no traces.json with runs"


# Prompt lookup


def test_candidates():
    case = arrays("prompt_lookup", "candidates")
    settings = np.stack([case["max_ngram"], case["num_pred"]], axis=1)
    for max_ngram, num_pred in np.unique(settings, axis=0).tolist():
        of = (settings == (max_ngram, num_pred)).all(axis=1)
        ids, lengths = jnp.asarray(case["ids"]), jnp.asarray(case["length"])
        drafts, found = (np.asarray(x) for x in find_draft(ids, lengths, max_ngram, num_pred))
        equal(num_pred * found[of], case["candidate_length"][of])
        for draft, there, want in zip(drafts[of], found[of], case["candidate"][of], strict=True):
            assert draft[: num_pred * there].tolist() == real(want)


def lookup_of(trace: dict):
    return replicas.ReleasedPromptLookup(
        **{n: trace[n] for n in ("max_ngram", "num_pred")}, dummy=DUMMY
    )


@over(traces("prompt_lookup"))
def test_prompt_lookup(name):
    part = "prompt_lookup"
    trace, want = traces(part)[name], arrays(part, f"trace_{name}")
    decoder = bound(part, trace, lookup_of(trace))
    request = request_of(part, trace, want["prompt"])
    first, there = decoder.draft(request.tokens, request.lengths)
    lengths, drafts, found = [trace["prompt_length"]], [np.asarray(first[0])], [int(there[0]) > 1]
    for state, info in decode.stream(decoder, model(part)[1], request):
        lengths.append(int(state.rows.length[0]))
        if info is not None:
            drafts.append(np.asarray(info.draft[0]))
            found.append(int(info.drafted[0]) > 1)
        result = decoder.finish(state)
    equal(lengths, want["length_before_step"])
    equal(trace["num_pred"] * np.array(found), want["draft_length"])
    equal(np.where(np.array(found)[:, None], drafts, -1), want["drafts"])
    check_result(result, trace, want)


# Lookahead


def check_window(state, columns: int, want: dict[str, np.ndarray], t: int):
    """Levels, newest token and fill level before call t."""
    filled = int(state.levels.filled[0])
    assert filled == want["fill_level"][t]
    levels = np.asarray(state.levels.tokens[0])
    assert levels[0, 0] == want["last_input_id"][t]
    ours = [levels[i, int(i == 0) : columns - filled].tolist() for i in range(filled + 1)]
    assert ours == [real(row) for row in want["window"][t] if (row >= 0).any()]


@over(traces("lookahead"))
def test_lookahead(name):
    part = "lookahead"
    trace, want = traces(part)[name], arrays(part, f"trace_{name}")
    columns = trace["LEVEL"] + trace["WINDOW_SIZE"] - 2
    kind = replicas.ReleasedLookahead if trace["POOL_FROM_PROMPT"] else decode.Lookahead
    decoder = kind(
        level=trace["LEVEL"], window=trace["WINDOW_SIZE"], guesses=trace["GUESS_SET_SIZE"]
    )
    decoder, params = bound(part, trace, decoder), model(part)[1]
    window = jnp.asarray(real(want["window"][0, 0]), jnp.int32)
    request = request_of(part, trace, want["prompt"], window=window)
    assert want["num_input_ids"].tolist() == [trace["prompt_length"]] + [1] * (
        trace["forwards"] - 1
    )

    state = call(decoder, "init", params, request, decoder.Knobs())
    assert want["last_input_id"][0] == want["prompt"][0, -1] and want["fill_level"][0] == 0
    assert int(state.rows.tokens[0, trace["prompt_length"]]) == want["next_token"][0]
    if trace["LEVEL"] > 2:
        grown = np.asarray(state.levels.tokens[0, 1, : columns - 1]).tolist()
        assert grown == real(want["window_argmax"][0])
    for t in range(1, trace["forwards"]):
        assert not state.rows.done[0], f"stopped before call {t}"
        check_window(state, columns, want, t)
        width = columns - int(state.levels.filled[0])
        state, seen = call(decoder, "step", params, state, decoder.Knobs())
        there = np.asarray(seen.guesses[0, :, 0] >= 0)
        assert np.asarray(seen.guesses[0])[there].ravel().tolist() == real(want["guesses"][t])
        assert np.asarray(seen.after[0])[there].ravel().tolist() == real(want["guess_argmax"][t])
        assert int(seen.first[0]) == want["next_token"][t]
        assert np.asarray(seen.newest[0, :width]).tolist() == real(want["window_argmax"][t])
    assert state.rows.done[0]
    check_result(decoder.finish(state), trace, want)
