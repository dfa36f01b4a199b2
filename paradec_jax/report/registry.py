"""The parts of a report, in the order of their importance.

A family's decoders, bundled models and presets come from `families.FAMILIES`; what a family wants to show besides is
a `Part` of its own, listed here, and claims about it in `claims.CLAIMS`.
"""

from paradec_jax.report.autoregressive import AUTOREGRESSIVE
from paradec_jax.report.calls import CALLS
from paradec_jax.report.compare import COMPARE
from paradec_jax.report.compiling import COMPILING
from paradec_jax.report.device import DEVICE
from paradec_jax.report.layouts import LAYOUTS
from paradec_jax.report.parts import Part
from paradec_jax.report.pointers import POINTERS
from paradec_jax.report.training import TRAINING
from paradec_jax.report.wave import WAVE

PARTS: dict[str, Part] = {
    part.name: part
    for part in (DEVICE, COMPARE, AUTOREGRESSIVE, WAVE, CALLS, POINTERS, LAYOUTS, TRAINING, COMPILING)
}
