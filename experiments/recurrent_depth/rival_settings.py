"""What `rivals` tries on tuning problems, rival by rival, equally many settings of each.

Two tasks: word problems, whose prompts a decoder may read at any depth, and chains of pointers,
whose prompts every decoder reads once, so that the depth is spent at the answers.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from experiments.common.problems import Problems, of_pointers, of_words
from paradec_jax.decode import Adaptive, AutoRegressive, Jacobi, SelfSpeculative, Static, Wavefront
from paradec_jax.decode.machine.setting import Setting
from paradec_jax.families import EVERY_STEP

SEQUENTIAL = ("autoregressive", "adaptive", "self-speculative")
PARALLEL = ("Jacobi, one block", "Jacobi, running window")
ONE, SEVERAL = "wave, one position a step", "wave with headway"
NEAREST = 8  # look-ups of pointers
Grid = dict[str, list[Setting]]
# Of causal models, whose tuning is that of `paradec compare causal`.
CAUSAL = (
    ("autoregressive", Setting("autoregressive", AutoRegressive(), baseline=True)),
    (PARALLEL[0], Setting("jacobi", Jacobi(block=16))),
    (PARALLEL[1], Setting("jacobi", Jacobi(block=8, running=True))),
    (PARALLEL[1], Setting("jacobi", Jacobi(block=16, running=True))),
)


@dataclasses.dataclass(frozen=True)
class Task:
    """A task and its rivals.

    Attributes:
      model: a model that has learned it, bundled or trained by `pointers.py`.
      draw: (how many, seed, split, queries) -> problems.
      grid: queries -> settings of each rival, the baseline among them.
      beside: depths of sequential decoding that stand in the last table whatever was chosen.
      others: models of another family that answer the same problems.
    """

    model: str
    draw: Callable[[int, int, str, int], Problems]
    grid: Callable[[int], Grid]
    beside: tuple[int, ...]
    others: tuple[str, ...] = ()


def static(recurrence: int, prefill: int | None = None) -> Setting:
    """One token after another at a fixed depth; the baseline has sixteen recurrences."""
    decoder = Static(recurrence=recurrence, prefill_recurrence=prefill)
    return Setting("autoregressive", decoder, baseline=recurrence == 16 and prefill in (None, 1))


def adaptive(
    criterion: str, exit: float, most: int | None = None, prefill: int | None = None
) -> Setting:
    """One token after another, each until the criterion fires."""
    decoder = Adaptive(criterion=criterion, max_recurrence=most, prefill_recurrence=prefill)
    return Setting("adaptive", decoder, Adaptive.Knobs(exit_threshold=exit))


def speculative(deep: int, draft: int, ahead: int, prefill: int | None = None) -> Setting:
    """A few tokens drafted at few recurrences, verified at more."""
    decoder = SelfSpeculative(
        recurrence=deep, draft_recurrence=draft, lookahead=ahead, prefill_recurrence=prefill
    )
    return Setting("speculative", decoder)


def jacobi(block: int, depth: int, running: bool, prefill: int | None = None) -> Setting:
    """Every position of a block, or of a window that moves on with each step, at one depth."""
    decoder = Jacobi(block=block, running=running, recurrence=depth, prefill_recurrence=prefill)
    return Setting("jacobi", decoder)


def wave(
    inner: int, window: int, headway: int, exit: float, prefill: int = 1, **choices: Any
) -> Setting:
    """The clean wavefront, without momentum."""
    decoder = Wavefront(
        inner_recurrence=inner,
        window=window,
        headway=headway,
        prefill_recurrence=prefill,
        **choices,
    )
    return Setting("wavefront", decoder, Wavefront.Knobs(exit_threshold=exit, momentum=0.0))


def words_grid(queries: int) -> Grid:
    """For word problems; few recurrences suffice."""
    del queries
    drafts = [(2, 1, 2), (2, 1, 4), (2, 1, 8), (4, 1, 4), (4, 2, 4), (16, 1, 4)]
    return {
        "autoregressive": [static(r) for r in (1, 2, 3, 4, 8, 16)],
        "adaptive": [
            *(adaptive("latent-diff", e) for e in (0.1, 0.2, 0.4, 0.8)),
            adaptive("cosine", 0.05),
            adaptive("argmax-stability", 1.0),
        ],
        "self-speculative": [speculative(*draft) for draft in drafts],
        PARALLEL[0]: [
            jacobi(n, r, False) for n, r in ((4, 1), (8, 1), (12, 1), (16, 1), (8, 2), (16, 2))
        ],
        PARALLEL[1]: [
            jacobi(n, r, True) for n, r in ((4, 1), (6, 1), (8, 1), (12, 1), (6, 2), (8, 2))
        ],
        ONE: [wave(1, w, 1, e, p) for w, p in ((2, 1), (2, 4), (3, 4)) for e in (0.1, 0.4)],
        SEVERAL: [
            *(wave(1, w, w, EVERY_STEP, warm_start=False) for w in (6, 8, 12)),
            wave(2, 8, 8, EVERY_STEP, warm_start=False),
            *(wave(1, 8, 8, e) for e in (0.1, 0.4)),
        ],
    }


def pointers_grid(queries: int) -> Grid:
    """For pointers, whose answers have a token for each query and one more; twelve recurrences are
    needed.
    """
    whole = 1 + queries
    half, quarter = 1 + whole // 2, 1 + whole // 4
    narrower: dict[str, Any] = {"buckets": (half,)}
    blocks = [(quarter, 12), (half, 12), (whole, 12), (whole, 11), (half, 13), (whole, 13)]
    drafts = [(12, 11, 2), (12, 11, 4), (12, 11, 8), (12, 9, 4), (12, 6, 4), (13, 11, 4)]
    return {
        "autoregressive": [static(r, 1) for r in (8, 11, 12, 13, 14, 16)],
        "adaptive": [
            *(adaptive("latent-diff", e, 32, 1) for e in (0.2, 0.4, 0.8)),
            adaptive("latent-diff", 0.4, 13, 1),
            adaptive("cosine", 0.05, 32, 1),
            adaptive("argmax-stability", 1.0, 32, 1),
        ],
        "self-speculative": [speculative(*draft, prefill=1) for draft in drafts],
        PARALLEL[0]: [jacobi(n, r, False, 1) for n, r in blocks],
        PARALLEL[1]: [jacobi(n, r, True, 1) for n, r in blocks],
        ONE: [wave(r, w, 1, e) for r, w in ((1, 15), (2, 8), (4, 5)) for e in (0.4, 0.8)],
        SEVERAL: [
            *(wave(inner, whole, whole, 0.8, **narrower) for inner in (3, 4, 6)),
            wave(4, whole, whole, 0.4, **narrower),
            wave(4, half, half, 0.8, buckets=()),
            wave(12, whole, whole, EVERY_STEP, warm_start=False, **narrower),
        ],
    }


TASKS = {
    "words": Task(
        "tiny-recurrent-distilled",
        lambda count, seed, split, queries: of_words(count, seed, split),
        words_grid,
        (1, 2, 4),
        ("tiny-jacobi", "tiny-causal"),
    ),
    "pointers": Task(
        "runs/wide-pointers/model",
        lambda count, seed, split, queries: of_pointers(count, seed, split, NEAREST, queries),
        pointers_grid,
        (8, 11, 12, 13),
    ),
}
