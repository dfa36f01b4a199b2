"""How much hidden states and logits of a block move as it is revealed: the motive of residual
prediction (MRP).

    python -m experiments.block_diffusion.residual_magnitude runs/tiny-sdar/model
    python -m experiments.block_diffusion.residual_magnitude runs/chains/model --ground chains
    python -m experiments.block_diffusion.residual_magnitude sdar-8b --prompts prompts.txt

Prompts are continued greedily, one position a step; the first whole blocks of each are read in
every state that they went through. A line of the table is a number of reveals k: the root mean
square of the difference that k reveals make, over that of what is said of blocks not yet complete
(`magnitudes`).
"""

import dataclasses
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
import tyro

from experiments.block_diffusion.grounds import Chains
from experiments.block_diffusion.magnitudes import Magnitudes, magnitudes, read_states, visited
from experiments.common.command import run as run_command
from experiments.common.record import write_record
from experiments.tasks.words import problem
from paradec_jax import BlockDenoising, Model, facts, load, make_request, store, trace
from paradec_jax.data.problems import encode_prompts
from paradec_jax.generate import tokenizer_of

KINDS = ("hidden", "logits")


@dataclasses.dataclass(frozen=True)
class Options:
    """What to measure.

    Attributes:
      model: folder, or name of a bundled model, of block diffusion.
      prompts: a file with a prompt a line, as they are to be read (a chat's template applied); None
        for the ground's.
      ground: "words" (problems of the test split) or "chains" (those of `train`).
      count: prompts.
      blocks: of each prompt, the first whole ones that are decoded.
      rows: prompts decoded together.
      seed: of the ground's prompts.
      out: where the JSON goes.
    """

    model: tyro.conf.Positional[str]
    prompts: Path | None = None
    ground: Literal["words", "chains"] = "words"
    count: int = 64
    blocks: int = 4
    rows: int = 16
    seed: int = 0
    out: Path = Path("experiments/block_diffusion/results/residual_magnitude.json")

    def __post_init__(self) -> None:
        if min(self.count, self.blocks, self.rows) < 1:
            raise ValueError("count, blocks and rows must be at least 1")

    def texts(self) -> list[str]:
        """The prompts.

        Raises:
          ValueError: a file without any.
        """
        if self.prompts is not None:
            lines = [
                line for line in self.prompts.read_text(encoding="utf-8-sig").split("\n") if line
            ]
            if not lines:
                raise ValueError(f"{self.prompts} holds no prompt")
            return lines[: self.count]
        if self.ground == "chains":
            ground = Chains()
            drawn = ground.law.draw(self.count, [self.seed, 1])[:, : ground.prompt]
            return [ground.tokenizer().decode(row) for row in drawn.tolist()]
        return [problem(self.seed, i, "test", (2, 4)).prompt for i in range(self.count)]


def prompts_of(model: Model, options: Options) -> list[list[int]]:
    """Ids of the prompts that leave room for their blocks; longer ones are passed over."""
    tokens, lengths = encode_prompts(tokenizer_of(model), options.texts(), spec=model.token_spec)
    room = model.network.max_length - (options.blocks + 1) * model.network.block
    kept = [row[:n].tolist() for row, n in zip(tokens, lengths, strict=True) if n <= room]
    if not kept:
        raise ValueError(
            f"no prompt leaves room for {options.blocks} blocks in {model.network.max_length} positions"
        )
    return kept


def measured(model: Model, prompts: Sequence[Sequence[int]], options: Options) -> dict[str, Any]:
    """Root mean squares of both kinds, means over all visited blocks, and how many there are."""
    block, spec = model.network.block, model.token_spec
    found: defaultdict[str, list[Magnitudes]] = defaultdict(list)
    width = max(map(len, prompts))
    new = (options.blocks + 1) * block
    size = -(-(width + new) // block) * block
    decoder = BlockDenoising(rule="static", fuse_store=False, fuse_prompt=False)
    decoder = decoder.bind(model.network, size, spec)
    params = decoder.prepare(model.params)
    for first in range(0, len(prompts), options.rows):
        some = prompts[first : first + options.rows]
        filled = [*some, *[some[-1]] * (options.rows - len(some))]
        lengths = np.asarray([len(prompt) for prompt in filled])
        # of one program
        tokens = np.stack([np.pad(prompt, (0, width - len(prompt))) for prompt in filled])
        request = make_request(tokens, lengths, max_new_tokens=new, stop=spec.stop)
        decoded, steps = trace(decoder, params, request, n=(options.blocks + 1) * (block + 1))
        kept: defaultdict[int, int] = defaultdict(int)
        for visit in visited(steps, lengths, decoder.mask):
            if visit.row >= len(some) or kept[visit.row] == options.blocks:
                continue
            kept[visit.row] += 1
            context = np.asarray(decoded.tokens)[visit.row, : visit.start]
            hidden = read_states(model.network, model.params, context, visit.states[None], size)
            logits = model.network.logits(model.params, jnp.asarray(hidden))
            for kind, features in zip(KINDS, (hidden, np.asarray(logits)), strict=True):
                found[kind].append(magnitudes(features))
    if not found:
        raise ValueError("no prompt was continued by a whole block")
    told: dict[str, Any] = {"blocks": len(found["hidden"])}
    for kind in KINDS:
        told[kind] = {
            "residual": np.mean([one.residual for one in found[kind]], axis=0).tolist(),
            "reference": float(np.mean([one.reference for one in found[kind]])),
        }
    return told


def main(options: tyro.conf.OmitArgPrefixes[Options]) -> None:
    """Writes and prints the table."""
    model = load(options.model, dtype="float32")
    if model.family != "block_diffusion":
        raise SystemExit(
            f"{options.model} is of family {model.family}; states of blocks need block diffusion"
        )
    found = measured(model, prompts_of(model, options), options)
    rows = [
        {
            "reveals": k + 1,
            **{kind: found[kind]["residual"][k] / found[kind]["reference"] for kind in KINDS},
        }
        for k in range(model.network.block)
    ]
    sha256 = store.fingerprint(options.model)
    write_record(
        options.out,
        options,
        {"model_sha256": sha256, **found, "rows": rows},
        dtypes=facts.dtypes(model.params),
    )
    print(f"{found['blocks']} blocks")
    for row in rows:
        print(
            f"{row['reveals']:3d} reveals  hidden {row['hidden']:.3f}  logits {row['logits']:.3f}"
        )


if __name__ == "__main__":
    run_command(main)
