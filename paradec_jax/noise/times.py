"""Which times of the noise a batch is trained or judged at, and which tokens are hidden then.

::

    plain        tau_i = u_i                      each row by itself
    stratified   tau_i = (u_i + i) / B            one in each B-th of the interval (MDLM's antithetic draw)
    systematic   tau_i = (u + i / B) mod 1        one number for all rows (SDTT's)

    t = floor + (1 - floor) tau
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from paradec_jax.config.bounds import check_words

RULES = ("plain", "stratified", "systematic")


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
        """The times that these numbers in [0, 1) give: one a row, or one for all under "systematic".

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
    """Puts the mask over each token with the probability of its row: where `uniform < probability`.

    Args:
      tokens: the text.
      uniforms: a number in [0, 1) for each token.
      probability: of each row.
      mask: the mask's id.
      where: tokens that may be hidden; all when None.

    Returns:
      The noised text, and which of its tokens are hidden.
    """
    hidden = uniforms < probability[:, None]
    if where is not None:
        hidden &= where
    return jnp.where(hidden, mask, tokens), hidden
