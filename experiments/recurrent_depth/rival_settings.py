"""What `rivals` tries on tuning problems, rival by rival, equally many settings of each.

Every decoder reads the prompts once, so that the depth is spent at the answers.
"""

from typing import Any

from paradec_jax.decode import Adaptive, Jacobi, SelfSpeculative, Static, Wavefront
from paradec_jax.decode.machine.setting import Setting
from paradec_jax.families import EVERY_STEP

SEQUENTIAL = ("autoregressive", "adaptive", "self-speculative")
PARALLEL = ("Jacobi, one block", "Jacobi, running window")
ONE, SEVERAL = "wave, one position a step", "wave with headway"
BESIDE = (8, 11, 12, 13)  # depths of sequential decoding that stand in the last table in any case
Grid = dict[str, list[Setting]]


def static(recurrence: int) -> Setting:
    """One token after another at a fixed depth; the baseline has sixteen recurrences."""
    decoder = Static(recurrence=recurrence, prefill_recurrence=1)
    return Setting("autoregressive", decoder, baseline=recurrence == 16)


def adaptive(criterion: str, exit: float, most: int) -> Setting:
    """One token after another, each until the criterion fires."""
    decoder = Adaptive(criterion=criterion, max_recurrence=most, prefill_recurrence=1)
    return Setting("adaptive", decoder, Adaptive.Knobs(exit_threshold=exit))


def speculative(deep: int, draft: int, ahead: int) -> Setting:
    """A few tokens drafted at few recurrences, verified at more."""
    decoder = SelfSpeculative(
        recurrence=deep, draft_recurrence=draft, lookahead=ahead, prefill_recurrence=1
    )
    return Setting("speculative", decoder)


def jacobi(block: int, depth: int, running: bool) -> Setting:
    """Every position of a block, or of a window that moves on with each step, at one depth."""
    decoder = Jacobi(block=block, running=running, recurrence=depth, prefill_recurrence=1)
    return Setting("jacobi", decoder)


def wave(inner: int, window: int, headway: int, exit: float, **choices: Any) -> Setting:
    """The clean wavefront, without momentum."""
    decoder = Wavefront(
        inner_recurrence=inner,
        window=window,
        headway=headway,
        prefill_recurrence=1,
        **choices,
    )
    return Setting("wavefront", decoder, Wavefront.Knobs(exit_threshold=exit, momentum=0.0))


def grid(queries: int) -> Grid:
    """For answers that have a token for each query and one more; twelve recurrences are needed."""
    whole = 1 + queries
    half, quarter = 1 + whole // 2, 1 + whole // 4
    narrower: dict[str, Any] = {"buckets": (half,)}
    blocks = [(quarter, 12), (half, 12), (whole, 12), (whole, 11), (half, 13), (whole, 13)]
    drafts = [(12, 11, 2), (12, 11, 4), (12, 11, 8), (12, 9, 4), (12, 6, 4), (13, 11, 4)]
    return {
        "autoregressive": [static(r) for r in (8, 11, 12, 13, 14, 16)],
        "adaptive": [
            *(adaptive("latent-diff", e, 32) for e in (0.2, 0.4, 0.8)),
            adaptive("latent-diff", 0.4, 13),
            adaptive("cosine", 0.05, 32),
            adaptive("argmax-stability", 1.0, 32),
        ],
        "self-speculative": [speculative(*draft) for draft in drafts],
        PARALLEL[0]: [jacobi(n, r, False) for n, r in blocks],
        PARALLEL[1]: [jacobi(n, r, True) for n, r in blocks],
        ONE: [wave(r, w, 1, e) for r, w in ((1, 15), (2, 8), (4, 5)) for e in (0.4, 0.8)],
        SEVERAL: [
            *(wave(inner, whole, whole, 0.8, **narrower) for inner in (3, 4, 6)),
            wave(4, whole, whole, 0.4, **narrower),
            wave(4, half, half, 0.8, buckets=()),
            wave(12, whole, whole, EVERY_STEP, warm_start=False, **narrower),
        ],
    }
