"""The parts of a report, in the order of their importance. A new family's rows come from `families.FAMILIES`."""

from paradec_jax.report.compare import COMPARE
from paradec_jax.report.device import DEVICE
from paradec_jax.report.parts import Part

PARTS: dict[str, Part] = {part.name: part for part in (DEVICE, COMPARE)}
