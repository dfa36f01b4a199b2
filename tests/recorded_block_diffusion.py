"""What was recorded of SDAR's programs, and the model that it was recorded of."""

import functools
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from recorded import GOLDEN, arrays_in, assert_close, imported, part_of

from paradec_jax import decode
from paradec_jax.convert import mrp
from paradec_jax.convert.engine import Source, parted, read_json
from paradec_jax.disk.tensors import open_tensors

__all__ = ["FOLDER", "arrays", "assert_close", "cases", "head", "model"]
FOLDER = GOLDEN / "block_diffusion"


def arrays(name: str) -> dict[str, np.ndarray]:
    return arrays_in(FOLDER / f"{name}.npz")


@functools.cache
def cases(name: str) -> Any:
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))


def model():
    """Network, parameters and special tokens."""
    return imported(FOLDER)


@functools.cache
def prompts() -> dict[str, np.ndarray]:
    return part_of(arrays("decode"), "prompt.")


def request_of(prompt: np.ndarray, new: int, stop: tuple[int, ...] = ()) -> decode.Request:
    """One shape for all prompts, so that cases of a decoder share a program."""
    tokens = np.zeros((1, max(map(len, prompts().values()))), np.int32)
    tokens[0, : len(prompt)] = prompt
    return decode.make_request(tokens, [len(prompt)], max_new_tokens=new, stop=stop)


def traced(
    decoder: Any, params: Any, request: decode.Request, knobs: dict, steps: int, record: Any
):
    """The result of a row, and what `record` made of each step in which it was running."""
    with jax.default_matmul_precision("highest"):
        knobs = decoder.Knobs(**knobs)
        result, (done, records) = decode.trace(
            decoder,
            params,
            request,
            knobs,
            n=steps,
            record=lambda s, i: (s.rows.done, record(s, i)),
        )
    running = ~np.concatenate([[False], np.asarray(done)[:-1, 0]])
    return result, jax.tree.map(lambda x: np.asarray(x)[running][:, 0], records)


def steps_in(tokens: np.ndarray, info: Any) -> dict[str, np.ndarray]:
    """Of the calls that read a block: its number, the step, who is revealed, and the block before."""
    reads, (network, _, spec) = info.reads, model()
    at, where = info.at[reads], info.where[reads]
    after = tokens[reads][np.arange(len(at))[:, None], at[:, None] + np.arange(network.block)]
    return {
        "block": at // network.block,
        "step": info.step[reads],
        "reveal": where,
        "before": np.where(where, spec.mask, after),
    }


@functools.cache
def head():
    """The head's network and parameters, as the converter imports them."""
    _, tensors = parted(Source(FOLDER, open_tensors(FOLDER / "mrp.safetensors")), mrp.PREFIX)
    fields = read_json(FOLDER / "config.json") | read_json(FOLDER / "mrp_config.json")
    read = mrp.read(tensors, fields, model()[0].config)
    return read.network, jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf)), read.params)
