"""Recorded arrays of the original recurrent-depth program: what they are, and the forward pass.

The folder is `PARADEC_GOLDEN/recurrent_depth`, or `tests/golden/recurrent_depth`. Names, shapes and cases
come from its manifest and arrays; a kind of run that the manifest does not list is not tested.
"""

import functools
import json
import os
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from convert import huginn
from convert.engine import read_json
from paradec_jax.models import RecurrentDepthNetwork
from paradec_jax.nn.blocks import dense

pytestmark = pytest.mark.golden

FOLDER = Path(os.environ.get("PARADEC_GOLDEN") or Path(__file__).parent / "golden") / "recurrent_depth"
KINDS = ("forward", "cache", "static_ar", "adaptive", "speculative", "sampling", "training")
ARRAYS = 5e-5


def recorded_runs() -> list[dict]:
    """All runs that the manifest lists."""
    manifest = FOLDER / "manifest.json"
    return json.loads(manifest.read_text())["runs"] if manifest.is_file() else []


RUNS = {run["kind"]: run for run in recorded_runs() if run["kind"] in KINDS}


@functools.cache
def arrays(kind: str) -> dict[str, np.ndarray]:
    """The arrays of one kind of run."""
    with np.load(FOLDER / RUNS[kind]["file"], allow_pickle=False) as file:
        return dict(file)


def names(kind: str, pattern: str) -> list[str]:
    """Names of a run's arrays that match a pattern; none where the manifest has no such run."""
    return [name for name in arrays(kind) if re.fullmatch(pattern, name)] if kind in RUNS else []


def cases(kind: str, quick: int | None = None) -> list:
    """Cases of a run as parameters, those that share a program next to each other; slow beyond the first `quick`."""
    listed = RUNS[kind]["cases"] if kind in RUNS else []
    slow = [False if quick is None else i >= quick for i in range(len(listed))]
    names = [str(case.get("name", case.get("case"))) for case in listed]
    return [
        pytest.param(case, id=name, marks=[pytest.mark.slow] * late)
        for case, name, late in zip(listed, names, slow, strict=True)
    ]


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
        exchange = {"q": "k", "k": "q", "q_bias": "k_bias", "k_bias": "q_bias"}
        attention = params["prelude_0"]["attention"]
        attention = {name: attention[exchange.get(name, name)] for name in attention}
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
