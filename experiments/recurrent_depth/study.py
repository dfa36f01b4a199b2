"""The studies of recurrent depth: `python -m experiments.recurrent_depth.study table1 inner_exit`.

One entry for each table and figure of "Efficient Parallel Samplers for Recurrent-Depth Models"
(arXiv 2510.14961). Settings depend on the model's default recurrence r and on how many recurrences
its tokens need, which says how many positions a wave holds in flight. Where the paper varies one
thing, everything else stays at the paper's values (exit threshold 0.03, momentum 0.1, no noise, r'
= 4), and the same is shown at r' = 1, which suits models that converge in a few recurrences.
"""

import dataclasses
import itertools
from pathlib import Path
from typing import Any

from experiments.common.runner import command
from experiments.common.study import Depth, Study
from experiments.replicas import ReleasedWavefront
from paradec_jax.decode import Adaptive, SelfSpeculative, Static, Wavefront
from paradec_jax.decode.machine.setting import Setting
from paradec_jax.decode.recurrent.wave import NOISE_MIXINGS, NOISE_SCHEDULES
from paradec_jax.families import EVERY_STEP

INNER = (1, 2, 4, 8)


def wave(
    inner: int,
    width: int,
    *,
    headway: int = 1,
    noise_schedule: str = "dampened",
    noise_mixing: str = "linear",
    **knobs: Any,
) -> Setting:
    """The clean wavefront."""
    decoder = Wavefront(
        inner_recurrence=inner,
        window=width,
        headway=headway,
        noise_schedule=noise_schedule,
        noise_mixing=noise_mixing,
    )
    return Setting("wavefront", decoder, Wavefront.Knobs(**knobs))


def multi_token(warm_start: bool, exit: float) -> Setting:
    """A wave of one recurrence that may commit several tokens a step."""
    decoder = Wavefront(
        inner_recurrence=1, window=8, headway=8, warm_start=warm_start, prefill_recurrence=1
    )
    return Setting("wavefront", decoder, Wavefront.Knobs(exit_threshold=exit, momentum=0.0))


def released(
    inner: int,
    width: int,
    *,
    rule: str = "latent-diff",
    continuous: bool = False,
    **knobs: Any,
) -> Setting:
    """The wavefront as it was released, without its default noise unless told otherwise."""
    decoder = ReleasedWavefront(
        inner_recurrence=inner, window=width, rule=rule, continuous=continuous
    )
    knobs = {"noise": 0.0, "max_wavefront": width} | knobs
    return Setting("released", decoder, ReleasedWavefront.Knobs(**knobs))


def static(recurrence: int, **choices: Any) -> Setting:
    """Sequential decoding at a fixed recurrence."""
    return Setting("autoregressive", Static(recurrence=recurrence, **choices))


def table1(depth: Depth) -> list[Setting]:
    """Samplers side by side (Table 1), and the settings that suit a small model."""
    return [
        *(static(r) for r in (1, 2, 4, 8, 2 * depth.default) if r != depth.default),
        Setting("adaptive", Adaptive(), Adaptive.Knobs(exit_threshold=0.03)),
        Setting("adaptive", Adaptive(), Adaptive.Knobs(exit_threshold=0.2)),
        Setting("speculative", SelfSpeculative(draft_recurrence=4, lookahead=4)),
        Setting("speculative", SelfSpeculative(draft_recurrence=1, lookahead=4)),
        wave(2, depth.widths[-1], noise=0.5),
        wave(4, depth.widths[-1]),
        released(2, depth.widths[-1], noise=0.5),
        released(4, depth.widths[-1]),
        wave(1, 2, exit_threshold=0.4, momentum=0.0),
        wave(1, 3, exit_threshold=0.1, momentum=0.0),
    ]


def released_against_clean(depth: Depth) -> list[Setting]:
    """The released rule and the clean one at the same knobs, and the released freezing rules."""
    pairs = itertools.product((1, 2, 4), (0.03, 0.1, 0.4))
    both = [
        rule(inner, depth.width(inner), exit_threshold=exit)
        for inner, exit in pairs
        for rule in (wave, released)
    ]
    return [
        *both,
        *(
            released(2, depth.default // 2 + 3, rule=rule)
            for rule in ("latent-acceleration-1", "token-stability", "fixed")
        ),
    ]


def sequential_caches(depth: Depth) -> list[Setting]:
    """What a position leaves for later ones, in static and adaptive decoding."""
    adaptive = Adaptive(), Adaptive.Knobs(exit_threshold=0.03)
    return [
        *(dataclasses.replace(static(other), cache="full") for other in (4, depth.default)),
        static(4),
        *(Setting("adaptive", *adaptive, cache=cache) for cache in ("shared", "full", "latest")),
    ]


STUDIES: dict[str, Study] = {
    "table1": Study("Samplers side by side (Table 1)", table1),
    "table2": Study(
        "Static decoding and the wavefront (Table 2)",
        lambda d: [wave(4, d.width(4)), wave(1, 3, exit_threshold=0.1)],
    ),
    "released": Study("The released rule against the clean one", released_against_clean),
    "inner_exit": Study(
        "Inner recurrence and exit threshold",
        lambda d: [
            wave(i, d.width(i), exit_threshold=e)
            for i in INNER
            for e in (0.02, 0.05, 0.1, 0.2, 0.4, 0.8)
        ],
        "exit_threshold",
        "inner_recurrence",
    ),
    "momentum": Study(
        "Momentum of the conditioning",
        lambda d: [
            wave(i, d.width(i), momentum=m) for i in (1, 4) for m in (0.0, 0.1, 0.2, 0.4, 0.6, 0.8)
        ],
        "momentum",
        "inner_recurrence",
    ),
    "noise": Study(
        "Inner recurrence and noise",
        lambda d: [
            wave(i, d.width(i), noise=b) for i in (1, 2, 4) for b in (0.0, 0.05, 0.1, 0.2, 0.4)
        ],
        "noise",
        "inner_recurrence",
    ),
    "released_noise": Study(
        "Inner recurrence and noise under the released rule",
        lambda d: [
            released(i, d.width(i), exit_threshold=0.1, noise=b)
            for i in INNER
            for b in (0.0, 0.1, 0.2, 0.4, 0.6)
        ],
        "noise",
        "inner_recurrence",
    ),
    "noise_kinds": Study(
        "Schedule and mixing of the noise",
        lambda d: [
            wave(1, d.width(1), noise=0.2, noise_schedule=schedule, noise_mixing=mixing)
            for schedule, mixing in itertools.product(NOISE_SCHEDULES, NOISE_MIXINGS)
        ],
    ),
    "width": Study(
        "Width of the wavefront",
        lambda d: [
            wave(i, w, exit_threshold=e) for i, e in ((1, 0.1), (4, 0.03)) for w in d.widths
        ],
        "window",
        "inner_recurrence",
    ),
    "headway": Study(
        "Headway",
        lambda d: [
            wave(i, d.widths[-1], headway=h, exit_threshold=0.1)
            for i in (1, 4)
            for h in (1, 2, 4, 8, 16)
            if h <= d.widths[-1]
        ],
        "headway",
        "inner_recurrence",
    ),
    "warm_start": Study(
        "Whether states outlive the tokens that they were computed from",
        lambda d: [
            multi_token(warm_start, exit)
            for warm_start in (True, False)
            for exit in (0.1, 0.4, 1.6, EVERY_STEP)
        ],
    ),
    "init_scale": Study(
        "Scale of initial states",
        lambda d: [
            wave(i, d.width(i), init_scale=s) for i in (1, 4) for s in (0.0, 0.25, 0.5, 1.0, 2.0)
        ],
        "init_scale",
        "inner_recurrence",
    ),
    "continuous": Study(
        "Continuous compute",
        lambda d: [
            *(static(2, continuous=c) for c in (False, True)),
            *(released(i, d.width(i), continuous=c) for i in (1, 4) for c in (False, True)),
        ],
    ),
    "caches": Study("Shared against full cache", sequential_caches),
}


if __name__ == "__main__":
    command(STUDIES, Path("experiments/recurrent_depth/results"), "tiny-recurrent")
