"""Chains of pointers, where answers need depth: a wave that holds a whole answer beside rivals of equal accuracy."""

import functools
from collections.abc import Sequence
from typing import Any

from paradec_jax.data.pointers import PointerTask
from paradec_jax.decode import Adaptive, Jacobi, Static, Wavefront
from paradec_jax.decode.machine.setting import Setting
from paradec_jax.evaluate import pointer_problems
from paradec_jax.families import EVERY_STEP
from paradec_jax.report.compare import Unit, measure_unit, picture, tables
from paradec_jax.report.parts import Part, Result, Task
from paradec_jax.report.sizes import Sizes
from paradec_jax.store import Model

MODEL, QUERIES, NEAREST, DEPTH = "wide-pointers", 64, 8, 12
ANSWER = QUERIES + 1  # tokens of an answer after the one that the prompt predicts
HALVES = (1 + ANSWER // 2,)  # a narrower window of such a wave


def _wave(
    inner: int, window: int, headway: int, exit_threshold: float, buckets: tuple[int, ...] = ()
) -> Setting:
    decoder = Wavefront(
        inner_recurrence=inner, window=window, headway=headway, buckets=buckets, prefill_recurrence=1
    )
    knobs = Wavefront.Knobs(exit_threshold=exit_threshold, momentum=0.0)
    return Setting("wavefront", decoder, knobs)


def _adaptive(exit_threshold: float) -> Setting:
    decoder = Adaptive(max_recurrence=32, prefill_recurrence=1)
    return Setting("adaptive", decoder, Adaptive.Knobs(exit_threshold=exit_threshold))


def _jacobi(block: int, running: bool) -> Setting:
    decoder = Jacobi(block=block, running=running, recurrence=DEPTH, prefill_recurrence=1)
    return Setting("jacobi", decoder)


# Jacobi decoding at that depth once more, as a wave that forgets its states.
FORGETTING = Setting(
    "wavefront",
    Wavefront(
        inner_recurrence=DEPTH,
        window=ANSWER,
        headway=ANSWER,
        warm_start=False,
        prefill_recurrence=1,
        buckets=HALVES,
    ),
    Wavefront.Knobs(exit_threshold=EVERY_STEP, momentum=0.0),
)
# Depth twelve is the least that answers need; `experiments/recurrent_depth/tune.py` chose the waves and the windows
# of Jacobi decoding. All read the prompt once.
RIVALS: Sequence[Setting] = (
    Setting("autoregressive", Static(recurrence=DEPTH, prefill_recurrence=1), baseline=True),
    _wave(3, ANSWER, ANSWER, 0.8, HALVES),
    _jacobi(ANSWER, running=False),
    _jacobi(ANSWER, running=True),
    FORGETTING,
    _adaptive(0.4),
    _adaptive(0.8),
    _wave(1, 15, 1, 0.8),
)


def prompts(sizes: Sizes, model: Model, count: int) -> tuple[Sequence[Any], int]:
    """Unseen tables whose queries are all 8 look-ups away or more; " =", a name for each, and the stop token."""
    del model
    task = PointerTask(queries=QUERIES)
    problems = pointer_problems(count, seed=sizes.seed, task=task, nearest=NEAREST)
    return [problem.prompt for problem in problems], QUERIES + 2


def measure(task: Task) -> Result:
    """The rows at batch 1."""
    calls = dict(task.sizes.problems).get(1, 1)
    unit = Unit(MODEL, 1, calls, RIVALS, functools.partial(prompts, task.sizes))
    return {"rows": measure_unit(unit, task)}


POINTERS = Part("pointers", "A task that needs depth", 2.0, measure, tables, picture)
