"""What was recorded of the original recurrent-depth program, and the network that replays it."""

import json
import re
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from recorded import GOLDEN, arrays_in, jitted
from recorded import assert_close as close

from paradec_jax import decode, store
from paradec_jax.models import RecurrentDepthNetwork

FOLDER = GOLDEN / "recurrent_depth"
KINDS = ("forward", "cache", "static_ar", "adaptive", "speculative", "sampling", "training")
ARRAYS = 5e-5


def recorded_runs() -> list[dict]:
    """All runs that the manifest lists."""
    manifest = FOLDER / "manifest.json"
    return json.loads(manifest.read_text())["runs"] if manifest.is_file() else []


RUNS = {run["kind"]: run for run in recorded_runs() if run["kind"] in KINDS}


def arrays(kind: str) -> dict[str, np.ndarray]:
    return arrays_in(FOLDER / RUNS[kind]["file"])


def names(kind: str, pattern: str) -> list[str]:
    """Names of a run's arrays that match a pattern; none where the manifest has no such run."""
    return [name for name in arrays(kind) if re.fullmatch(pattern, name)] if kind in RUNS else []


def cases(kind: str) -> list:
    listed = RUNS[kind]["cases"] if kind in RUNS else []
    return [pytest.param(case, id=str(case.get("name", case.get("case")))) for case in listed]


def pools() -> dict[str, np.ndarray]:
    return arrays_in(FOLDER / "pools.npz")


@cache
def model():
    """The weights, as the converter imports them."""
    with jax.ensure_compile_time_eval():  # the first who asks may be a traced function
        return store.load(FOLDER, dtype="float32")


def params():
    return model().params


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
        pytest.fail(
            f"no cache here is the strategy {strategy!r} of a model with {core} core layers"
        )
    return RecurrentDepthNetwork(model().config, cache=mode, recurrence=recurrence)


def assert_close(got, want, tolerance: float = ARRAYS):
    close(got, want, tolerance)


@jitted
def forward(r: int, params, tokens, positions, state):
    net = network(recurrence=r)
    out, latent = net.forward_from(params, tokens, positions, state)
    return {
        "logits": net.logits(params, out.hidden),
        "latent_lnf": net.normalise(params, latent),
        "head_hidden": out.hidden,
    }


def forward_inputs(kind: str, positions: np.ndarray | None = None):
    tokens = arrays(kind)["input_ids"]
    positions = np.arange(tokens.shape[1]) if positions is None else positions
    return jnp.asarray(tokens), jnp.asarray(np.broadcast_to(positions, tokens.shape), jnp.int32)


@cache
def forward_of(kind: str, r: int, positions: str | None = None):
    ids = None if positions is None else arrays(kind)[f"position_ids_{positions}"]
    return forward(r, params(), *forward_inputs(kind, ids), jnp.asarray(arrays(kind)["init_state"]))


def sampling_of(case: dict) -> dict:
    if not case.get("do_sample"):
        return {}
    given = {k: case[k] for k in ("temperature", "top_k", "top_p", "min_p") if case.get(k)}
    return {"temperature": 1.0, **given}


def row(result: decode.Decoded) -> list[int]:
    return result.tokens[0, : result.lengths[0]].tolist()
