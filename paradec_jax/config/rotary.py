"""How rotary positions are scaled, so that a model reads longer texts than it was first trained on."""

import math

from paradec_jax.config.bounds import check_number, check_positive, check_words
from paradec_jax.records import choices

# Kinds, and what each reads besides `factor` and `original`.
KINDS = {
    "linear": (),
    "dynamic": (),
    "llama3": ("low_freq_factor", "high_freq_factor"),
    "yarn": ("beta_fast", "beta_slow", "attention_factor", "truncate"),
}


@choices
class RopeScaling:
    """Scaled rotary positions; `nn.rope` has the formulas.

    Attributes:
      kind: "linear", "dynamic", "llama3" or "yarn".
      factor: s, times that texts may be longer than `original`.
      original: L, length of the longest text that the unscaled model was trained on; "linear"
        scales without it.
      low_freq_factor, high_freq_factor: bounds of "llama3", in rotations of a pair of channels in L
        positions.
      beta_fast, beta_slow: bounds of "yarn", the upper one first; 32 and 1 when None.
      attention_factor: what "yarn" multiplies cosines and sines by; `0.1 ln s + 1` when None, or 1
        if s is below 1.
      truncate: whether "yarn" rounds the numbers of the pairs at its bounds, outwards; True when
        None.
    """

    kind: str
    factor: float
    original: int
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    attention_factor: float | None = None
    truncate: bool | None = None

    def __post_init__(self) -> None:
        check_words(self, kind=KINDS)
        check_number("original", self.original)
        every = {name for names in KINDS.values() for name in names}
        given = {name for name in every if getattr(self, name) is not None}
        for name in sorted(given.difference(KINDS[self.kind])):
            raise ValueError(
                f"{name} must be None where rotary positions are scaled as {self.kind}"
            )
        check_positive(self, "factor", *sorted(given - {"truncate"}))
        low, high = self.low_freq_factor, self.high_freq_factor
        if self.kind == "llama3" and (low is None or high is None or low >= high):
            raise ValueError(
                f"low_freq_factor must be below high_freq_factor, not {low} and {high}"
            )

    @property
    def amplitude(self) -> float:
        """What cosines and sines are multiplied by."""
        if self.kind != "yarn":
            return 1.0
        return self.attention_factor or 0.1 * math.log(max(self.factor, 1.0)) + 1.0
