"""Languages whose law is known exactly: Markov chains over a few symbols.

::

    x_1 ~ pi,   x_{i+1} ~ T[x_i]                          pi the stationary law of T, L symbols
    log p(x) = log pi[x_1] + sum_i log T[x_i, x_{i+1}]
    floor    = H(pi) + (L - 1) sum_u pi[u] H(T[u])        nats a text; no bound of a model lies below it

In the chain of `Followers` a symbol has two successors, so that a text is lawful or it is not: what
a decoder reveals together without looking shows at once.
"""

import abc
import bisect
import dataclasses
import functools
import hashlib
import string
from typing import Any

import numpy as np
from jaxtyping import Bool, Float64, Int, Int32

SYMBOLS = string.ascii_letters + string.digits  # of texts that are written
SETTLED = 2**10  # steps after which a chain has forgotten where it began
ROUNDING = 1e-9  # of sums of probabilities


class MarkovLaw(abc.ABC):
    """A stationary chain; a subclass is a frozen dataclass that says how many symbols and which
    transitions.

    Attributes:
      length: L, symbols of a text.
    """

    length: int

    @property
    @abc.abstractmethod
    def transitions(self) -> Float64[np.ndarray, "V V"]:
        """T, by symbol and the next one."""

    @functools.cached_property
    def stationary(self) -> Float64[np.ndarray, "V"]:
        """pi = pi T."""
        law = np.linalg.matrix_power(self.transitions, SETTLED).mean(axis=0)
        return law / law.sum()

    @functools.cached_property
    def powers(self) -> Float64[np.ndarray, "L V V"]:
        """T^0, T^1, .. T^(L - 1)."""
        return np.stack([np.linalg.matrix_power(self.transitions, d) for d in range(self.length)])

    @functools.cached_property
    def log_transitions(self) -> Float64[np.ndarray, "V V"]:
        """log T, minus infinity where a symbol never follows."""
        with np.errstate(divide="ignore"):
            return np.log(self.transitions)

    @property
    def rate(self) -> float:
        """Entropy of a symbol given the one before, in nats."""
        return float(self.stationary @ _entropy(self.transitions))

    @property
    def floor(self) -> float:
        """Entropy of a text, in nats."""
        return float(_entropy(self.stationary)) + (self.length - 1) * self.rate

    def log_probability(self, texts: Int[np.ndarray, "N L"]) -> Float64[np.ndarray, "N"]:
        """log p of each text, in nats; minus infinity where it is not lawful."""
        return np.log(self.stationary)[texts[:, 0]] + self.log_conditional(
            texts[:, 1:], texts[:, 0]
        )

    def log_conditional(
        self, texts: Int[np.ndarray, "N M"], before: Int[np.ndarray, "N"]
    ) -> Float64[np.ndarray, "N"]:
        """log p of each text given the symbol before it, in nats."""
        whole = np.concatenate([before[:, None], texts], axis=1)
        return self.log_transitions[whole[:, :-1], whole[:, 1:]].sum(axis=1)

    def draw(self, count: int, seed: Any) -> Int32[np.ndarray, "N L"]:
        """Independent texts."""
        first, rows = self._reached
        uniforms = np.random.default_rng(seed).random((self.length, count, 1))
        texts = np.empty((count, self.length), np.int32)
        texts[:, 0] = np.sum(uniforms[0] >= first, axis=1)
        for i in range(1, self.length):
            texts[:, i] = np.sum(uniforms[i] >= rows[texts[:, i - 1]], axis=1)
        return texts

    def walk(self, count: int, seed: Any) -> Int32[np.ndarray, "N"]:
        """One long run; it begins in the stationary law, so that a window from anywhere has the law
        of a text.
        """
        uniforms = np.random.default_rng(seed).random(count).tolist()
        first, rows = (reached.tolist() for reached in self._reached)
        found = [bisect.bisect_right(first, uniforms[0])]
        for uniform in uniforms[1:]:
            found.append(bisect.bisect_right(rows[found[-1]], uniform))
        return np.asarray(found, np.int32)

    @functools.cached_property
    def _reached(self) -> tuple[np.ndarray, np.ndarray]:
        """Cumulative probabilities of the first symbol [V] and of the next one [V, V], which reach
        1 exactly.
        """
        first, rows = np.cumsum(self.stationary), np.cumsum(self.transitions, axis=1)
        return np.where(first > 1 - ROUNDING, 1.0, first), np.where(rows > 1 - ROUNDING, 1.0, rows)

    @property
    def digest(self) -> str:
        """Names the law."""
        return hashlib.sha256(repr(self).encode()).hexdigest()


@dataclasses.dataclass(frozen=True)
class Followers(MarkovLaw):
    """Each symbol is one of two followers of the one before; all symbols are equally frequent.

    Attributes:
      symbols: V.
      length: L, symbols of a text.
      share: probability of the first follower; that of the second is the rest.
      seed: of who follows whom.
    """

    symbols: int = 16
    length: int = 32
    share: float = 0.5
    seed: int = 0

    def __post_init__(self) -> None:
        if self.symbols < 2 or self.length < 2:
            raise ValueError(
                f"symbols and length must be at least 2, not {self.symbols} and {self.length}"
            )
        if not 0 < self.share < 1:
            raise ValueError(f"share must be in (0, 1), not {self.share}")

    @functools.cached_property
    def followers(self) -> Int32[np.ndarray, "V 2"]:
        """Both followers of each symbol. The first ones make one cycle of all symbols; no chain
        here is periodic.
        """
        rng = np.random.default_rng(self.seed)
        first = np.empty(self.symbols, np.int32)
        cycle = rng.permutation(self.symbols)
        first[cycle] = np.roll(cycle, -1)
        while True:
            second = rng.permutation(self.symbols).astype(np.int32)
            apart = (first != second).all()
            if apart and np.linalg.matrix_power(_mixed(first, second, 0.5), SETTLED).all():
                return np.stack([first, second], axis=1)

    @functools.cached_property
    def transitions(self) -> Float64[np.ndarray, "V V"]:
        """T, by symbol and the next one."""
        first, second = self.followers.T
        return _mixed(first, second, self.share)

    def lawful(
        self, texts: Int[np.ndarray, "N M"], before: Int[np.ndarray, "N"] | None = None
    ) -> Bool[np.ndarray, "N M"]:
        """Which symbols are followers of the one before them; those that have none before them are.

        Args:
          texts: rows of symbols; other numbers, such as a mask, are never lawful, nor is what
            follows them.
          before: the symbol before each row.
        """
        start = np.full(len(texts), -1) if before is None else before
        whole = np.concatenate([start[:, None], texts], axis=1)
        known = (whole >= 0) & (whole < self.symbols)
        table = self.transitions > 0
        inside = np.where(known, whole, 0)
        follows = table[inside[:, :-1], inside[:, 1:]] & known[:, :-1] & known[:, 1:]
        if before is None:
            follows[:, :1] = known[:, 1:2]
        return follows


def _entropy(law: np.ndarray) -> np.ndarray:
    """-sum p log p over the last axis."""
    return -np.sum(law * np.log(np.where(law > 0, law, 1.0)), axis=-1)


def _mixed(first: np.ndarray, second: np.ndarray, share: float) -> Float64[np.ndarray, "V V"]:
    """Transitions to the first follower with probability `share`, else to the second."""
    rows = np.eye(len(first))
    return share * rows[first] + (1 - share) * rows[second]
