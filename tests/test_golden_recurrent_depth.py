"""Recorded arrays of the original recurrent-depth program: forward, caches, decoders, sampling, gradients.

The folder is `PARADEC_GOLDEN/recurrent_depth`, or `tests/golden/recurrent_depth`. Names, shapes and cases
come from its manifest and arrays; a kind of run that the manifest does not list is not tested.
"""

import dataclasses
import functools
import json
import os
import re
from itertools import islice
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from convert import huginn
from convert.engine import export_tree, read_json
from paradec_jax import decode
from paradec_jax.decode.sampling import SamplingKnobs, filtered_probabilities, repetition_penalty
from paradec_jax.losses import poisson_lognormal, recurrent_loss
from paradec_jax.models import RecurrentDepthNetwork
from paradec_jax.nn.blocks import dense

pytestmark = pytest.mark.golden

FOLDER = Path(os.environ.get("PARADEC_GOLDEN") or Path(__file__).parent / "golden") / "recurrent_depth"
KINDS = ("forward", "cache", "static_ar", "adaptive", "speculative", "sampling", "training")
ARRAYS = 5e-5
PROBABILITIES = 2e-6
LOSS = 2e-5
FED_TOGETHER = 4  # first tokens of the ragged runs


def _runs() -> dict:
    manifest = FOLDER / "manifest.json"
    runs = json.loads(manifest.read_text())["runs"] if manifest.is_file() else []
    return {run["kind"]: run for run in runs if run["kind"] in KINDS}


RUNS = _runs()


def _waves() -> dict:
    manifest = FOLDER / "manifest.json"
    runs = json.loads(manifest.read_text())["runs"] if manifest.is_file() else []
    return {run["name"]: run for run in runs if run["kind"] == "wavefront"}


@functools.cache
def arrays(kind: str) -> dict[str, np.ndarray]:
    """The arrays of one kind of run."""
    with np.load(FOLDER / RUNS[kind]["file"], allow_pickle=False) as file:
        return dict(file)


def names(kind: str, pattern: str) -> list[str]:
    """Names of a run's arrays that match a pattern; none where the manifest has no such run."""
    return [name for name in arrays(kind) if re.fullmatch(pattern, name)] if kind in RUNS else []


def cases(kind: str) -> list:
    """Cases of a run as parameters, those that share a program next to each other."""
    listed = RUNS[kind]["cases"] if kind in RUNS else []
    return [pytest.param(case, id=str(case.get("name", case.get("case")))) for case in listed]


@functools.cache
def pools() -> dict[str, np.ndarray]:
    with np.load(FOLDER / "pools.npz", allow_pickle=False) as file:
        return dict(file)


@functools.cache
def model():
    """The weights, as the converter imports them."""
    return huginn.read(FOLDER, read_json(FOLDER / "config.json"), "float32")


@functools.cache
def params():
    return jax.tree.map(jnp.asarray, model().params)


def network(strategy: str = "full", recurrence: int = 1) -> RecurrentDepthNetwork:
    """The network with the cache that a lookup strategy of the original program names."""
    core = model().config.core_layers
    shared = re.fullmatch(r"latest-m\d+-compress-s(\d+)", strategy)
    if strategy == "shared" or (shared is not None and int(shared[1]) == core):
        mode = "shared"
    elif re.fullmatch(r"latest[-_]m\d+", strategy):
        mode = "latest"
    elif strategy == "full":
        mode = "full"
    else:
        pytest.fail(f"no cache here is the strategy {strategy!r} of a model with {core} core layers")
    return RecurrentDepthNetwork(model().config, cache=mode, recurrence=recurrence)


def assert_close(got, want, tolerance: float = ARRAYS) -> None:
    assert got.shape == want.shape
    error = np.max(np.abs(np.asarray(got, np.float64) - want))
    assert error <= tolerance, f"largest absolute difference {error:.2e}"


def test_folder_holds_recorded_runs():
    assert RUNS, f"{FOLDER} has no manifest.json with runs of the kinds {', '.join(KINDS)}"
    for run in RUNS.values():
        file = FOLDER / run["file"]
        assert file.is_file(), f"{file} is listed in the manifest, but missing"


# Forward


@functools.partial(jax.jit, static_argnums=0)
def forward(r: int, params, tokens, positions, state):
    net = network()
    out = net.forward(params, tokens, positions, None, None, state, r)
    return {"logits": net.logits(params, out.hidden), "latent_lnf": out.latent, "head_hidden": out.hidden}


def forward_inputs(kind: str, positions: np.ndarray | None = None):
    tokens = arrays(kind)["input_ids"]
    positions = np.arange(tokens.shape[1]) if positions is None else positions
    return jnp.asarray(tokens), jnp.asarray(np.broadcast_to(positions, tokens.shape), jnp.int32)


@functools.cache
def forward_of(kind: str, r: int, positions: str | None = None):
    ids = None if positions is None else arrays(kind)[f"position_ids_{positions}"]
    return forward(r, params(), *forward_inputs(kind, ids), jnp.asarray(arrays(kind)["init_state"]))


@pytest.mark.parametrize("name", names("forward", r"(logits|latent_lnf|head_hidden)_r\d+(_\w+_positions)?"))
def test_forward(name):
    what, r, positions = re.fullmatch(r"(\w+)_r(\d+)(?:_(\w+)_positions)?", name).groups()
    assert_close(forward_of("forward", int(r), positions)[what], arrays("forward")[name])


def keys_of(window) -> jax.Array:
    """Rotated keys of the first prelude block, [B, W, H, C]."""
    return window.prelude[0].k.transpose(0, 3, 1, 2)


@functools.cache
def parts_of_forward() -> dict:
    """What a forward pass computes on its way to the logits."""
    want = arrays("forward")
    config = model().config
    state = jnp.asarray(want["init_state"])
    steps = len(want["state_trajectory_raw"]) - 1 if "state_trajectory_raw" in want else 0

    @jax.jit
    def compute(params, tokens, positions, state):
        net = network()
        view, window = net.view(positions), net.empty_window(*tokens.shape)
        e, window = net.embed(params, tokens, view, window)

        def one(state, _):
            new, _ = net.iterate(params, state, e, view, window, 0)
            return new, new

        parts = {
            "token_embed_scaled": params["embedding"][tokens] * config.width**0.5,
            "prelude_out": e,
            "prelude0_k_rot": keys_of(window),
            "adapter_out_step1": dense(jnp.concatenate([state, e], axis=-1), params["adapter"]),
            "state_trajectory_raw": jnp.concatenate([state[None], lax.scan(one, state, length=steps)[1]]),
        }
        # A model that ends after its first prelude block, and one whose keys are the queries.
        first = RecurrentDepthNetwork(config.__class__(**{**config.to_dict(), "prelude_layers": 1}))
        parts["prelude0_out"], _ = first.embed(params, tokens, view, first.empty_window(*tokens.shape))
        attention = dict(params["prelude_0"]["attention"])
        attention["qkv"] = attention["qkv"][:, jnp.array([1, 0, 2])]
        if config.qk_bias:
            attention["qk_bias"] = attention["qk_bias"][::-1]
        swapped = {**params, "prelude_0": {**params["prelude_0"], "attention": attention}}
        _, window = first.embed(swapped, tokens, view, first.empty_window(*tokens.shape))
        parts["prelude0_q_rot"] = keys_of(window)
        return parts

    return compute(params(), *forward_inputs("forward"), state)


INPUTS = r"input_ids|init_state|position_ids_\w+"
OUTPUTS = r"(logits|latent_lnf|head_hidden)_r\d+(_\w+_positions)?"


@pytest.mark.parametrize("name", names("forward", rf"(?!({INPUTS}|{OUTPUTS})$).*"))
def test_forward_part(name):
    assert_close(parts_of_forward()[name], arrays("forward")[name])


# Caches


@functools.partial(jax.jit, static_argnums=0)
def feed(net, params, cache, tokens, positions, at, state, steps):
    """A window through a cache, `steps` recurrences; the window is stored at once."""
    view, window = net.view(positions, cache, at), net.empty_window(*tokens.shape)
    e, window = net.embed(params, tokens, view, window)
    state, window = lax.fori_loop(
        0, steps, lambda i, carry: net.iterate(params, *carry[:1], e, view, carry[1], i), (state, window)
    )
    hidden, window = net.readout(params, state, view, window)
    return net.logits(params, hidden), net.normalise(params, state), net.write(cache, window, at)


@functools.cache
def feed_pieces(strategy: str, pieces: tuple[tuple[int, int], ...]):
    """Feeds pieces of (length, recurrences) one after the other; every window has the length of the longest.

    What a window holds beyond its piece is scratch, which the next piece overwrites.
    """
    want = arrays("cache")
    tokens, _ = forward_inputs("cache")
    batch, length = tokens.shape
    width = max(max(lengths) for lengths in plans())
    net = network(strategy, int(want["num_steps"]))
    cache = net.init_cache(batch, length + width)

    def padded(x, at):
        return jnp.pad(x, [(0, 0), (0, width)] + [(0, 0)] * (x.ndim - 2))[:, at : at + width]

    logits, latents, at = [], [], 0
    for piece, steps in pieces:
        start = jnp.full(batch, at, jnp.int32)
        window = (padded(tokens, at), start[:, None] + jnp.arange(width), start)
        state = padded(jnp.asarray(want["init_state"]), at)
        out, latent, cache = feed(net, params(), cache, *window, state, jnp.int32(steps))
        logits.append(out[:, :piece])
        latents.append(latent[:, :piece])
        at += piece
    return jnp.concatenate(logits, 1), jnp.concatenate(latents, 1), cache


def plans() -> list[list[int]]:
    return [arrays("cache")[name].tolist() for name in names("cache", r"plan_\w+")] + [[FED_TOGETHER]]


def by_plan(name: str):
    """Result of the pieces that the end of an array's name speaks of: `<strategy>_<plan>`."""
    strategy, plan = re.fullmatch(r"(?:[a-zA-Z]+_)*?(full|shared)_(\w+)", name).groups()
    want = arrays("cache")
    return feed_pieces(strategy, tuple((int(n), int(want["num_steps"])) for n in want[f"plan_{plan}"]))


def test_cache_logits_without_a_cache():
    if "cache" not in RUNS:
        pytest.skip("the manifest lists no run of this kind")
    r = int(arrays("cache")["num_steps"])
    assert_close(forward_of("cache", r)["logits"], arrays("cache")["logits_full"])


@pytest.mark.parametrize("name", names("cache", r"(logits|latent)_(full|shared)_\w+"))
def test_cache(name):
    logits, latents, _ = by_plan(name)
    assert_close(logits if name.startswith("logits") else latents, arrays("cache")[name])


@pytest.mark.parametrize("name", names("cache", r"shared_[KV]_slot_-?\d+"))
def test_cache_contents(name):
    keys_or_values, slot = re.fullmatch(r"shared_([KV])_slot_(-?\d+)", name).groups()
    cache = by_plan("shared_one_by_one")[2]
    entries = [*cache.prelude, *cache.core, *reversed(cache.coda)]  # slot -1 is the first coda layer
    want = arrays("cache")[name]
    entry = entries[int(slot)]
    stored = entry.v if keys_or_values == "V" else entry.k.swapaxes(-1, -2)
    assert_close(stored[:, :, : want.shape[2]], want)


@pytest.mark.parametrize("name", names("cache", r"cache_slots_\w+"))
def test_cache_slots(name):
    cache = by_plan(name)[2]
    core = sum(kv.k.shape[0] if kv.k.ndim == 5 else 1 for kv in cache.core)
    assert arrays("cache")[name].tolist() == [*range(-len(cache.coda), len(cache.prelude) + core)]


@pytest.mark.parametrize("name", names("cache", r"logits_ragged_\w+"))
def test_cache_with_ragged_depths(name):
    steps = arrays("cache")["ragged_steps"].tolist()
    pieces = ((FED_TOGETHER, steps[0]), *((1, n) for n in steps[FED_TOGETHER:]))
    logits, _, _ = feed_pieces(name.removeprefix("logits_ragged_"), pieces)
    assert_close(logits, arrays("cache")[name])


# Decoders


def decoder_of(kind: type, case: dict, **options):
    """A decoder and its request; cases that differ in traced values alone share its program."""
    net = network(case.get("cache_lookup_strategy", "full"), case["num_steps"])
    size = min(net.max_length, len(pools()["state_pool"]))
    return kind(net, size, continuous=case.get("continuous_compute", False), **options)


def request_of(case: dict, extra: int = 0) -> decode.Request:
    recorded = decode.Recorded(
        jnp.asarray(pools()["state_pool"]), jnp.asarray(pools()["uniform_ar"], jnp.float32)
    )
    stop = case.get("eos_token_id")
    return decode.make_request(
        pools()[f"prompt_{case['prompt']}"][None],
        max_new_tokens=case["max_new_tokens"] + extra,
        stop=() if stop is None else tuple(np.atleast_1d(stop).tolist()),
        recorded=recorded,
    )


def sampling_of(case: dict) -> dict:
    if not case.get("do_sample"):
        return {}
    given = {k: case[k] for k in ("temperature", "top_k", "top_p", "min_p") if case.get(k)}
    return {"temperature": 1.0, **given}


def row(result: decode.Decoded) -> list[int]:
    return result.tokens[0, : result.lengths[0]].tolist()


@pytest.mark.parametrize("case", cases("static_ar"))
def test_static_autoregressive(case):
    decoder = decoder_of(decode.AutoRegressive, case)
    knobs = decoder.Knobs(init_scale=case.get("init_scale", 1.0), **sampling_of(case))
    result = decode.run(decoder, params(), request_of(case), knobs)
    assert row(result) == arrays("static_ar")[f"tokens_{case['name']}"].tolist()


@pytest.mark.parametrize("case", cases("adaptive"))
def test_adaptive(case):
    decoder = decoder_of(
        decode.Adaptive,
        case,
        criterion=case["criterion"],
        max_recurrence=case["num_steps"],
        exit_in_prefill=not case.get("do_not_exit_in_prefill", False),
        official=True,
    )
    threshold = case.get("exit_threshold", "auto")
    knobs = decoder.Knobs(
        exit_threshold=float("nan") if threshold == "auto" else threshold,
        min_recurrence=case.get("min_steps", 0),
        check_every=case.get("check_criterion_every_n_steps", 1),
        init_scale=case.get("init_scale", 1.0),
        **sampling_of(case),
    )
    steps, values = [], []
    for state in decode.stream(decoder, params(), request_of(case), knobs):
        steps.append(int(state.recurrences[0]))
        values.append(np.asarray(state.exit_values[0]))
        result = jax.tree.map(np.asarray, decoder.finish(state))
    want, name = arrays("adaptive"), case["name"]
    assert row(result) == want[f"tokens_{name}"].tolist()
    assert steps == want[f"steps_{name}"].tolist()
    assert result.recurrences.tolist() == [sum(steps)]
    if case["criterion"] != "none":
        recorded = want[f"exit_values_{name}"]
        checks = recorded.shape[1]
        measured = np.stack(values)
        assert np.isnan(measured[:, checks:]).all()
        assert np.array_equal(np.isnan(measured[:, :checks]), np.isnan(recorded))
        tolerance = 5e-5 if "entropy" in case["criterion"] else 1e-5
        assert np.nanmax(np.abs(measured[:, :checks] - recorded)) <= tolerance


@pytest.mark.parametrize("case", cases("speculative"))
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
    for state in islice(states, rounds + 1):
        accepted.append(int(state.accepted[0]))
        result = jax.tree.map(np.asarray, decoder.finish(state))
    assert accepted[1:] == want[f"accepted_{name}"].tolist()
    assert row(result) == want[f"tokens_{name}"].tolist()


# The original wavefront, step by step

WAVES = _waves()
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
    recorded = decode.Recorded(
        jnp.asarray(pool["state_pool"]),
        jnp.asarray(pool["uniform_ar"], jnp.float32),
        jnp.asarray(pool["uniform_wave"], jnp.float32),
        jnp.asarray(pool["noise_pool"]),
        jnp.asarray(pool["extra_tokens"]),
    )
    stop = generation.get("eos_token_id")
    prompt = pool[f"prompt_{run['prompt']}"]
    request = decode.make_request(
        prompt[None],
        max_new_tokens=run["max_new_tokens"],
        stop=() if stop is None else tuple(np.atleast_1d(stop).tolist()),
        recorded=recorded,
    )
    mixer = "sqrt" if settings["sqrt_mixer"] else "dampened"
    assert settings["dampened_state_mixer"] or not settings["sqrt_mixer"]
    decoder = decode.OfficialWavefront(
        network(settings["cache_lookup_strategy"]),
        min(model().config.max_length, len(pool["state_pool"])),
        inner_recurrence=settings["inner_recurrence"],
        width=max(item["max_width"] + item["settings"].get("headway", 1) for item in WAVES.values()),
        headway=settings["headway"],
        recurrence=settings["num_steps"],
        rule=settings["freeze_strategy"],
        continuous=settings["continuous_compute"],
        prefill_prompt=settings["full_prefill"],
        noise_mixer=mixer if settings["dampened_state_mixer"] else "constant",
    )
    knobs = decoder.Knobs(
        exit_threshold=settings["exit_t"],
        momentum=settings["ema_embeds"],
        noise=settings["state_noise_mixing"],
        max_wavefront=max(settings["max_wavefront"], 0),
        max_steps=settings["max_diffusion_steps"],
        init_scale=settings["init_scale"],
        **sampling_of(generation),
    )
    return decoder, request, knobs


@functools.partial(jax.jit, static_argnums=0)
def start_of_wave(decoder, params, request, knobs):
    return decoder.init(params, request, knobs)


@functools.partial(jax.jit, static_argnums=0)
def refine_wave(decoder, params, state, knobs):
    return decoder.refine(params, state, knobs)


@functools.partial(jax.jit, static_argnums=0)
def advance_wave(decoder, state, refined, knobs):
    return decoder.advance(state, refined, knobs)


def step_of_wave(decoder, params, state, knobs):
    """A step in its two halves: runs that refine alike share the half that takes long to compile."""
    alike = dataclasses.replace(
        decoder, rule="latent-diff", headway=1, continuous=False, prefill_prompt=True, recurrence=1
    )
    refined = refine_wave(alike, params, state, knobs)
    return refined, *advance_wave(decoder, state, refined, knobs)


class Recording:
    """Compares what a step did with the recorded rows, which are padded with -1 or NaN."""

    def __init__(self, run: dict) -> None:
        with np.load(FOLDER / run["file"], allow_pickle=False) as file:
            self.arrays = dict(file)
        self.steps = len(self.arrays["cache_index"])

    def exactly(self, t: int, **values) -> None:
        for name, value in values.items():
            if name in self.arrays:
                want = self.arrays[name][t]
                want = want[want >= 0] if want.ndim else want
                assert np.array_equal(np.asarray(value), want), f"{name} of step {t}: {value} for {want}"

    def closely(self, t: int, tolerance: float = ARRAYS, **values) -> None:
        for name, value in values.items():
            probe = name not in self.arrays
            name = f"{name}_probe" if probe else name
            if name in self.arrays:
                want = self.arrays[name][t]
                want = want[~np.isnan(want).reshape(len(want), -1).all(axis=1)]
                got = np.asarray(value)[..., : want.shape[-1]] if probe else np.asarray(value)
                assert got.shape == want.shape, f"{name} of step {t}: {got.shape} for {want.shape}"
                assert np.max(np.abs(got - want), initial=0) <= tolerance, f"{name} of step {t}"


@pytest.mark.parametrize("run", [pytest.param(run, id=name) for name, run in WAVES.items()])
def test_official_wavefront(run):
    decoder, request, knobs = wave_of(run)
    recording = Recording(run)
    alike = dataclasses.replace(
        decoder, rule="latent-diff", headway=1, continuous=False, inner_recurrence=1, noise_mixer="dampened"
    )
    state = start_of_wave(alike, params(), request, knobs)
    for t in range(recording.steps):
        assert not state.progress.done[0], f"stopped before step {t}"
        start, count, frozen = (
            int(state.wave.start[0]),
            int(state.wave.count[0]),
            int(state.progress.length[0]),
        )
        before = state
        refined, state, decided = step_of_wave(decoder, params(), state, knobs)
        after, length = int(state.wave.start[0]), int(state.progress.length[0])
        total = after + int(state.wave.count[0])
        recording.exactly(
            t,
            cache_index=start,
            width=count,
            tokens_in=before.progress.tokens[0, : start + count],
            frozen_len_in=frozen,
            counter_in=before.seen[0, start : start + count],
            new_tokens=refined.predicted[0, max(frozen - 1 - start, 0) : count],
            k=decided.pointer[0],
            headway_in_step=total - start - count,
            tokens_out=state.progress.tokens[0, :total],
            frozen_tokens=state.progress.tokens[0, :length],
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
    assert state.progress.done[0]
    want = recording.arrays
    result = decoder.finish(state)
    assert row(result) == want["output_tokens"].tolist()
    length = len(want["output_tokens"])
    assert state.seen[0, :length].tolist() == want["recurrence_per_position"].tolist()
    assert state.stable[0, :length].tolist() == want["token_stable_per_position"].tolist()
    prefills = int(decoder.prefill_prompt)
    assert int(result.network_calls[0]) == recording.steps + prefills


# Sampling


@pytest.mark.parametrize("case", cases("sampling"))
def test_filtered_probabilities(case):
    values = {k: case[k] for k in ("top_k", "top_p", "min_p") if case.get(k) is not None}
    knobs = SamplingKnobs(temperature=case.get("temperature") or 1.0, **values)
    probs = filtered_probabilities(jnp.asarray(arrays("sampling")["logits"]), knobs)
    assert_close(probs, arrays("sampling")[f"probs_{case['case']}"], PROBABILITIES)


@pytest.mark.parametrize("name", names("sampling", r"penalized_logits_\d+p\d+"))
def test_repetition_penalty(name):
    penalty = float(name.removeprefix("penalized_logits_").replace("p", "."))
    logits = jnp.asarray(arrays("sampling")["logits"])
    seen = np.zeros(logits.shape, bool)
    seen[:, np.unique(arrays("sampling")["penalty_input_ids"])] = True
    assert_close(repetition_penalty(logits, jnp.asarray(seen), penalty), arrays("sampling")[name])


# Training


@functools.cache
def gradients_of(tag: str):
    """Loss, and gradients under the names and in the layout of the original program."""
    want = arrays("training")
    constant, carried = map(int, re.fullmatch(r"n(\d+)_k(\d+)", tag).groups())
    objective = recurrent_loss(network("shared"), poisson_lognormal(1.0), carried)
    batch = {
        "tokens": jnp.asarray(want["input_ids"]),
        "targets": jnp.asarray(np.maximum(want["labels"], 0)),
        "weights": jnp.asarray(want["labels"] >= 0, jnp.float32),
        "state": jnp.asarray(want["init_state"]),
        "recurrence": jnp.int32(constant + carried),
        "step": jnp.int32(0),
    }
    graded = jax.jit(jax.value_and_grad(objective, has_aux=True))
    (loss, _), grads = graded(params(), None, batch, jax.random.key(0))
    axes, rows = huginn.table(model().config)
    tensors = export_tree(jax.tree.map(np.asarray, grads), rows, axes)
    return float(loss), {name: tensor.make() for name, tensor in tensors.items()}


@pytest.mark.parametrize("name", names("training", r"loss_\w+"))
def test_loss(name):
    loss, _ = gradients_of(name.removeprefix("loss_"))
    assert abs(loss - float(arrays("training")[name])) <= LOSS


@pytest.mark.parametrize("name", names("training", r"grad_\w+::.*"))
def test_gradient(name):
    tag, parameter = name.removeprefix("grad_").split("::")
    want = arrays("training")[name]
    assert_close(gradients_of(tag)[1][parameter], want, 1e-4 * np.abs(want).max() + 1e-6)


@pytest.mark.parametrize("name", names("training", r"gradnorm_(?!names$)\w+"))
def test_gradient_norms(name):
    grads = gradients_of(name.removeprefix("gradnorm_"))[1]
    parameters = arrays("training")["gradnorm_names"].tolist()
    assert sorted(parameters) == sorted(grads)
    want = arrays("training")[name]
    got = np.array([np.linalg.norm(grads[parameter].astype(np.float64)) for parameter in parameters])
    share = np.abs(got - want) / (1e-4 * want + 1e-6)  # of the tolerance
    assert share.max() <= 1, f"{parameters[share.argmax()]}: {got[share.argmax()]}, {want[share.argmax()]}"
