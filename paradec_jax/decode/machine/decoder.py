"""What the decoders of autoregressive networks share: binding, prefill, the end."""

import dataclasses
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from paradec_jax.decode import stop
from paradec_jax.decode.protocol import Decoded, Progress, Request
from paradec_jax.decode.randomness import Purpose, fold
from paradec_jax.decode.sampling import log_probability, sample

AnyDecoder = TypeVar("AnyDecoder", bound="DecoderBase")  # not Self, which the type checks of tests refuse


@dataclasses.dataclass(frozen=True)
class DecoderBase:
    """Static fields and the methods that no decoder changes.

    Attributes:
      network: the network; may be bound later.
      size: S, positions of prompt and new tokens together; may be bound later.
      pad: token behind a row's end in the result.
      log_probs: keep the log-probability of each committed token.
      top_p_rule: "drop" or "keep", see `sampling.filtered_probabilities`.
      greedy: always take the most probable token. The program then holds no sampling code and
        compiles sooner; a temperature above 0 is refused.
      bounded: inner loops run a fixed number of masked steps (for reverse mode).
    """

    network: Any = None
    size: int = 0
    _: dataclasses.KW_ONLY
    pad: int = 0
    log_probs: bool = False
    top_p_rule: str = "drop"
    greedy: bool = False
    bounded: bool = False

    def bind(self: AnyDecoder, network: Any, size: int, pad: int = 0) -> AnyDecoder:
        """The same decoder for a network and a buffer of `size` positions."""
        return dataclasses.replace(self, network=network, size=size, pad=pad)

    def differentiable(self: AnyDecoder) -> AnyDecoder:
        """The same decoder with inner loops of a fixed number of steps."""
        return dataclasses.replace(self, bounded=True)

    def done(self, state: Any) -> Bool[Array, "B"]:
        """Rows that have stopped."""
        return state.progress.done

    def finish(self, state: Any) -> Decoded:
        """The result so far."""
        return stop.finish(state.progress, self.size, self.pad)

    def interrupt(self, state: Any, rows: Bool[Array, "B"]) -> Any:
        """Stops rows at the caller's word."""
        return dataclasses.replace(state, progress=stop.stop_rows(state.progress, rows))

    def start(self, request: Request, knobs: Any, scratch: int) -> tuple[Progress, Any]:
        """Fresh rows and an empty cache, with room for `scratch` positions beyond `size`.

        The initial latent states of all positions are drawn here, once: inside the loop the draws would cost
        more than a layer of a small model.
        """
        room = self.size + scratch
        positions = jnp.broadcast_to(jnp.arange(room), (request.batch, room))
        recorded = request.recorded
        if recorded is not None and recorded.states is not None:
            rows = recorded.states[jnp.minimum(positions, len(recorded.states) - 1)]
            initial = rows * knobs.init_scale
        else:
            initial = self.network.initial_state(
                fold(request.keys, Purpose.STATE, positions), knobs.init_scale
            )
        progress = stop.start(request, self.size, scratch, initial, self.log_probs)
        return progress, self.network.init_cache(request.batch, room)

    def prefill(
        self, params: Any, request: Request, knobs: Any, recurrence: int, scratch: int
    ) -> tuple[Progress, Any, Float[Array, "B 1 D"]]:
        """Reads the prompts in one call and commits the token each predicts.

        Args:
          params, request, knobs: as for `init`.
          recurrence: r of the call.
          scratch: positions that buffers hold beyond `size`.

        Returns:
          Progress, a cache that holds the prompts, and the normalised latent of each last prompt position.
        """
        progress, cache = self.start(request, knobs, scratch)
        positions = prompt_positions(request)
        state = progress.initial[:, : request.tokens.shape[1]]
        out = self.network.forward(params, request.tokens, positions, None, None, state, recurrence)
        cache = self.network.write(cache, out.kv, jnp.zeros_like(request.lengths))
        progress = progress.count(1, request.lengths, recurrence)
        progress, _ = self.commit_next(params, progress, last_of(out.hidden, request.lengths), knobs)
        return progress, cache, last_of(out.latent, request.lengths)

    def sample(
        self, logits: Float[Array, "B W V"], positions: Int[Array, "B W"], progress: Progress, knobs: Any
    ) -> Int[Array, "B W"]:
        """The token at each of `positions`."""
        if self.greedy:
            return jnp.argmax(logits, axis=-1).astype(jnp.int32)
        return sample(logits, positions, progress.keys, knobs, progress.recorded, top_p_rule=self.top_p_rule)

    def prefill_ahead(
        self, params: Any, request: Request, knobs: Any, ahead: Int[Array, "B K"], scratch: int
    ) -> tuple[Progress, Any, Float[Array, "B W D"]]:
        """Reads the prompts and K uncertain tokens behind each in one call; commits and counts nothing.

        Args:
          params, request, knobs: as for `init`.
          ahead: the tokens that follow each row's prompt.
          scratch: positions that buffers hold beyond `size`, at least K.

        Returns:
          Progress, a cache that holds the prompts, and the head input of each last prompt position and of the K
          behind it, W = 1 + K.
        """
        progress, cache = self.start(request, knobs, scratch)
        count = ahead.shape[1]
        fed = jnp.pad(request.tokens, ((0, 0), (0, count)))
        fed = jax.vmap(lambda row, new, at: lax.dynamic_update_slice(row, new, (at,)))(
            fed, ahead, request.lengths
        )
        positions = jnp.broadcast_to(jnp.arange(fed.shape[1]), fed.shape)
        state = progress.initial[:, : fed.shape[1]]
        out = self.network.forward(params, fed, positions, None, None, state, self.network.recurrence)
        cache = self.network.write(cache, out.kv, jnp.zeros_like(request.lengths))
        return progress, cache, stop.window(out.hidden, request.lengths - 1, 1 + count)

    def commit_next(
        self, params: Any, progress: Progress, hidden: Float[Array, "B 1 D"], knobs: Any
    ) -> tuple[Progress, Int[Array, "B 1"]]:
        """Samples the token behind each row's last one and commits it; returns the token as well."""
        logits = self.network.logits(params, hidden)
        token = self.sample(logits, progress.length[:, None], progress, knobs)
        scores = log_probability(logits, token) if self.log_probs else None
        return stop.commit(progress, token, jnp.ones_like(progress.length), scores), token


def prompt_positions(request: Request) -> Int[Array, "B P"]:
    """Positions 0 .. P-1 of every row."""
    batch, width = request.tokens.shape
    return jnp.broadcast_to(jnp.arange(width), (batch, width))


def last_of(hidden: Float[Array, "B P D"], lengths: Int[Array, "B"]) -> Float[Array, "B 1 D"]:
    """The row's last prompt position."""
    return jnp.take_along_axis(hidden, (lengths - 1)[:, None, None], axis=1)


def after(at: Int[Array, "B"], tokens: Int[Array, "B W"]) -> Int[Array, "B"]:
    """`at`, made to depend on tokens that were computed from the cache.

    A write at `at` then comes after every read of the old cache, so XLA updates it in place; otherwise it copies
    the whole cache, twice a step. Token ids are never negative, which XLA does not know, so nothing changes.
    """
    return at - jnp.minimum(jnp.min(tokens, axis=1), 0)


def where_rows(rows: Bool[Array, "B"], new: Any, old: Any) -> Any:
    """Leaves [B, ...] of `new` in these rows, of `old` in the others."""

    def choose(new: Array, old: Array) -> Array:
        return jnp.where(rows.reshape(-1, *(1,) * (new.ndim - 1)), new, old)

    return jax.tree.map(choose, new, old)


def newest(progress: Progress) -> tuple[Int[Array, "B 1"], Int[Array, "B 1"]]:
    """The last committed token of each row and its position."""
    at = progress.length - 1
    return stop.window(progress.tokens, at, 1), at[:, None]
