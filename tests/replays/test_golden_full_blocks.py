"""Recorded decodes of a2d's block sampler, which counts blocks from the prompt's end.

The original pads prompts on the left to whole blocks. Here nothing is padded: rows of unequal
prompts have blocks whose origin is "padded". Settings and sizes come from each folder.
"""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from marks import over
from reading import read
from recorded import GOLDEN, arrays_in, equal, near, part_of
from recorded_full import LOGITS, folders_in, json_in, model

from paradec_jax import decode
from paradec_jax.decode.rules import select
from paradec_jax.nn import masks

FOLDER = GOLDEN / "full"
# What a case tells of a run beside its settings.
TOLD = {"sampler", "margins", "noise_seed", "masks_left"}


@dataclasses.dataclass(frozen=True)
class Case:
    """A recorded decode.

    Attributes:
      folder, name: where it lies.
      block: tokens of a block.
      steps: calls that a whole block takes at most.
      calls: denoising calls, and all.
    """

    folder: Path
    name: str
    block: int
    steps: int
    calls: tuple[int, int]

    def __getitem__(self, kind: str) -> np.ndarray:
        return arrays_in(self.folder / "decode.npz")[f"{self.name}.{kind}"]

    @property
    def has(self) -> set[str]:
        return set(part_of(arrays_in(self.folder / "decode.npz"), f"{self.name}."))

    @property
    def prompts(self) -> list[np.ndarray]:
        return [self[f"prompt_{row}"] for row in range(len(self["result"]))]

    @property
    def padded(self) -> int:
        """Columns of the original's prompts."""
        return -(-max(map(len, self.prompts)) // self.block) * self.block

    def model(self) -> tuple[Any, Any, Any]:
        network, params, spec = model(self.folder, "bd3lm", self.block)
        config = dataclasses.replace(network.config, origin="padded")
        return dataclasses.replace(network, config=config), params, spec

    def quotas(self, size: int) -> list[int]:
        """Positions that the calls on a block of that size reveal."""
        counts, left = [], size
        for step in range(self.steps):
            counts.append(round(left / (self.steps - step)))  # half to even, as in the original
            left -= counts[-1]
        return [count for count in counts if count]


def cases() -> dict[str, Case]:
    found = {}
    for folder in (FOLDER / name for name in folders_in(FOLDER)):
        for name, settings in json_in(folder / "traces.json")["cases"].items():
            if settings.get("sampler") == "bd3lm" and (folder / "decode.npz").is_file():
                left = {key: value for key, value in settings.items() if key not in TOLD}
                block, steps, new = map(left.pop, ("block_size", "steps", "max_new_tokens"))
                calls = left.pop("denoise_calls"), left.pop("calls")
                assert not left, f"settings that no replay reads: {left}"
                case = Case(folder, name, block, -(-steps // -(-new // block)), calls)
                assert case["result"].shape[1] <= case.padded + new
                found[f"{folder.name} {name}"] = case
    return found


CASES = cases()


@over(CASES)
def test_every_call(name):
    """Given the canvas before it, each call sees, says and reveals what was recorded."""
    case = CASES[name]
    network, params, spec = case.model()
    rows, width = case["result"].shape
    column = np.arange(width)
    pads = case.padded - np.array([len(prompt) for prompt in case.prompts])
    real, positions = column >= pads[:, None], column - pads[:, None]
    own = masks.block_causal(jnp.asarray(positions), case.block, jnp.asarray(-pads % case.block))
    own = np.asarray(own) & real[:, None]
    of = column // case.block  # as the original counts
    equal(own[real], ((of[:, None] >= of) & real[:, None])[real])
    seen = set()
    quotas: list[int] = []
    for call, (start, size) in enumerate(zip(case["call_start"], case["call_len"], strict=True)):
        opened = slice(start, start + size)
        text = case["tokens"][call].copy()
        text[:, opened] = np.where(text[:, opened] < 0, spec.mask, text[:, opened])
        masked = text[:, opened] == spec.mask
        quotas = quotas or case.quotas(size)
        with jax.default_matmul_precision("highest"):
            fed = jnp.asarray(np.maximum(text, 0)), jnp.asarray(np.maximum(positions, 0))
            logits = read(network, params, *fed, None, jnp.asarray(own))[0][:, opened]
        for at in np.flatnonzero(case["logits_steps"] == call):
            near(logits, case["logits"][at][:, :size], **LOGITS)
            seen.add(call)
        scores = jnp.max(jax.nn.softmax(logits, axis=-1), axis=-1)
        where = select.top(scores, jnp.asarray(masked), jnp.full(rows, quotas.pop(0)))
        text[:, opened] = np.where(where, jnp.argmax(logits, axis=-1), text[:, opened])
        equal(text, case["tokens"][call + 1], err_msg=f"call {call}")
    equal(own[:, opened], case["attention_last"])
    equal(positions[:, opened], case["positions_last"])
    equal(text, case["result"])
    assert seen == set(case["logits_steps"].tolist()) and not quotas
    told = "tokens result call_start call_len logits_steps logits attention_last positions_last"
    assert case.has <= {*told.split(), *(f"prompt_{row}" for row in range(rows))}


@over([name for name, case in CASES.items() if case.block % case.steps == 0])
def test_texts(name):
    """The decoder writes the recorded blocks, in as many calls; rows of unequal prompts, no padding."""
    case = CASES[name]
    network, params, spec = case.model()
    new = (case["result"].shape[1] - case.padded) // case.block * case.block
    decoder = decode.BlockDenoising(
        network,
        max(map(len, case.prompts)) + new,
        spec,
        rule="static",
        fuse_store=False,
        fuse_prompt=False,
    )
    request = decode.make_request([prompt.tolist() for prompt in case.prompts], max_new_tokens=new)
    with jax.default_matmul_precision("highest"):
        knobs = decoder.Knobs(temperature=0.0, steps=case.steps)
        result = decode.run(decoder, params, request, knobs)
    equal(result.completions(), case["result"][:, case.padded : case.padded + new])
    if new == case["result"].shape[1] - case.padded:
        denoised, calls = case.calls
        assert denoised == len(case["call_start"])
        assert result.network_calls.tolist() == [calls] * len(case.prompts)
