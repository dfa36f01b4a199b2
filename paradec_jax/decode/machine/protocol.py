"""What a decoder is."""

from typing import Any, ClassVar, Protocol, TypeVar, runtime_checkable

import jax
from jaxtyping import Array, Bool, Int

from paradec_jax.config import TokenSpec
from paradec_jax.decode.machine.network import Network, Params
from paradec_jax.decode.machine.request import Request
from paradec_jax.decode.machine.rows import Decoded

State = TypeVar("State")
Info = Any


@runtime_checkable
class Decoder(Protocol[State]):
    """A frozen, hashable dataclass of static choices with pure methods.

    A state is a pytree with `rows`, a `Rows`, and whatever the next step needs. `network`, `size` (buffer length S,
    given and new tokens) and `spec` may be left out and bound later. Parameters are those of the network, raw or
    prepared; of a decoder with further networks, one dictionary by field name.
    """

    Knobs: ClassVar[type]

    def bind(self, network: Network, size: int, spec: TokenSpec) -> "Decoder":
        """The same decoder for a network, a buffer and the facts of a checkpoint; refuses what it cannot decode."""
        ...

    def limits(self) -> tuple[int, int]:
        """S, and the longest sequence that the networks were built for; refuses an unbound decoder."""
        ...

    def check(self, request: Request) -> None:
        """Refuses, before anything is compiled, a request that it cannot serve."""
        ...

    def knobs(self, knobs: Any) -> Any:
        """The knobs as arrays, the defaults for None; refuses those of another type or out of range."""
        ...

    def prepare(self, params: Params) -> Any:
        """Parameters laid out for decoding; called once, by whoever owns them."""
        ...

    def init(self, params: Params, request: Request, knobs: Any) -> State:
        """Allocates every buffer, reads the prompt, and commits the first token where the rule says so."""
        ...

    def step(self, params: Params, state: State, knobs: Any) -> tuple[State, Info]:
        """One round of the networks over all rows; tokens, lengths and counts of finished rows stay.

        The info is what only recorders read; a driver that drops it pays nothing for it.
        """
        ...

    def drafts(self, state: State) -> Int[Array, "B _"]:
        """Tokens that the state guesses for the positions from `length` on, -1 where there is none.

        K is the most that a state of this decoder can hold: 0 where nothing is guessed between steps.
        """
        ...

    def done(self, state: State) -> Bool[jax.Array, "B"]:
        """Rows that have stopped."""
        ...

    def finish(self, state: State) -> Decoded:
        """The result so far."""
        ...

    def interrupt(self, state: State, rows: Bool[Array, "B"]) -> State:
        """Stops rows at the caller's word."""
        ...

    def differentiable(self) -> "Decoder":
        """The same decoder with inner loops of a fixed number of steps, which reverse mode can cross."""
        ...
