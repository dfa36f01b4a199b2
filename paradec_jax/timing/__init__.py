"""How fast: decoders timed in turns, steps beside the limits of their device, compiled programs beside each other."""

from paradec_jax.timing.throughput import Case, Speed, measure

__all__ = ["Case", "Speed", "measure"]
