"""Cost of a distillation step: ordinary causal passes against one packed pass under a dense mask.

`python -m experiments.jacobi.consistency_cost`. XLA plans one step (value and gradient) of the progressive
consistency loss and says how many operations it takes and how much temporary memory; nothing is allocated,
run or timed. The two forms read the same contexts: the first as rows of P + T n positions, the second as one
sequence of P + 2 T n. Attention here computes every score and hides what a mask says, in both; a kernel that
skips hidden scores is not counted.

XLA counts the body of a loop once, so operations are only given where logits are made all at once. The CPU
backend's default schedule keeps much alive for the sake of parallelism; with
`XLA_FLAGS="--xla_cpu_enable_concurrency_optimized_scheduler=false"` it schedules for memory, as other
backends do.
"""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import tyro

from experiments.common.record import write_record
from paradec_jax import facts
from paradec_jax.config import CAUSAL_PRESETS, TokenSpec
from paradec_jax.families import parameter_shapes
from paradec_jax.losses import ConsistencyRules, consistency_loss
from paradec_jax.models import TransformerNetwork

FORMS = {"causal passes": False, "dense mask": True}


@dataclasses.dataclass(frozen=True)
class Options:
    """What to measure.

    Attributes:
      preset: shape of the model; weights are never made.
      prompt: P, prompt tokens.
      pairs: T, pairs of blocks.
      block: n, tokens of a block.
      batch: rows.
      context: what noisy blocks see ("nc", "clean", "nc_ic").
      window: pairs of a window of "nc_ic".
      chunks: positions whose logits are made at a time, one line of the table each (None: all at once).
      remat: "layer" or "none".
      dtype: of parameters and activations; the CPU backend computes bfloat16 through float32 copies of its own.
      out: where the JSON goes.
    """

    preset: str = "qwen2.5-coder-0.5b"
    prompt: int = 512
    pairs: int = 16
    block: int = 32
    batch: int = 1
    context: str = "nc"
    window: int = 16
    chunks: tuple[int | None, ...] = (None, 128)
    remat: str = "layer"
    dtype: str = "float32"
    out: Path = Path("experiments/jacobi/results/consistency_cost.json")


def cost(options: Options, packed: bool, chunk: int | None) -> dict[str, Any]:
    """Operations, bytes moved and bytes held of one compiled step."""
    config = dataclasses.replace(
        CAUSAL_PRESETS[options.preset], remat=options.remat, dtype=options.dtype, param_dtype=options.dtype
    )
    rules = ConsistencyRules(context=options.context, window=options.window)
    loss = consistency_loss(
        TransformerNetwork(config), TokenSpec(stop=(1,), pad=0), rules, packed=packed, chunk=chunk
    )
    rows, blocks = (options.batch,), (options.batch, options.pairs, options.block)
    shapes = {
        "prompt": (options.batch, options.prompt),
        "prompt_lengths": rows,
        "noisy": blocks,
        "clean": blocks,
        "pairs": rows,
    }
    batch = {name: jax.ShapeDtypeStruct(shape, jnp.int32) for name, shape in shapes.items()}

    def value(params: Any, batch: dict[str, jax.Array]) -> Any:
        return loss(params, None, batch, jax.random.key(0))

    step = jax.jit(jax.value_and_grad(value, has_aux=True))
    compiled = step.lower(parameter_shapes(config), batch).compile()
    work, memory = compiled.cost_analysis(), compiled.memory_analysis()
    if work is None or memory is None:
        raise SystemExit("this backend gives no cost or memory analysis")
    passes = 1 + -(-options.pairs // rules.window_of(options.pairs))
    length = options.prompt + options.pairs * options.block
    return {
        "form": next(name for name, which in FORMS.items() if which == packed),
        "chunk": chunk,
        "sequences": options.batch * (1 if packed else passes),
        "positions": length + options.pairs * options.block if packed else length,
        "operations": None if chunk else work["flops"],
        "bytes_moved": None if chunk else work["bytes accessed"],
        "temporary_bytes": memory.temp_size_in_bytes,
        "parameter_bytes": memory.argument_size_in_bytes,
        "dtypes": facts.dtypes(parameter_shapes(config)),
    }


def main(options: Options) -> None:
    """Prints the table and writes it with its settings."""
    if options.preset not in CAUSAL_PRESETS:
        raise SystemExit(f"preset must be one of {', '.join(CAUSAL_PRESETS)}, not {options.preset!r}")
    lines = []
    for chunk in options.chunks:
        for packed in FORMS.values():
            line = cost(options, packed, chunk)
            lines.append(line)
            counted = "" if chunk else f"{line['operations'] / 1e12:.3f} Tflop, "
            print(
                f"{line['form']:>13}, logits of {chunk or 'all'} positions: {line['sequences']} x "
                f"{line['positions']} positions, {counted}{line['temporary_bytes'] / 2**30:.2f} GiB temporary",
                flush=True,
            )
    dtypes = [dtype for line in lines for dtype in line["dtypes"]]
    write_record(options.out, options, {"rows": lines}, dtypes=dtypes)


if __name__ == "__main__":
    main(tyro.cli(Options))
