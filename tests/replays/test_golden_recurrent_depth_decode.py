"""Recorded decoding of the original recurrent-depth program, adaptive and speculative; what filters
leave.
"""

from itertools import islice

import jax
import jax.numpy as jnp
import numpy as np
from marks import over
from recorded import call
from recorded_recurrent_depth import (
    arrays,
    assert_close,
    cases,
    network,
    params,
    pools,
    row,
    sampling_of,
)

from experiments import replicas
from paradec_jax import decode
from paradec_jax.decode.recurrent.latents import RecordedLatents
from paradec_jax.decode.rules.sampling import filtered_probabilities


def decoder_of(kind: type, case: dict, **options):
    """A decoder and its request; cases that differ in traced values alone share its program."""
    net = network(case.get("cache_lookup_strategy", "full"), case["num_steps"])
    size = min(net.max_length, len(pools()["state_pool"]))
    continuous = case.get("continuous_compute", False)
    return kind(net, size, continuous=continuous, top_p_rule="drop", **options)


def request_of(case: dict, extra: int = 0) -> decode.Request:
    recorded = RecordedLatents(
        states=jnp.asarray(pools()["state_pool"]),
        uniforms=jnp.asarray(pools()["uniform_ar"], jnp.float32),
    )
    stop = case.get("eos_token_id")
    return decode.make_request(
        pools()[f"prompt_{case['prompt']}"][None],
        max_new_tokens=case["max_new_tokens"] + extra,
        stop=() if stop is None else tuple(np.atleast_1d(stop).tolist()),
        recorded=recorded,
    )


@over(cases("static_ar"), argument="case")
def test_static_autoregressive(case):
    decoder = decoder_of(decode.Static, case)
    knobs = decoder.Knobs(init_scale=case.get("init_scale", 1.0), **sampling_of(case))
    result = decode.run(decoder, params(), request_of(case), knobs)
    assert row(result) == arrays("static_ar")[f"tokens_{case['name']}"].tolist()


@over(cases("adaptive"), argument="case")
def test_adaptive(case):
    decoder = decoder_of(
        replicas.ReleasedAdaptive,
        case,
        criterion=case["criterion"],
        max_recurrence=case["num_steps"],
        exit_in_prefill=not case.get("do_not_exit_in_prefill", False),
    )
    threshold = case.get("exit_threshold", "auto")
    knobs = decoder.Knobs(
        exit_threshold=None if threshold == "auto" else threshold,
        min_recurrence=case.get("min_steps", 0),
        check_every=case.get("check_criterion_every_n_steps", 1),
        init_scale=case.get("init_scale", 1.0),
        **sampling_of(case),
    )
    steps, values = [], []
    _, read = call(decoder, "read_prompt", params(), request_of(case), decoder.knobs(knobs))
    for state, info in decode.stream(decoder, params(), request_of(case), knobs):
        info = read if info is None else info
        steps.append(int(info.recurrences[0]))
        values.append(np.asarray(info.exit_values[0]))
        result = jax.tree.map(np.asarray, decoder.finish(state))
    want, name = arrays("adaptive"), case["name"]
    assert row(result) == want[f"tokens_{name}"].tolist()
    assert steps == want[f"steps_{name}"].tolist()
    assert result.counts["recurrences"].tolist() == [sum(steps)]
    if case["criterion"] != "none":
        recorded = want[f"exit_values_{name}"]
        checks = recorded.shape[1]
        measured = np.stack(values)
        assert np.isnan(measured[:, checks:]).all()
        assert np.array_equal(np.isnan(measured[:, :checks]), np.isnan(recorded))
        tolerance = 5e-5 if "entropy" in case["criterion"] else 1e-5
        assert np.nanmax(np.abs(measured[:, :checks] - recorded)) <= tolerance


@over(cases("speculative"), argument="case")
def test_speculative(case):
    lookahead = case["lookahead_for_draft"]
    decoder = decoder_of(
        decode.SelfSpeculative, case, draft_recurrence=case["draft_steps"], lookahead=lookahead
    )
    knobs = decoder.Knobs(
        accept_threshold=case.get("verification_threshold", 1.0),
        init_scale=case.get("init_scale", 1.0),
        **sampling_of(case),
    )
    want, name = arrays("speculative"), case["name"]
    rounds = len(want[f"accepted_{name}"])
    accepted = []
    # The original program does not cut its last round at the budget.
    states = decode.stream(decoder, params(), request_of(case, extra=lookahead), knobs)
    for state, info in islice(states, rounds + 1):
        accepted += [] if info is None else [int(info.accepted[0])]
        result = jax.tree.map(np.asarray, decoder.finish(state))
    assert accepted == want[f"accepted_{name}"].tolist()
    assert row(result) == want[f"tokens_{name}"].tolist()


@over(cases("sampling"), argument="case")
def test_filtered_probabilities(case):
    values = {k: case[k] for k in ("top_k", "top_p", "min_p") if case.get(k) is not None}
    knobs = decode.SamplingKnobs(temperature=case.get("temperature") or 1.0, **values)
    probs = filtered_probabilities(
        jnp.asarray(arrays("sampling")["logits"]), knobs, top_p_rule="drop"
    )
    assert_close(probs, arrays("sampling")[f"probs_{case['case']}"], 2e-6)
