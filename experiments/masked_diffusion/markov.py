"""A law that is known exactly: a Markov chain over a few symbols, none of which rules another out.

`experiments.tasks.chains` has what chains share, `experiments.common.known` the perfect denoiser.
"""

import dataclasses
import functools
import math

import numpy as np
from jaxtyping import Float64

from experiments.tasks.chains import MarkovLaw


@dataclasses.dataclass(frozen=True)
class Chain(MarkovLaw):
    """A law in which every symbol may follow every other one.

    Attributes:
      weights: probabilities of the transitions out of a symbol, all of them above 0; each symbol
        has them in an order of its own.
      length: L, symbols of a text.
      seed: of those orders.
    """

    weights: tuple[float, ...] = (0.72, 0.13, 0.06, 0.03, 0.02, 0.02, 0.01, 0.01)
    length: int = 32
    seed: int = 0

    def __post_init__(self) -> None:
        if (
            len(self.weights) < 2
            or min(self.weights) <= 0
            or not math.isclose(sum(self.weights), 1)
        ):
            raise ValueError(
                f"weights must be at least two numbers above 0 that sum to 1, not {self.weights}"
            )
        if self.length < 2:
            raise ValueError(f"length must be at least 2, not {self.length}")

    @property
    def symbols(self) -> int:
        """V, symbols; the mask is token V of a denoiser."""
        return len(self.weights)

    @functools.cached_property
    def transitions(self) -> Float64[np.ndarray, "V V"]:
        """T, by symbol and the next one."""
        rows = np.tile(np.asarray(self.weights, np.float64), (self.symbols, 1))
        return np.random.default_rng(self.seed).permuted(rows, axis=1)
