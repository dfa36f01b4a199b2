"""How large everything is that a report measures, by device."""

import dataclasses
import functools
from typing import Any

import jax

from paradec_jax.config import RECURRENT_PRESETS, ModelConfig, RecurrentDepthConfig
from paradec_jax.families import PRESETS, parameter_shapes

HUGINN, TINY = RECURRENT_PRESETS["huginn-0125"], RECURRENT_PRESETS["tiny-recurrent"]
SMALL_HUGINN = RecurrentDepthConfig(  # its layers and the channels of its heads, a tenth of its width
    vocab_size=8192, width=480, heads=5, feed_forward=1632
)


@dataclasses.dataclass(frozen=True)
class Training:
    """A step of training: a shape, rows and positions of a batch, and of a recurrent shape its recurrences."""

    name: str
    config: ModelConfig
    batch: int
    length: int
    recurrence: int = 1


@dataclasses.dataclass(frozen=True)
class Race:
    """Waves beside sequential decoding: a shape, its name in tables, and the recurrences that each token gets.

    Attributes:
      inner: r', recurrences of a wave's step; the first is timed first.
      jacobi: positions of the Jacobi window at the same depth.
    """

    name: str
    config: RecurrentDepthConfig
    recurrence: int
    inner: tuple[int, ...]
    jacobi: int = 8


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What decides the results of the parts; kept in every file, so that no two are mixed.

    Attributes:
      dtype: of random weights and activations. A CPU has float32: it turns bfloat16 weights into float32, and a share
        of that conversion would hide what a position costs.
      presets: shapes of random weights, the small ones first.
      windows: positions of a call.
      depths: recurrences of a call of a recurrent preset, besides its mean.
      context: cached positions before a window.
      steps: calls of a timed loop.
      tokens: tokens that a timed decoder generates with random weights.
      passes: timings of each figure at most; 2 at least, however short the time is.
      problems: word problems, by rows of a call: {rows: calls}.
      steps_of_problems: fewest and most written steps of a problem.
      seed: of problems, prompts and random weights.
      races: waves beside sequential decoding.
      train: steps of training.
      layouts: presets on which both sides of each choice by backend are timed.
    """

    dtype: str
    presets: tuple[str, ...]
    races: tuple[Race, ...]
    train: tuple[Training, ...]
    layouts: tuple[str, ...]
    windows: tuple[int, ...] = (1, 8, 64, 16, 256, 4, 32, 2, 128)
    depths: tuple[int, ...] = (4,)
    context: int = 256
    steps: int = 32
    tokens: int = 32
    passes: int = 5
    problems: tuple[tuple[int, int], ...] = ((1, 8), (4, 4), (16, 3))
    steps_of_problems: tuple[int, int] = (2, 4)
    seed: int = 1

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return dataclasses.asdict(self)


TINY_RACE = Race("tiny-recurrent", TINY, 16, (1, 4))
INNER = (4, 1, 2, 8)


@functools.lru_cache
def bytes_of(config: ModelConfig) -> int:
    """Bytes of a shape's weights; nothing is allocated."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(parameter_shapes(config)))


def with_dtype(config: ModelConfig, dtype: str) -> ModelConfig:
    """A shape with its weights and activations in one dtype."""
    return dataclasses.replace(config, dtype=dtype, param_dtype=dtype)


def sizes_here() -> Sizes:
    """Sizes for the default device: large shapes in bfloat16 on an accelerator, small ones in float32 on a CPU."""
    tiny = ("tiny-recurrent", "tiny-causal")
    coders = tuple(f"qwen2.5-coder-{size}" for size in ("0.5b", "1.5b", "7b"))
    if jax.default_backend() == "cpu":
        return Sizes(
            dtype="float32",
            presets=(*tiny, *coders[:2], "huginn-0125", coders[2]),
            races=(TINY_RACE, Race("huginn-0125 at a tenth of its width", SMALL_HUGINN, 32, INNER)),
            train=(
                Training("tiny-causal", PRESETS["tiny-causal"], 16, 256),
                Training("tiny-recurrent", PRESETS["tiny-recurrent"], 16, 256, 4),
            ),
            layouts=("tiny-causal", "tiny-recurrent"),
        )
    wider = dataclasses.replace(SMALL_HUGINN, width=1056, heads=11, feed_forward=3584)
    return Sizes(
        dtype="bfloat16",
        presets=(*tiny, *coders[:2], "huginn-0125", coders[2]),
        races=(TINY_RACE, Race("huginn-0125", HUGINN, 32, INNER)),
        train=(
            Training(coders[0], PRESETS[coders[0]], 8, 512),
            Training("huginn-0125 at a fifth of its width", wider, 16, 512, 8),
        ),
        layouts=("tiny-causal", "qwen2.5-coder-1.5b"),
    )
