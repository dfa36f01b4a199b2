"""Noise schedules: how much of a text is hidden at a time t in [0, 1]; 0 is the text, 1 (almost) all masks.

::

    mask probability   m(t) = 1 - exp(-sigma(t)),    sigma the total noise
    loss weight        w(t) = sigma'(t) / (exp(sigma(t)) - 1) = m'(t) / m(t)

    log-linear         m = (1 - e) t                       cosine           m = (1 - e) (1 - cos(pi t / 2))
    linear             sigma = a + (b - a) t               cosine squared   m = (1 - e) (1 - cos^2(pi t / 2))
    geometric          sigma = a^(1 - t) b^t

w is the weight of the continuous-time bound (MDLM; Sahoo et al. 2024, arXiv 2406.07524, whose schedules these are).
It is computed in a form that loses no digits where both factors of the quotient are small.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from paradec_jax.config.bounds import check_words

Time = Float[Array, "*shape"]
EPSILON = 1e-3  # e, share of a text that three schedules keep at t = 1
LOW = 1e-3  # a, smallest noise of the other two
LINEAR, GEOMETRIC = 7.0, 1.0  # b, their largest noise


class Formulas(NamedTuple):
    """One schedule: m(t), w(t), the time of a mask probability, and the smallest and largest noise of the bound."""

    probability: Callable[[Time], Time]
    weight: Callable[[Time], Time]
    time: Callable[[Time], Time]
    sigmas: tuple[float, float]


def _geometric(t: Time) -> Time:
    return LOW ** (1 - t) * GEOMETRIC**t


def _linear(t: Time) -> Time:
    return LOW + (LINEAR - LOW) * t


ENDING = (EPSILON, -math.log(EPSILON))  # the smallest noise is e, as the original has it
FORMULAS = {
    "loglinear": Formulas(
        lambda t: (1 - EPSILON) * t,
        lambda t: 1 / t,
        lambda m: m / (1 - EPSILON),
        ENDING,
    ),
    "cosine": Formulas(
        lambda t: 2 * (1 - EPSILON) * jnp.square(jnp.sin(jnp.pi / 4 * t)),
        lambda t: jnp.pi / 2 / jnp.tan(jnp.pi / 4 * t),
        lambda m: 4 / jnp.pi * jnp.arcsin(jnp.sqrt(jnp.clip(m / (2 * (1 - EPSILON)), 0, 0.5))),
        ENDING,
    ),
    "cosine_squared": Formulas(
        lambda t: (1 - EPSILON) * jnp.square(jnp.sin(jnp.pi / 2 * t)),
        lambda t: jnp.pi / jnp.tan(jnp.pi / 2 * t),
        lambda m: 2 / jnp.pi * jnp.arcsin(jnp.sqrt(jnp.clip(m / (1 - EPSILON), 0, 1))),
        ENDING,
    ),
    "linear": Formulas(
        lambda t: -jnp.expm1(-_linear(t)),
        lambda t: (LINEAR - LOW) / jnp.expm1(_linear(t)),
        lambda m: (-jnp.log1p(-m) - LOW) / (LINEAR - LOW),
        (LOW, LINEAR),
    ),
    "geometric": Formulas(
        lambda t: -jnp.expm1(-_geometric(t)),
        lambda t: math.log(GEOMETRIC / LOW) * _geometric(t) / jnp.expm1(_geometric(t)),
        lambda m: jnp.log(-jnp.log1p(-m) / LOW) / math.log(GEOMETRIC / LOW),
        (LOW, GEOMETRIC),
    ),
}


@dataclasses.dataclass(frozen=True)
class Schedule:
    """A schedule, equal by its name.

    Attributes:
      name: "loglinear" (MDLM's and SDTT's), "cosine", "cosine_squared", "linear" or "geometric".
    """

    name: str = "loglinear"

    def __post_init__(self) -> None:
        check_words(self, name=FORMULAS)

    def mask_probability(self, t: Time) -> Time:
        """m = 1 - exp(-sigma)."""
        return FORMULAS[self.name].probability(t)

    def sigma(self, t: Time) -> Time:
        """The total noise, -log(1 - m)."""
        return -jnp.log1p(-self.mask_probability(t))

    def weight(self, t: Time) -> Time:
        """w = m' / m."""
        return FORMULAS[self.name].weight(t)

    def time(self, probability: Time) -> Time:
        """The time of a mask probability, the inverse of m."""
        return FORMULAS[self.name].time(probability)

    @property
    def log_range(self) -> tuple[float, float]:
        """(f_0, f_T): log mask probabilities at the smallest and the largest noise."""
        low, high = FORMULAS[self.name].sigmas
        return math.log(-math.expm1(-low)), math.log(-math.expm1(-high))

    def importance(self, t: Time) -> Time:
        """The time whose log mask probability is linear in `t`, from f_0 to f_T: MDLM's importance sampling.

        There the weight of the bound is constant, `f_T - f_0`.
        """
        low, high = self.log_range
        return self.time(jnp.exp(t * high + (1 - t) * low))


LOGLINEAR = Schedule("loglinear")
