"""What README.md and the papers' RESULTS.md claim about speed: one entry a sentence."""

from paradec_jax.decode.machine.setting import Setting
from paradec_jax.families import FAMILIES
from paradec_jax.report.judging import Claim, Ratio, Row, field, ratio

DISTILLED, CAUSAL, JACOBI = "tiny-recurrent-distilled", "tiny-causal", "tiny-jacobi"
SHALLOW = Row(DISTILLED, "autoregressive", {"recurrence": 1})
DEEP = Row(DISTILLED, "autoregressive", {"recurrence": 16})
FORGETTING = Row(DISTILLED, "wavefront", {"window": 8, "warm_start": False})
WAVE = Row(DISTILLED, "wavefront", {"window": 2})
PLAIN = tuple(Row(DISTILLED, "jacobi", {"block": 8, "running": running}) for running in (False, True))
ONE_BY_ONE = Row(JACOBI, "autoregressive")
RUNNING = {"running": True, "candidates": None}
RUNNING_8 = Row(JACOBI, "jacobi", {"block": 8, **RUNNING})
RUNNING_16 = Row(JACOBI, "jacobi", {"block": 16, **RUNNING})
BLOCK = Row(JACOBI, "jacobi", {"block": 16, "running": False, "pool": 0})
WIDE = "wide-pointers"
WHOLE = Row(WIDE, "wavefront", {"window": 65, "warm_start": True}, "pointers")
WHOLE_JACOBI = (
    Row(WIDE, "wavefront", {"window": 65, "warm_start": False}, "pointers"),
    *(Row(WIDE, "jacobi", {"running": running}, "pointers") for running in (False, True)),
)
NARROW = Row(WIDE, "wavefront", {"window": 15}, "pointers")
SEQUENTIAL = (
    Row(WIDE, "autoregressive", {}, "pointers"),
    Row(WIDE, "adaptive", {"exit_threshold": 0.4}, "pointers"),
    Row(WIDE, "adaptive", {"exit_threshold": 0.8}, "pointers"),
)
README = "README.md"
RECURRENT, CAUSAL_MODELS, SYSTEMS = (
    f"experiments/{folder}/RESULTS.md" for folder in ("recurrent_depth", "jacobi", "systems")
)
XEON, EPYC = "Intel Xeon with AMX", "AMD EPYC"


def _rows(model: str, family: str) -> tuple[Row, ...]:
    """All rows of a model that are no baseline."""
    others: list[Setting] = [setting for setting in FAMILIES[family].settings if not setting.baseline]
    return tuple(Row(model, setting.name, setting.settings()) for setting in others)


CLAIMS: tuple[Claim, ...] = (
    Claim(
        "several tokens a call / r = 1",
        "tiny-recurrent-distilled: what writes several tokens a call (Jacobi decoding, a wave of 8 that forgets its "
        "states) is not faster than one recurrence a token, one by one.",
        README,
        EPYC,
        Ratio((FORGETTING, *PLAIN), (SHALLOW,)),
        most=1.0,
    ),
    Claim(
        "forgetting wave / r = 1",
        "tiny-recurrent-distilled: the wave that forgets is 1.53 times as fast as one recurrence a token.",
        README,
        XEON,
        ratio(FORGETTING, SHALLOW),
        least=1.53,
    ),
    Claim(
        "r = 1 / r = 16",
        "tiny-recurrent-distilled: one recurrence a token is 6.8 times as fast as sixteen (5.7 to 7.8).",
        README,
        EPYC,
        ratio(SHALLOW, DEEP),
        least=5.68,
        most=7.76,
    ),
    Claim(
        "paper's wave / r = 1",
        "tiny-recurrent-distilled: a wave that commits one token a step gains wasted recurrences alone, so it is no "
        "faster than one recurrence a token.",
        README,
        EPYC,
        ratio(WAVE, SHALLOW),
        most=1.0,
    ),
    Claim(
        "forgetting wave / Jacobi",
        "tiny-recurrent-distilled: the wave that forgets is 1.13 times as fast as Jacobi decoding at one recurrence "
        "(0.96 to 1.54).",
        RECURRENT,
        EPYC,
        ratio(FORGETTING, *PLAIN),
        least=0.96,
        most=1.54,
    ),
    Claim(
        "forgetting wave / r = 16",
        "tiny-recurrent-distilled: the wave that forgets is 11.7 times as fast as sixteen recurrences.",
        RECURRENT,
        XEON,
        ratio(FORGETTING, DEEP),
        least=11.7,
    ),
    Claim(
        "paper's wave / r = 16",
        "tiny-recurrent-distilled: a wave of window 2 is 5.29 times as fast as sixteen recurrences.",
        RECURRENT,
        XEON,
        ratio(WAVE, DEEP),
        least=5.29,
    ),
    *(
        Claim(
            f"forgetting wave, batch {batch}",
            f"tiny-recurrent-distilled: at batch {batch} the wave that forgets is slower than one recurrence.",
            RECURRENT,
            XEON,
            ratio(FORGETTING, SHALLOW, batch=batch),
            most=1.0,
        )
        for batch in (4, 16)
    ),
    Claim(
        "running window 8",
        "tiny-jacobi: a running window of 8 is 1.4 times as fast as one by one.",
        CAUSAL_MODELS,
        XEON,
        ratio(RUNNING_8, ONE_BY_ONE),
        least=1.4,
    ),
    Claim(
        "running window 16",
        "tiny-jacobi: a running window of 16 is 1.3 times as fast as one by one.",
        CAUSAL_MODELS,
        XEON,
        ratio(RUNNING_16, ONE_BY_ONE),
        least=1.3,
    ),
    Claim(
        "blocks of 16",
        "tiny-jacobi: block Jacobi decoding, n = 16, is 1.1 times as fast as one by one.",
        CAUSAL_MODELS,
        XEON,
        ratio(BLOCK, ONE_BY_ONE),
        least=1.1,
    ),
    *(
        Claim(
            name.replace("_", " "),
            f"tiny-jacobi: {name.replace('_', ' ')} decoding is slower than one by one.",
            CAUSAL_MODELS,
            XEON,
            ratio(Row(JACOBI, name), ONE_BY_ONE),
            most=1.0,
        )
        for name in ("prompt_lookup", "lookahead")
    ),
    Claim(
        "undistilled",
        "tiny-causal: before distillation every parallel decoder is slower than one by one.",
        CAUSAL_MODELS,
        XEON,
        Ratio(_rows(CAUSAL, "causal"), (Row(CAUSAL, "autoregressive"),)),
        most=1.0,
    ),
    Claim(
        "causal / recurrent",
        "tiny-jacobi with a running window of 8 is faster than the wave that forgets on tiny-recurrent-distilled "
        "(timed minutes apart, not in turns).",
        RECURRENT,
        XEON,
        ratio(RUNNING_8, FORGETTING),
        least=1.0,
    ),
    Claim(
        "wave that holds an answer",
        "wide-pointers: a wave that holds the answer is 1.90 times as fast as twelve recurrences one by one (1.14 to "
        "2.09).",
        README,
        EPYC,
        ratio(WHOLE, SEQUENTIAL[0]),
        least=1.14,
        most=2.09,
    ),
    Claim(
        "carried states",
        "wide-pointers: that wave is 1.16 times as fast as Jacobi decoding at r = 12 (1.05 to 1.35).",
        README,
        EPYC,
        ratio(WHOLE, *WHOLE_JACOBI),
        least=1.05,
        most=1.35,
    ),
    Claim(
        "one position a step",
        "wide-pointers: a wave that opens one position a step is slower than twelve recurrences one by one.",
        README,
        EPYC,
        ratio(NARROW, SEQUENTIAL[0]),
        most=1.0,
    ),
    Claim(
        "wave that holds an answer, all sequential rivals",
        "wide-pointers: a wave that holds the answer is 3.5 times as fast as the best sequential rival, adaptive "
        "decoding among them.",
        README,
        XEON,
        ratio(WHOLE, *SEQUENTIAL),
        least=3.5,
    ),
    Claim(
        "paced wave, tiny",
        "tiny-recurrent's shape: a step of a wave as wide as sixteen recurrences takes 0.71 of the time of a step at "
        "r = 16; a full wave commits a token too.",
        SYSTEMS,
        XEON,
        field("wave", "needed", shape="tiny-recurrent", name="wave, r' = 1"),
        most=0.71,
    ),
    *(
        Claim(
            f"{count} positions",
            f"tiny-causal's shape: a call over {count} positions costs {most} times one over one position (claimed "
            "after 96 positions, measured here after 256).",
            CAUSAL_MODELS,
            XEON,
            field("calls", "needed", shape="tiny-causal", window=count),
            most=most,
        )
        for count, most in ((8, 2.1), (16, 3.2))
    ),
)
