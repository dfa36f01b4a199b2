"""What a decoder asks of a network, and what a call hands over and gives back.

A network is a small frozen dataclass, equal by its config; parameters are always an argument. Its
cache, if it has one, is addressed by absolute position: `forward` reads what the prefix makes
visible and returns the window's keys and values; the decoder stores them with `write`, or does not.
"""

from typing import Any, Protocol, runtime_checkable

from jaxtyping import Array, Bool, Float, Int

from paradec_jax.records import pytree

Params = Any
Cache = Any
Window = Any
Counts = dict[str, Int[Array, "*B"] | int]
Inputs = Int[Array, "B W"] | Float[Array, "B W D"]  # tokens, or vectors in their place
Mask = Bool[Array, "*B W W"] | None


@pytree
class Prepared:
    """Parameters laid out for decoding by `Network.prepare`; only the network that made them reads
    them.
    """

    params: Params


@pytree
class Prefix:
    """A cache and what a window sees of it.

    Attributes:
      kv: the cache.
      visible: the first so many positions [B], a mask [B, S], one for each query [B, W, S], or
        None: nothing to see (a prompt's call, which may still read what the cache holds of the
          window's own positions).
    """

    kv: Cache
    visible: Int[Array, "B"] | Bool[Array, "B S"] | Bool[Array, "B W S"] | None


@pytree
class Forward:
    """What one call of a network returns.

    Attributes:
      hidden: input of the output matrix, [B, W, D].
      kv: the window's keys and values, for `write`; None of a network without a cache.
      counts: amount of each declared counter that the call took, a number or one a row.
    """

    hidden: Float[Array, "B W D"]
    kv: Window
    counts: Counts


@runtime_checkable
class Network(Protocol):
    """A network as the machine drives it; frozen and hashable. A denoiser, which reads its canvas
    anew, is no more.

    `counters` names what a call costs beside the call itself and the positions it computes.
    `visibility` ("causal", "full" or "block") and `block`, the block length where it is "block",
    are facts of the checkpoint.

    `forward` reads parameters that are raw or prepared, a window's tokens or a vector in the place
    of each, and their absolute positions. The window sees of the cache what the prefix says, and of
    itself what the mask says, or else the network's visibility.

    A network may have a method `most_probable`, of the arguments of `logits`: the first token of
    the largest logit.
    """

    vocab_size: int
    max_length: int
    counters: tuple[str, ...]
    visibility: str
    block: int | None

    def prepare(self, params: Params) -> Prepared: ...
    def forward(
        self,
        params: Params,
        inputs: Inputs,
        positions: Int[Array, "B W"],
        prefix: Prefix | None = None,
        mask: Mask = None,
    ) -> Forward: ...
    def logits(
        self, params: Params, hidden: Float[Array, "*shape D"]
    ) -> Float[Array, "*shape V"]: ...


@runtime_checkable
class CachedNetwork(Network, Protocol):
    """A network that need not compute a position again: it keeps what later calls read of it.

    Decoders of recurrent depth also ask for the parts of a call, as `models.RecurrentDepthNetwork`
    has them.
    """

    def init_cache(self, keys: Array, size: int) -> Cache: ...
    def write(self, cache: Cache, window: Window, at: Int[Array, "B"]) -> Cache: ...
    def pick(self, window: Window, start: Int[Array, "B"], width: int) -> Window: ...
    def take(self, window: Window, slots: Int[Array, "B _"]) -> Window: ...
    def widen(self, window: Window, width: int) -> Window: ...
