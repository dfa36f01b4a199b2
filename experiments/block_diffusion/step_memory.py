"""Memory of a training step of block diffusion, in two forwards and in the doubled layout.

`python -m experiments.block_diffusion.step_memory`. XLA plans one step (value and gradient of the loss, without an
optimizer) and says how much temporary memory and how many operations it takes; nothing is allocated, run or timed. Of
T positions a row, two forwards make T T + T 2T scores a head and layer, the doubled layout 2T 2T. Attention here
computes every score and hides what a mask says, in both; a kernel that skips hidden ones is not counted.

XLA counts the body of a loop once, so operations are only given where logits are made all at once. On the CPU
`--xla_cpu_enable_concurrency_optimized_scheduler=false` in `XLA_FLAGS` plans for memory, as other backends do, and
`--xla_backend_optimization_level=0` compiles sooner.
"""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import tyro

from experiments.common.command import run
from experiments.common.record import write_record
from paradec_jax.config import BLOCK_DIFFUSION_PRESETS, TokenSpec
from paradec_jax.families import network_of, parameter_shapes
from paradec_jax.losses import BlockRules, block_diffusion_loss

FORMS = {"two forwards": False, "doubled": True}


@dataclasses.dataclass(frozen=True)
class Options:
    """What to plan.

    Attributes:
      preset: shape of the model; weights are never made.
      length: T, positions of a row.
      rows: of a batch.
      layers: of the model; the preset's when None.
      chunks: positions whose logits are made at a time, two lines of the table each (None: all at once).
      remat: "layer" or "none".
      dtype: of parameters and activations; the CPU backend computes bfloat16 through float32 copies of its own.
      out: where the JSON goes.
    """

    preset: str = "sdar-1.7b"
    length: int = 4096
    rows: int = 1
    layers: int | None = None
    chunks: tuple[int | None, ...] = (256,)
    remat: str = "layer"
    dtype: str = "bfloat16"
    out: Path = Path("experiments/block_diffusion/results/step_memory.json")

    def __post_init__(self) -> None:
        if self.preset not in BLOCK_DIFFUSION_PRESETS:
            raise ValueError(
                f"preset must be one of {', '.join(BLOCK_DIFFUSION_PRESETS)}, not {self.preset!r}"
            )
        if self.length < 1 or self.rows < 1:
            raise ValueError(f"length and rows must be at least 1, not {self.length} and {self.rows}")


def cost(options: Options, doubled: bool, chunk: int | None) -> dict[str, Any]:
    """Operations of one compiled step and the bytes that it holds."""
    changes: dict[str, Any] = {"remat": options.remat, "dtype": options.dtype, "param_dtype": options.dtype}
    config = dataclasses.replace(BLOCK_DIFFUSION_PRESETS[options.preset], **changes)
    config = dataclasses.replace(config, layers=options.layers or config.layers)
    # The alignment changes nothing here, and the mask's id neither.
    spec = TokenSpec(mask=config.vocab_size - 1, alignment="own")
    loss = block_diffusion_loss(network_of(config), spec, BlockRules(doubled=doubled), chunk=chunk)
    shape = (options.rows, options.length)
    kinds = {"tokens": jnp.int32, "labelled": jnp.bool_, "positions": jnp.int32}
    batch = {name: jax.ShapeDtypeStruct(shape, kind) for name, kind in kinds.items()}

    def value(params: Any, batch: dict[str, jax.Array], key: jax.Array) -> Any:
        return loss(params, None, batch, key)

    step = jax.jit(jax.value_and_grad(value, has_aux=True))
    shapes = parameter_shapes(config)
    compiled = step.lower(shapes, batch, jax.eval_shape(lambda: jax.random.key(0))).compile()
    work, memory = compiled.cost_analysis(), compiled.memory_analysis()
    if work is None or memory is None:
        raise SystemExit(f"the backend {jax.default_backend()} tells nothing of its memory")
    return {
        "form": next(name for name, which in FORMS.items() if which == doubled),
        "chunk": chunk,
        "operations": None if chunk else work["flops"],
        "temporary_bytes": memory.temp_size_in_bytes,
        "parameter_bytes": sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes)),
        "output_bytes": memory.output_size_in_bytes,
    }


def main(options: tyro.conf.OmitArgPrefixes[Options]) -> None:
    """Prints and writes the table."""
    lines = []
    for chunk in options.chunks:
        for doubled in FORMS.values():
            line = cost(options, doubled, chunk)
            lines.append(line)
            counted = "" if chunk else f"{line['operations'] / 1e12:.3f} Tflop, "
            print(
                f"{line['form']:>12}, logits of {chunk or 'all'} positions: {counted}"
                f"{line['temporary_bytes'] / 2**30:.2f} GiB temporary beside {line['parameter_bytes'] / 2**30:.2f} "
                f"GiB of parameters",
                flush=True,
            )
    write_record(options.out, options, {"rows": lines}, dtypes=[options.dtype])


if __name__ == "__main__":
    run(main)
