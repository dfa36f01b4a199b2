"""Recorded steps of the original wavefront sampler."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from recorded import arrays_in, call
from recorded_recurrent_depth import (
    ARRAYS,
    FOLDER,
    model,
    network,
    params,
    pools,
    recorded_runs,
    row,
    sampling_of,
)

from experiments import replicas
from paradec_jax import decode

WAVES = {run["name"]: run for run in recorded_runs() if run["kind"] == "wavefront"}
SETTINGS_OF_THE_WAVE = {
    "inner_recurrence": 4,
    "num_steps": 32,
    "exit_t": 0.03,
    "ema_embeds": 0.1,
    "state_noise_mixing": 0.5,
    "dampened_state_mixer": True,
    "sqrt_mixer": False,
    "init_scale": 1.0,
    "headway": 1,
    "max_wavefront": 128,
    "continuous_compute": False,
    "freeze_strategy": "latent-diff",
    "full_prefill": True,
    "max_diffusion_steps": 4096,
    "cache_lookup_strategy": "latest-m4-compress-s4",
}


def wave_of(run: dict):
    """Decoder, request and knobs of a recorded run. One width for all, so that programs are shared."""
    settings = {**SETTINGS_OF_THE_WAVE, **run["settings"]}
    assert settings.keys() == SETTINGS_OF_THE_WAVE.keys()
    generation = {"do_sample": False, **run["generation_config"]}
    pool = pools()
    recorded = replicas.RecordedWave(
        states=jnp.asarray(pool["state_pool"]),
        uniforms=jnp.asarray(pool["uniform_ar"], jnp.float32),
        step_uniforms=jnp.asarray(pool["uniform_wave"], jnp.float32),
        noise=jnp.asarray(pool["noise_pool"]),
        fillers=jnp.asarray(pool["extra_tokens"]),
    )
    stop = generation.get("eos_token_id")
    prompt = pool[f"prompt_{run['prompt']}"]
    request = decode.make_request(
        prompt[None],
        max_new_tokens=run["max_new_tokens"],
        stop=() if stop is None else tuple(np.atleast_1d(stop).tolist()),
        recorded=recorded,
    )
    decoder = replicas.ReleasedWavefront(
        network(settings["cache_lookup_strategy"]),
        min(model().config.max_length, len(pool["state_pool"])),
        inner_recurrence=settings["inner_recurrence"],
        window=max(
            item["max_width"] + item["settings"].get("headway", 1) for item in WAVES.values()
        ),
        headway=settings["headway"],
        recurrence=settings["num_steps"],
        rule=settings["freeze_strategy"],
        continuous=settings["continuous_compute"],
        prefill_prompt=settings["full_prefill"],
        noise_schedule="dampened" if settings["dampened_state_mixer"] else "constant",
        noise_mixing="sqrt" if settings["sqrt_mixer"] else "linear",
    )
    knobs = decoder.Knobs(
        exit_threshold=settings["exit_t"],
        momentum=settings["ema_embeds"],
        noise=settings["state_noise_mixing"],
        max_wavefront=settings["max_wavefront"] if settings["max_wavefront"] > 0 else None,
        max_steps=settings["max_diffusion_steps"],
        init_scale=settings["init_scale"],
        **sampling_of(generation),
    )
    return decoder, request, knobs


def step_of_wave(decoder, params, state, knobs):
    """A step in its two halves: runs that refine alike share the half that takes long to compile."""
    alike = dataclasses.replace(
        decoder, rule="latent-diff", headway=1, continuous=False, prefill_prompt=True, recurrence=1
    )
    refined = call(alike, "refine", params, state, knobs)
    return refined, *call(decoder, "advance", state, refined, knobs)


class Recording:
    """Compares what a step did with the recorded rows, which are padded with -1 or NaN."""

    def __init__(self, run: dict):
        self.arrays = arrays_in(FOLDER / run["file"])
        self.steps = len(self.arrays["cache_index"])

    def exactly(self, t: int, **values):
        for name, value in values.items():
            if name in self.arrays:
                want = self.arrays[name][t]
                want = want[want >= 0] if want.ndim else want
                assert np.array_equal(np.asarray(value), want), (
                    f"{name} of step {t}: {value} for {want}"
                )

    def closely(self, t: int, tolerance: float = ARRAYS, **values):
        for name, value in values.items():
            probe = name not in self.arrays
            name = f"{name}_probe" if probe else name
            if name in self.arrays:
                want = self.arrays[name][t]
                want = want[~np.isnan(want).reshape(len(want), -1).all(axis=1)]
                got = np.asarray(value)[..., : want.shape[-1]] if probe else np.asarray(value)
                assert got.shape == want.shape, f"{name} of step {t}: {got.shape} for {want.shape}"
                assert np.max(np.abs(got - want), initial=0) <= tolerance, f"{name} of step {t}"


@pytest.mark.parametrize("run", WAVES.values(), ids=WAVES)
def test_released_wavefront(run):
    decoder, request, knobs = wave_of(run)
    recording = Recording(run)
    alike = dataclasses.replace(
        decoder,
        rule="latent-diff",
        headway=1,
        continuous=False,
        inner_recurrence=1,
        noise_schedule="dampened",
        noise_mixing="linear",
    )
    state = call(alike, "init", params(), request, knobs)
    for t in range(recording.steps):
        assert not state.rows.done[0], f"stopped before step {t}"
        start, count, frozen = (
            int(state.wave.start[0]),
            int(state.wave.count[0]),
            int(state.rows.length[0]),
        )
        before = state
        refined, state, decided = step_of_wave(decoder, params(), state, knobs)
        after, length = int(state.wave.start[0]), int(state.rows.length[0])
        total = after + int(state.wave.count[0])
        recording.exactly(
            t,
            cache_index=start,
            width=count,
            tokens_in=before.rows.tokens[0, : start + count],
            frozen_len_in=frozen,
            counter_in=before.seen[0, start : start + count],
            new_tokens=refined.predicted[0, max(frozen - 1 - start, 0) : count],
            k=decided.pointer[0],
            headway_in_step=total - start - count,
            tokens_out=state.rows.tokens[0, :total],
            frozen_tokens=state.rows.tokens[0, :length],
            frozen_len=length,
            cache_len_after=after,
            width_after=total - after,
        )
        distance = np.asarray(decided.distance[0])
        recording.closely(
            t,
            embedded=refined.embedded[0, :count],
            states_post=refined.states[0, :count],
            states_next=state.wave.states[0, : total - after],
        )
        recording.closely(t, 1e-5, distance=distance[~np.isnan(distance)])
    assert state.rows.done[0]
    want = recording.arrays
    result = decoder.finish(state)
    assert row(result) == want["output_tokens"].tolist()
    length = len(want["output_tokens"])
    assert state.seen[0, :length].tolist() == want["recurrence_per_position"].tolist()
    assert state.stable[0, :length].tolist() == want["token_stable_per_position"].tolist()
    prefills = int(decoder.prefill_prompt)
    assert int(result.network_calls[0]) == recording.steps + prefills
