"""Masking noise: how much of a text is hidden at a time t, which times are drawn, and which tokens
are hidden then.

Times lie in [0, 1]; at 0 is the text, at 1 are (almost) all masks::

    mask probability   m(t) = 1 - exp(-sigma(t)),    sigma the total noise
    loss weight        w(t) = sigma'(t) / (exp(sigma(t)) - 1) = m'(t) / m(t)

    log-linear         m = (1 - e) t                       cosine           m = (1 - e) (1 - cos(pi t / 2))
    linear             sigma = a + (b - a) t               cosine squared   m = (1 - e) (1 - cos^2(pi t / 2))
    geometric          sigma = a^(1 - t) b^t               ratio            m = t

w is the weight of the continuous-time bound (MDLM; Sahoo et al. 2024, arXiv 2406.07524, whose
schedules these are, but for the last, which is LLaDA's, arXiv 2502.09992). It is computed in a form
that loses no digits where both factors of the quotient are small. Times of rows i = 0 .. B-1 are
drawn by one of three rules, from numbers u in [0, 1)::

    plain        tau_i = u_i                      each row by itself
    stratified   tau_i = (u_i + i) / B            one in each B-th of the interval (MDLM's antithetic draw)
    systematic   tau_i = (u + i / B) mod 1        one number for all rows (SDTT's)

    t = floor + (1 - floor) tau
"""

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from paradec_jax.config import check_words

Time = Float[Array, "*shape"]
RULES = ("plain", "stratified", "systematic")  # of times
EPSILON = 1e-3  # e, share of a text that three schedules keep at t = 1
LOW = 1e-3  # a, smallest noise of the other two
LINEAR, GEOMETRIC = 7.0, 1.0  # b, their largest noise


class Formulas(NamedTuple):
    """One schedule: m(t), w(t), the time of a mask probability, least and most noise."""

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
    "ratio": Formulas(lambda t: t, lambda t: 1 / t, lambda m: m, (EPSILON, math.inf)),
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
      name: "loglinear" (MDLM's and SDTT's), "cosine", "cosine_squared", "linear", "geometric" or
        "ratio" (LLaDA's).
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
        """The time whose log mask probability is linear in `t`, from f_0 to f_T: MDLM's importance
        sampling.

        There the weight of the bound is constant, `f_T - f_0`.
        """
        low, high = self.log_range
        return self.time(jnp.exp(t * high + (1 - t) * low))


LOGLINEAR = Schedule("loglinear")


@dataclasses.dataclass(frozen=True)
class Times:
    """How the times of a batch are drawn.

    Attributes:
      rule: "plain", "stratified" or "systematic".
      floor: the smallest time, above 0 and below 1.
    """

    rule: str = "stratified"
    floor: float = 1e-3

    def __post_init__(self) -> None:
        check_words(self, rule=RULES)
        if not 0 < self.floor < 1:
            raise ValueError(f"floor must be in (0, 1), not {self.floor}")

    def draw(self, key: Array, rows: int) -> Float[Array, "B"]:
        """Times of a batch of `rows`."""
        return self.at(jax.random.uniform(key, (1 if self.rule == "systematic" else rows,)), rows)

    def at(self, uniforms: Float[Array, "U"], rows: int) -> Float[Array, "B"]:
        """The times that these numbers in [0, 1) give: one a row, or one for all under
        "systematic".

        Raises:
          ValueError: another number of them.
        """
        wanted = 1 if self.rule == "systematic" else rows
        if len(uniforms) != wanted:
            raise ValueError(
                f"{self.rule} times of {rows} rows come from {wanted} numbers, not {len(uniforms)}"
            )
        index = jnp.arange(rows) / rows
        if self.rule == "stratified":
            uniforms = (uniforms / rows + index) % 1
        elif self.rule == "systematic":
            uniforms = (uniforms + index) % 1
        return (1 - self.floor) * uniforms + self.floor


MDLM_TIMES = Times("stratified", 1e-3)  # of MDLM's training
SDTT_TIMES = Times("systematic", 1e-5)  # of SDTT's


def rounded_up(t: Float[Array, "*shape"], steps: int) -> Float[Array, "*shape"]:
    """The next multiple of 1 / steps above t, at most 1: the times of the discrete bound."""
    return jnp.minimum(jnp.floor(t * steps) / steps + 1 / steps, 1)


def hide(
    tokens: Int[Array, "B S"],
    uniforms: Float[Array, "B S"],
    probability: Float[Array, "B"],
    mask: int,
    where: Bool[Array, "B S"] | None = None,
) -> tuple[Int[Array, "B S"], Bool[Array, "B S"]]:
    """A text with the mask over tokens whose `uniform < probability`, and which of its tokens are
    hidden.

    Only tokens `where` may be; all when None.
    """
    hidden = uniforms < probability[:, None]
    if where is not None:
        hidden &= where
    return jnp.where(hidden, mask, tokens), hidden
