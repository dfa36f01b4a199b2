"""Noise schedules: how much of a text is hidden at a time t in [0, 1]; 0 is the text, 1 (almost) all masks.

::

    mask probability   m(t) = 1 - exp(-sigma(t)),    sigma the total noise
    loss weight        w(t) = sigma'(t) / (exp(sigma(t)) - 1) = m'(t) / m(t)

w is the weight of the continuous-time bound (MDLM; Sahoo et al. 2024, arXiv 2406.07524). Each schedule computes it in
a form that loses no digits where both factors of the quotient are small; for the log-linear one it is 1 / t exactly.
"""

import abc
import dataclasses
import math

import jax.numpy as jnp
from jaxtyping import Array, Float

Time = Float[Array, "*shape"]

EPSILON = 1e-3
"""What the three schedules that end at all masks keep of a text at t = 1."""


class Schedule(abc.ABC):
    """One schedule; frozen, equal by its numbers."""

    @property
    @abc.abstractmethod
    def sigmas(self) -> tuple[float, float]:
        """The smallest and the largest noise between which the bound is taken."""

    @abc.abstractmethod
    def sigma(self, t: Time) -> Time:
        """The total noise."""

    @abc.abstractmethod
    def rate(self, t: Time) -> Time:
        """The derivative of the total noise, sigma'."""

    @abc.abstractmethod
    def time(self, probability: Time) -> Time:
        """The time of a mask probability, the inverse of m."""

    def mask_probability(self, t: Time) -> Time:
        """m = 1 - exp(-sigma)."""
        return -jnp.expm1(-self.sigma(t))

    def weight(self, t: Time) -> Time:
        """w = sigma' / (exp(sigma) - 1)."""
        return self.rate(t) / jnp.expm1(self.sigma(t))


def log_probability_range(schedule: Schedule) -> tuple[float, float]:
    """(f_0, f_T): log mask probabilities at the smallest and the largest noise."""
    low, high = schedule.sigmas
    return math.log(-math.expm1(-low)), math.log(-math.expm1(-high))


@dataclasses.dataclass(frozen=True)
class _Ending(Schedule):
    """A schedule that ends at all masks but a share e of a text, at t = 1."""

    epsilon: float = EPSILON

    def __post_init__(self) -> None:
        if not 0 < self.epsilon < 1:
            raise ValueError(f"epsilon must be in (0, 1), not {self.epsilon}")

    @property
    def sigmas(self) -> tuple[float, float]:
        """The smallest noise is e, as the original has it, the largest sigma(1)."""
        return self.epsilon, -math.log(self.epsilon)


@dataclasses.dataclass(frozen=True)
class _Ranging(Schedule):
    """A schedule whose noise grows from `low` to `high`."""

    low: float = 1e-3
    high: float = 7.0

    def __post_init__(self) -> None:
        if not 0 < self.low < self.high:
            raise ValueError(f"low and high must be above 0 and ascend, not {self.low} and {self.high}")

    @property
    def sigmas(self) -> tuple[float, float]:
        """`low` and `high`."""
        return self.low, self.high


@dataclasses.dataclass(frozen=True)
class LogLinear(_Ending):
    """The schedule of MDLM and SDTT: sigma = -log(1 - (1 - e) t), so that m = (1 - e) t.

    Attributes:
      epsilon: e, the share of a text that is kept at t = 1.
    """

    def sigma(self, t: Time) -> Time:
        """-log(1 - (1 - e) t)."""
        return -jnp.log1p(-(1 - self.epsilon) * t)

    def rate(self, t: Time) -> Time:
        """(1 - e) / (1 - (1 - e) t)."""
        return (1 - self.epsilon) / (1 - (1 - self.epsilon) * t)

    def mask_probability(self, t: Time) -> Time:
        """(1 - e) t."""
        return (1 - self.epsilon) * t

    def weight(self, t: Time) -> Time:
        """1 / t."""
        return 1 / t

    def time(self, probability: Time) -> Time:
        """m / (1 - e)."""
        return probability / (1 - self.epsilon)


@dataclasses.dataclass(frozen=True)
class Cosine(_Ending):
    """sigma = -log(e + (1 - e) cos(pi t / 2)), so that m = 2 (1 - e) sin^2(pi t / 4).

    Attributes:
      epsilon: e, the share of a text that is kept at t = 1.
    """

    def sigma(self, t: Time) -> Time:
        """-log(1 - m)."""
        return -jnp.log(self._kept(t))

    def rate(self, t: Time) -> Time:
        """(pi / 2) (1 - e) sin(pi t / 2) / (1 - m)."""
        return jnp.pi / 2 * (1 - self.epsilon) * jnp.sin(jnp.pi / 2 * t) / self._kept(t)

    def mask_probability(self, t: Time) -> Time:
        """2 (1 - e) sin^2(pi t / 4)."""
        return 2 * (1 - self.epsilon) * jnp.square(jnp.sin(jnp.pi / 4 * t))

    def weight(self, t: Time) -> Time:
        """(pi / 2) / tan(pi t / 4)."""
        return jnp.pi / 2 / jnp.tan(jnp.pi / 4 * t)

    def time(self, probability: Time) -> Time:
        """(4 / pi) arcsin(sqrt(m / (2 (1 - e))))."""
        share = probability / (2 * (1 - self.epsilon))
        return 4 / jnp.pi * jnp.arcsin(jnp.sqrt(jnp.clip(share, 0, 0.5)))

    def _kept(self, t: Time) -> Time:
        return self.epsilon + (1 - self.epsilon) * jnp.cos(jnp.pi / 2 * t)


@dataclasses.dataclass(frozen=True)
class CosineSquared(_Ending):
    """sigma = -log(e + (1 - e) cos^2(pi t / 2)), so that m = (1 - e) sin^2(pi t / 2).

    Attributes:
      epsilon: e, the share of a text that is kept at t = 1.
    """

    def sigma(self, t: Time) -> Time:
        """-log(1 - m)."""
        return -jnp.log(self._kept(t))

    def rate(self, t: Time) -> Time:
        """(pi / 2) (1 - e) sin(pi t) / (1 - m)."""
        return jnp.pi / 2 * (1 - self.epsilon) * jnp.sin(jnp.pi * t) / self._kept(t)

    def mask_probability(self, t: Time) -> Time:
        """(1 - e) sin^2(pi t / 2)."""
        return (1 - self.epsilon) * jnp.square(jnp.sin(jnp.pi / 2 * t))

    def weight(self, t: Time) -> Time:
        """pi / tan(pi t / 2)."""
        return jnp.pi / jnp.tan(jnp.pi / 2 * t)

    def time(self, probability: Time) -> Time:
        """(2 / pi) arcsin(sqrt(m / (1 - e)))."""
        share = probability / (1 - self.epsilon)
        return 2 / jnp.pi * jnp.arcsin(jnp.sqrt(jnp.clip(share, 0, 1)))

    def _kept(self, t: Time) -> Time:
        return self.epsilon + (1 - self.epsilon) * jnp.square(jnp.cos(jnp.pi / 2 * t))


@dataclasses.dataclass(frozen=True)
class Linear(_Ranging):
    """sigma grows linearly from `low` to `high`."""

    def sigma(self, t: Time) -> Time:
        """low + t (high - low)."""
        return self.low + t * (self.high - self.low)

    def rate(self, t: Time) -> Time:
        """high - low."""
        return jnp.full_like(t, self.high - self.low)

    def time(self, probability: Time) -> Time:
        """(-log(1 - m) - low) / (high - low)."""
        return (-jnp.log1p(-probability) - self.low) / (self.high - self.low)


@dataclasses.dataclass(frozen=True)
class Geometric(_Ranging):
    """sigma grows geometrically, low^(1 - t) high^t."""

    high: float = 1.0

    def sigma(self, t: Time) -> Time:
        """low^(1 - t) high^t."""
        return self.low ** (1 - t) * self.high**t

    def rate(self, t: Time) -> Time:
        """sigma log(high / low)."""
        return self.sigma(t) * math.log(self.high / self.low)

    def time(self, probability: Time) -> Time:
        """log(-log(1 - m) / low) / log(high / low)."""
        return jnp.log(-jnp.log1p(-probability) / self.low) / math.log(self.high / self.low)


SCHEDULES: dict[str, Schedule] = {
    "loglinear": LogLinear(),
    "cosine": Cosine(),
    "cosine_squared": CosineSquared(),
    "linear": Linear(),
    "geometric": Geometric(),
}
