"""What is compared on four simulated devices; run by `devices.py`.

`python on_devices.py CALLS` with a JSON list of calls, each a list of a function's name and its
arguments; prints the list of what they return.
"""

import dataclasses
import json
import re
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import monitoring
from loops import PROMPTS, bound, stop_tests  # noqa: F401
from loss_table import OBJECTIVES, difference, fitted
from slices import mesh_named, weights  # noqa: F401
from stubs import tiny_causal, tiny_causal_params, tiny_network, tiny_params, tiny_request

import paradec_jax as pd
from paradec_jax.families import PRESETS, init_params, network_of, parameter_shapes
from paradec_jax.losses import next_token_loss
from paradec_jax.nn.attention import attend, splash
from paradec_jax.nn.cache import KV
from paradec_jax.nn.visibility import CAUSAL
from paradec_jax.train import Checkpoint, Evaluate, Log

TESTS = Path(__file__).parents[1]
sys.path += [str(TESTS), str(TESTS / "laws")]

COLLECTIVES = r" (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("
COMPILED: Counter[str] = Counter()


def count_compilation(event: str, _: float, **__):
    COMPILED[event] += event == "/jax/core/compile/backend_compile_duration"


monitoring.register_event_duration_secs_listener(count_compilation)


def place_of(tree) -> list[str]:
    """Where each array lies, in words that can be compared."""
    return [str(getattr(leaf.sharding, "spec", leaf.sharding)) for leaf in jax.tree.leaves(tree)]


def trained(
    name: str, mesh, *, steps: int, optimizer: str = "adamw", folder: Path, save: int = 1000
):
    """A run's last state, its losses, and what compiled and moved after the first update."""
    seen = []

    def look(state) -> dict[str, float]:
        seen.append((place_of(state), sum(COMPILED.values())))
        return {}

    hooks = [Log(folder, every=1), Evaluate(look, every=1)]
    hooks += [Checkpoint(folder, every=save, allow=("steps", "optimizer"))]
    state = fitted(name, steps, mesh, optimizer=optimizer, ema_decay=0.9, hooks=hooks)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    found = {"losses": [line["loss"] for line in lines if "loss" in line]}
    found["moved"] = sum(place != seen[0][0] for place, _ in seen)
    found["compiled"] = seen[-1][1] - seen[0][1]
    whole = [leaf.sharding.shard_shape(leaf.shape) == leaf.shape for leaf in jax.tree.leaves(state)]
    found["split"] = len(whole) - sum(whole)
    return state, found


def relative(found: list[float], wanted: list[float], scale: float) -> float:
    """The largest relative difference of two series of numbers that are differences of ones of size
    `scale`.
    """
    sizes = np.maximum(np.abs(wanted), max(scale, 1e-30))
    return float(np.max(np.abs(np.subtract(found, wanted)) / sizes))


def apart(found, wanted) -> tuple[Any, Any]:
    """The difference of all parameters but biases of keys, and theirs.

    Those begin at zero and hardly move a softmax; Adam divides their small gradients by their own
    size, with what rounding is in them, and Muon leaves them to it.
    """
    paths = [
        jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves_of(wanted)
    ]
    pairs = {
        name: pair
        for name, *pair in zip(paths, *map(jax.tree.leaves, (found, wanted)), strict=True)
    }
    biases = {name: pair for name, pair in pairs.items() if name.endswith("k_bias")}
    others = {name: pair for name, pair in pairs.items() if name not in biases}
    return tuple(
        difference(*({name: pair[i] for name, pair in part.items()} for i in range(2)))
        if part
        else None
        for part in (others, biases)
    )


def leaves_of(tree) -> list[tuple[Any, Any]]:
    return jax.tree_util.tree_leaves_with_path(tree)


def train(names: list[str], meshes: list[str], steps: int, optimizers: list[str]) -> dict[str, Any]:
    """Each objective on each mesh against one device."""
    found = {}
    for name in names:
        for optimizer in optimizers:
            with tempfile.TemporaryDirectory() as folder:
                options = {"steps": steps, "optimizer": optimizer}
                state, one = trained(name, None, folder=Path(folder) / "one", **options)
                for mesh in meshes:
                    other, told = trained(
                        name, mesh_named(mesh), folder=Path(folder) / "mesh", **options
                    )
                    (Path(folder) / "mesh").rename(Path(folder) / mesh)
                    told["losses"] = relative(told["losses"], one["losses"], OBJECTIVES[name].scale)
                    told["params"], told["k_bias"] = apart(other.params, state.params)
                    told["ema"], _ = apart(other.ema, state.ema)
                    found[f"{name}, {optimizer}, {mesh}"] = told
    return found


def plain(decoded) -> dict[str, Any]:
    """What must not depend on the mesh."""
    from results import listed

    found = listed(decoded)
    found.pop("log_probs", None)
    return found


def decode(names: list[str], mesh: str) -> dict[str, Any]:
    """Decoders of the laws' table on a mesh against one device."""
    from decoders import ROWS

    found, where = {}, mesh_named(mesh)
    for name in names or list(ROWS):
        decoder, params, real = bound(ROWS[name])
        request = tiny_request(6, prompts=PROMPTS)
        knobs = ROWS[name].values()
        one = plain(pd.run(decoder, params, request, knobs))
        if params is not None:
            params = jax.device_put(params, pd.shardings(params, where))
            prepared = decoder.prepare(params)
        else:
            prepared = None
        placed = jax.device_put(request, pd.row_shardings(request, where))
        other = plain(pd.run(decoder, prepared, placed, knobs))
        found[name] = {"same": one == other, "real": real}
        if one != other:
            found[name] |= {key: [one[key], other[key]] for key in one if one[key] != other[key]}
    return found


def drivers(mesh: str, names: list[str]) -> dict[str, Any]:
    """Drivers of one decoder on a mesh, where its state lies, what a stream compiles after its
    first step.
    """
    where = mesh_named(mesh)
    decoder, params = pd.Jacobi(tiny_causal(), 20, block=4), tiny_causal_params()
    request = tiny_request(6, prompts=PROMPTS)
    one = plain(pd.run(decoder, params, request))
    placed = jax.device_put(params, pd.shardings(params, where))
    found: dict[str, Any] = {"run": plain(pd.run(decoder, placed, request)) == one}
    for name in names:
        found[name] = plain(getattr(pd, name)(decoder, placed, request, n=8)[0]) == one
    places, compiled = [], []
    for state, _ in pd.stream(decoder, placed, request):
        places.append(place_of(state))
        compiled.append(sum(COMPILED.values()))
    found["stream"] = plain(decoder.finish(state)) == one
    found["steps"], found["moved"] = len(places), sum(place != places[0] for place in places)
    found["compiled"] = compiled[-1] - compiled[1]
    found["cache"] = str(state.cache[0].k.sharding.spec)
    found["tokens"] = str(state.rows.tokens.sharding.spec)
    return found


def serve(mesh: str) -> bool:
    """Whether a queue on a mesh gives what a batch on one device does."""
    decoder, params = pd.Jacobi(tiny_causal(), 20, block=4), tiny_causal_params()
    request = tiny_request(6, prompts=PROMPTS)
    placed = jax.device_put(params, pd.shardings(params, mesh_named(mesh)))
    served = pd.serve(decoder, placed, request, rows=2, every=2)
    return plain(served.decoded) == plain(pd.run(decoder, params, request))


def generate(mesh: str) -> dict[str, bool]:
    """Whether a bundled model writes the same on a mesh, put there by `generate` or by `load`."""
    where, prompts = mesh_named(mesh), ["Ana has 3 apples.", "Ben has 5 pears and eats 2."]
    options = {"max_new_tokens": 12, "samples": 2}
    model, found = pd.load("tiny-causal"), {}
    one = pd.generate(model, prompts, pd.AutoRegressive(), **options)
    split = pd.load("tiny-causal", mesh=where)
    calls = {
        "generate": lambda: pd.generate(model, prompts, pd.AutoRegressive(), mesh=where, **options),
        "load": lambda: pd.generate(split, prompts, pd.AutoRegressive(), **options),
        "stops": lambda: pd.generate(
            split, prompts, pd.AutoRegressive(), stop_strings=("~",), **options
        ),
    }
    for name, call in calls.items():
        other = call()
        found[name] = (
            other.tokens == one.tokens
            and other.network_calls.tolist() == one.network_calls.tolist()
        )
    return found


def resume(meshes: list[str], steps: int) -> float:
    """The largest difference of a run that goes on from mesh to mesh from one on one device, of
    losses.
    """
    with tempfile.TemporaryDirectory() as folder:
        last = steps * len(meshes)
        _, one = trained("next token", None, steps=last, folder=Path(folder) / "one")
        for i, mesh in enumerate(meshes):
            options = {"steps": steps * (i + 1), "save": steps, "folder": Path(folder) / "other"}
            _, other = trained("next token", mesh_named(mesh), **options)
            assert not other["moved"] and not other["compiled"], other
            computed = json.loads((Path(folder) / "other" / "run.json").read_text())["computed"]
            assert computed[-1]["mesh"] == sizes_of(mesh), computed
    return relative(other["losses"], one["losses"], scale=0.0)


def sizes_of(mesh: str) -> dict[str, int] | None:
    where = mesh_named(mesh)
    return None if where is None else dict(where.shape)


def gradient(mesh: str) -> dict[str, Any]:
    """The gradient of a rollout on a mesh against one device."""
    where = mesh_named(mesh)
    decoder = pd.SoftWavefront(tiny_network(), 20, window=4, inner_recurrence=2)
    request, params = tiny_request(6, prompts=PROMPTS), tiny_params()

    def loss(params):
        _, records = pd.rollout(decoder, params, request, n=6, record=squares)
        return sum(jax.numpy.sum(x) for x in jax.tree.leaves(records))

    def squares(state, info):
        del info
        leaves = jax.tree.leaves(state)
        return [
            jax.numpy.sum(x**2) for x in leaves if jax.numpy.issubdtype(x.dtype, jax.numpy.floating)
        ]

    one = jax.jit(jax.grad(loss))(params)
    with jax.set_mesh(where):
        other = jax.jit(jax.grad(loss))(jax.device_put(params, pd.shardings(params, where)))
    return {"difference": difference(other, one)}


def collectives(presets: list[str], sizes: list[int]) -> dict[str, Any]:
    """Collectives of a forward pass with its scores, and blocks of the network."""
    where, found = pd.make_mesh(*sizes), {}
    for name in presets:
        network, params = network_of(PRESETS[name]), init_params(PRESETS[name], jax.random.key(0))
        recurrent = name == "test-recurrent"
        network = network.at(1) if recurrent else network
        params = jax.device_put(params, pd.shardings(params, where))
        tokens = np.zeros((4, 8), np.int32)
        tokens = jax.device_put(tokens, pd.row_shardings(tokens, where))

        def forward(params, tokens, network=network, recurrent: bool = recurrent):
            positions = jax.numpy.broadcast_to(jax.numpy.arange(tokens.shape[1]), tokens.shape)
            prefix = None
            if recurrent:
                keys = jax.random.split(jax.random.key(1), len(tokens))
                prefix = pd.Prefix(network.init_cache(keys, tokens.shape[1]), None)
            return network.logits(params, network.forward(params, tokens, positions, prefix).hidden)

        with jax.set_mesh(where):
            text = jax.jit(forward).lower(params, tokens).compile().as_text()
        found[name] = dict(Counter(re.findall(COLLECTIVES, text)))
        blocks = {path.split("/")[0] for path in map(path_of, leaves_of(params))}
        found[name]["blocks"] = sum(part.rpartition("_")[2].isdigit() for part in blocks)
    return found


def gathers(chunk: int | None) -> dict[str, int]:
    """Matrices that the gradient of a model with float32 masters and products of 16 bits gathers,
    by numeric type.

    XLA's CPU compiler moves bfloat16 as float32 and leaves float16.
    """
    where = pd.make_mesh(1, 4, 1)
    config = dataclasses.replace(PRESETS["test-causal"], dtype="float16", remat="layer")
    params, objective = parameter_shapes(config), next_token_loss(network_of(config), chunk=chunk)

    def placed(leaf, place):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)

    def gradient(params, tokens):
        batch = {"tokens": tokens, "targets": tokens, "weights": jax.numpy.ones(tokens.shape)}
        return jax.grad(lambda p: objective(p, None, batch, jax.random.key(0))[0])(params)

    tokens = jax.ShapeDtypeStruct((4, 12), np.int32)
    arguments = jax.tree.map(
        placed, (params, tokens), (pd.shardings(params, where), pd.row_shardings(tokens, where))
    )
    with jax.set_mesh(where):
        text = jax.jit(gradient).lower(*arguments).compile().as_text()
    head = sorted((config.vocab_size, config.width))
    found = re.findall(r"= (f16|f32)\[([\d,]+)\]\S* all-gather(?:-start)?\(", text)
    counts = Counter(kind for kind, shape in found)
    counts["head"] = sum(sorted(map(int, shape.split(","))) == head for _, shape in found)
    return dict(counts)


def splashed(mesh: str) -> dict[str, Any]:
    """The TPU's kernel of attention on a mesh, run as plain JAX, against dense attention on one
    device.
    """
    rng, where = np.random.default_rng(0), mesh_named(mesh)
    q, k, v = (jax.numpy.asarray(rng.normal(size=(4, n, 128, 128)), "float32") for n in (4, 2, 2))
    window = KV(k.swapaxes(-1, -2), v)
    with jax.set_mesh(where):
        got = jax.jit(lambda q, window: splash(q, window, CAUSAL, interpret=True))(q, window)
    want = attend(q, window, CAUSAL.mask(128))
    return {
        "difference": float(np.abs(np.asarray(got) - want).max()),
        "lies": str(got.sharding.spec),
    }


def path_of(pair: tuple[Any, Any]) -> str:
    return jax.tree_util.keystr(pair[0], simple=True, separator="/")


if __name__ == "__main__":
    print(json.dumps([globals()[name](*arguments) for name, *arguments in json.loads(sys.argv[1])]))
