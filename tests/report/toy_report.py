"""A report at toy size: shapes of a few thousand parameters."""

from paradec_jax.config import CAUSAL_PRESETS, RECURRENT_PRESETS
from paradec_jax.report.sizes import Race, Sizes, Training

CAUSAL, RECURRENT = CAUSAL_PRESETS["test-causal"], RECURRENT_PRESETS["test-recurrent"]
SIZES = Sizes(
    dtype="float32",
    presets=("test-causal",),
    races=(Race("test-recurrent", RECURRENT, 2, (1,), 2),),
    train=(Training("test-causal", CAUSAL, 2, 8),),
    layouts=("test-causal",),
    windows=(1, 2),
    depths=(2,),
    context=8,
    steps=2,
    tokens=4,
    passes=2,
    problems=((1, 2), (2, 1)),
)
