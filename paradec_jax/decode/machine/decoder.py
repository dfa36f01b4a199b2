"""What all decoders share: binding, refusals, sampling, prompts, the end."""

import abc
import dataclasses
from typing import Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from paradec_jax.config import MOST, TokenSpec, check_number, check_numbers, check_words
from paradec_jax.decode.machine import rows as row_state
from paradec_jax.decode.machine.knobs import (
    UNLIMITED,
    RepetitionKnobs,
    SamplingKnobs,
    as_arrays,
    unneeded,
)
from paradec_jax.decode.machine.network import CachedNetwork, Forward, Prefix
from paradec_jax.decode.machine.request import Request
from paradec_jax.decode.machine.rows import Decoded, Rows
from paradec_jax.decode.rules import (
    TOP_P_RULES,
    Purpose,
    earlier,
    log_probability,
    penalised,
    positions_of,
    purpose_keys,
    sample,
    window,
)
from paradec_jax.records import pytree

# not Self, which the type checks of tests refuse
AnyDecoder = TypeVar("AnyDecoder", bound="DecoderBase")


@pytree
class CachedState:
    """Rows, and a cache of all committed tokens but the newest: the state of decoders that append,
    or its base.
    """

    rows: Rows
    cache: Any

    @property
    def cached(self) -> Int[Array, "B"]:
        """Trusted cache entries."""
        return self.rows.length - 1


@dataclasses.dataclass(frozen=True)
class DecoderBase(abc.ABC):
    """A decoder: a frozen, hashable dataclass of static choices with pure methods. Here is what no
    decoder changes.

    A state is a pytree with `rows`, a `Rows`, and whatever the next step needs. Parameters are
    those of the network, raw or prepared; of a decoder with further networks, one dictionary by
    field name.

    Whatever the logits are, NaN and infinities among them, a call after the prompt's commits or
    reveals at least one position. So a row of n new positions ends within n + 1 network calls; a
    class whose calls do other work as well says itself within how many.

    A subclass says in class variables what it can decode: `visibilities` of networks, `alignments`
    of logits, `any_order` where it fills holes and starts from nothing, `needs_cache` where it
    calls a network on a window whose past it keeps, `windowed` where a sequence may be longer than
    the networks were built for, and `further_networks`, the names of fields that hold networks
    beside `network`. `BOUNDS` has ranges of numbers that count no positions, see
    `config.bounds.check_numbers`, `WORDS` the words that a field may be.

    Attributes:
      network: the network; may be bound later.
      size: S, positions of given and new tokens together; may be bound later.
      spec: special tokens and alignment of the checkpoint; may be bound later.
      log_probs: keep the log-probability of each committed token.
      top_p_rule: "keep", "drop" or one of them renormalised, see `sampling.filtered_probabilities`.
      greedy: always take the most probable token. The program then holds no sampling code and
        compiles sooner; a temperature above 0 is refused.
      bounded: inner loops run a fixed number of masked steps (for reverse mode).
    """

    network: Any = None
    size: Any = None
    spec: TokenSpec = TokenSpec()
    _: dataclasses.KW_ONLY
    log_probs: bool = False
    top_p_rule: str = "keep"
    greedy: bool = False
    bounded: bool = False
    Knobs: ClassVar[type[SamplingKnobs]] = SamplingKnobs
    visibilities: ClassVar[tuple[str, ...]] = ("causal",)
    alignments: ClassVar[tuple[str, ...]] = ("next",)
    any_order: ClassVar[bool] = False
    needs_cache: ClassVar[bool] = True
    windowed: ClassVar[bool] = False
    further_networks: ClassVar[tuple[str, ...]] = ()
    BOUNDS = {"chunk": (1, MOST)}  # noqa: RUF012
    WORDS: ClassVar[dict[str, tuple[str, ...]]] = {"top_p_rule": TOP_P_RULES}

    def __post_init__(self) -> None:
        check_numbers(
            type(self), vars(self), self.BOUNDS, getattr(self.network, "max_length", MOST)
        )
        check_words(self, **self.WORDS)

    @abc.abstractmethod
    def init(self, params: Any, request: Request, knobs: Any) -> Any:
        """Allocates every buffer, reads the prompt, and commits the first token where the rule says
        so.
        """

    @abc.abstractmethod
    def step(self, params: Any, state: Any, knobs: Any) -> tuple[Any, Any]:
        """One round of the networks over all rows: a state and an info; finished rows stay as they
        are.

        The info is what only recorders read; a driver that drops it pays nothing for it.
        """

    def bind(
        self: AnyDecoder, network: Any, size: int, spec: TokenSpec | None = None
    ) -> AnyDecoder:
        """The same decoder for a network, a buffer of `size` positions and a checkpoint's special
        tokens.

        Raises:
          ValueError: a checkpoint whose visibility or alignment this decoder cannot serve, or a
            network without a cache where it needs one.
        """
        name, spec = type(self).__name__, spec or self.spec
        for fact, value, accepted in (
            ("visibility", network.visibility, self.visibilities),
            ("alignment", spec.alignment, self.alignments),
        ):
            if value not in accepted:
                raise ValueError(
                    f"{name} decodes networks of {fact} {' or '.join(map(repr, accepted))}, "
                    f"but this one's is {value!r}"
                )
        if self.needs_cache and not isinstance(network, CachedNetwork):
            raise ValueError(
                f"{name} needs a network with a cache, which {type(network).__name__} has not"
            )
        return dataclasses.replace(self, network=network, size=size, spec=spec)

    @property
    def networks(self) -> dict[str, Any]:
        """Every network by its field; a word in the place of a further one says that none runs."""
        names = "network", *self.further_networks
        return {name: x for name in names if not isinstance(x := getattr(self, name), str)}

    @property
    def mask(self) -> int:
        """The checkpoint's mask token. Raises ValueError where it has none, or one that the network
        does not know.
        """
        mask, vocab_size = self.spec.mask, self.network.vocab_size
        if mask is None:
            raise ValueError(
                "a canvas is filled with the mask token, but the checkpoint's token spec has none"
            )
        if not 0 <= mask < vocab_size:
            raise ValueError(
                f"the mask token must be an id below the {vocab_size} of the vocabulary, not {mask}"
            )
        return mask

    def limits(self) -> tuple[int, int]:
        """S, and the longest sequence that the networks were built for (any, where they see windows
        of it).

        Raises:
          ValueError: an unbound decoder.
        """
        if self.size is None or any(network is None for network in self.networks.values()):
            raise ValueError(
                f"{type(self).__name__} has no network or no size: call bind(network, size) first"
            )
        check_number("size", self.size)
        longest = min(network.max_length for network in self.networks.values())
        return self.size, UNLIMITED if self.windowed else longest

    def check(self, request: Request) -> None:
        """Refuses a request that the rule or the buffers cannot hold.

        Raises:
          ValueError: a prompt longer than the buffer, a buffer beyond the model's length, a hole or
            an empty prompt where the decoder appends, a token or stop token beyond the vocabulary,
            a canvas without a mask token that is its own, or one whose first token nothing
            predicts.
        """
        name, (size, longest) = type(self).__name__, self.limits()
        if size > longest:
            raise ValueError(
                f"size {size} is more than the {longest} positions the model was built for"
            )
        if not self.any_order and request.given is not None:
            raise ValueError(
                f"{name} appends tokens, so it cannot fill the holes that given leaves"
            )
        mask = self.mask if self.any_order else None
        if isinstance(request.lengths, jax.core.Tracer):
            return
        if not isinstance(request.tokens, jax.core.Tracer):
            given = check_tokens(request, self.network.vocab_size)
            if mask is not None:
                check_canvas(request, given, mask, self.spec.alignment)
        lengths, budgets = np.asarray(request.lengths), np.asarray(request.budgets)
        if request.tokens.shape[1] > size or np.any(lengths + np.minimum(budgets, 1) > size):
            raise ValueError(
                f"a prompt of {lengths.max()} tokens (padded to {request.tokens.shape[1]}) leaves no room in a "
                f"buffer of {size} positions: give {name} a greater size or shorten the prompt"
            )
        if not self.any_order and lengths.min() < 1:
            raise ValueError(f"{name} continues a prompt, so every row needs at least one token")

    def knobs(self, knobs: Any) -> Any:
        """The knobs as arrays, the defaults for None.

        Raises:
          ValueError: knobs of another type, values that are no numbers of their field's kind or out
            of range, a temperature where the decoder is greedy, or a knob that means nothing to the
            decoder.
        """
        name = type(self).__name__
        knobs = self.Knobs() if knobs is None else knobs
        if not isinstance(knobs, self.Knobs):
            wanted = f"{name}.Knobs ({self.Knobs.__name__})"
            raise ValueError(f"{name} takes knobs of type {wanted}, not {type(knobs).__name__}")
        arrays, hot = as_arrays(knobs, self), knobs.temperature
        if self.greedy and not isinstance(hot, jax.core.Tracer) and np.any(np.asarray(hot) > 0):
            raise ValueError(f"{name} is greedy, so temperature must be 0, not {hot}")
        without = unneeded(knobs, self)
        for field, need in without.items():
            if getattr(knobs, field) is not None:
                raise ValueError(f"{field} needs {need}")
        return dataclasses.replace(arrays, **dict.fromkeys(without))

    def prepare(self, params: Any) -> Any:
        """Parameters laid out for decoding; of several networks, one dictionary by field name."""
        if not self.further_networks:
            return self.network.prepare(params)
        return {name: network.prepare(params[name]) for name, network in self.networks.items()}

    def differentiable(self: AnyDecoder) -> AnyDecoder:
        """The same decoder with inner loops of a fixed number of steps."""
        return dataclasses.replace(self, bounded=True)

    def drafts(self, state: Any) -> Int[Array, "B _"]:
        """Tokens that the state guesses for the positions from `length` on, -1 where there is none.

        They are the state's `drafts`, as many a row as it can hold; none where it has no such
        property.
        """
        return getattr(state, "drafts", state.rows.tokens[:, :0])

    def done(self, state: Any) -> Bool[Array, "B"]:
        """Rows that have stopped."""
        return state.rows.done

    def finish(self, state: Any) -> Decoded:
        """The result so far."""
        return state.rows.finish(self.spec.pad)

    def interrupt(self, state: Any, rows: Bool[Array, "B"]) -> Any:
        """Stops rows at the caller's word."""
        return dataclasses.replace(state, rows=state.rows.interrupt(rows))

    def begin(self, request: Request, scratch: int, overrun: int = 0) -> Rows:
        """Fresh rows with room for a window of `scratch` positions; see `rows.begin`."""
        counters = (name for network in self.networks.values() for name in network.counters)
        return row_state.begin(
            request, self.size, scratch, counters, log_probs=self.log_probs, overrun=overrun
        )

    def empty_cache(self, request: Request, room: int, **latents: Any) -> Any:
        """The network's empty cache of `room` positions; `latents` are options of a recurrent
        network's.
        """
        return self.network.init_cache(purpose_keys(request.keys, Purpose.STATE), room, **latents)

    def prefill(
        self,
        params: Any,
        request: Request,
        knobs: Any,
        scratch: int,
        network: Any = None,
        **latents: Any,
    ) -> tuple[Rows, Any, Forward]:
        """Reads the prompts in one call and commits the token that each predicts; otherwise as
        `prefill_ahead`.
        """
        rows, cache, out = self.prefill_ahead(
            params, request, request.tokens[:, :0], scratch, network, **latents
        )
        rows = rows.spend(out.counts, request.lengths)
        rows, _ = self.commit_next(params, rows, out.hidden, knobs)
        return rows, cache, out

    def prefill_ahead(
        self,
        params: Any,
        request: Request,
        ahead: Int[Array, "B K"],
        scratch: int,
        network: Any = None,
        **latents: Any,
    ) -> tuple[Rows, Any, Forward]:
        """Reads the prompts and K uncertain tokens after each in one call; commits and counts
        nothing.

        Args:
          params, request: as for `init`.
          ahead: tokens that follow each row's prompt.
          scratch: positions that buffers hold after `size`, at least K.
          network: network that reads the prompt, where it is not the decoder's own (another depth).
          latents: see `empty_cache`.

        Returns:
          Rows, a cache that holds the prompts, and the call's result, with the hidden states of
          each last prompt position and of the K after it alone, W = 1 + K.
        """
        network = network or self.network
        rows = self.begin(request, scratch)
        cache = self.empty_cache(request, self.size + scratch, **latents)
        count = ahead.shape[1]
        insert = jax.vmap(lambda row, new, at: lax.dynamic_update_slice(row, new, (at,)))
        fed = insert(jnp.pad(request.tokens, ((0, 0), (0, count))), ahead, request.lengths)
        positions = positions_of(fed)
        out = network.forward(params, fed, positions, Prefix(cache, None))
        cache = network.write(cache, out.kv, jnp.zeros_like(request.lengths))
        hidden = window(out.hidden, request.lengths - 1, 1 + count)
        return rows, cache, dataclasses.replace(out, hidden=hidden)

    def sample(
        self,
        logits: Float[Array, "B W V"],
        positions: Int[Array, "B W"],
        rows: Rows,
        knobs: Any,
        step: Int[Array, "B"] | None = None,
        before: Int[Array, "B W K"] | None = None,
    ) -> Int[Array, "B W"]:
        """The token at each of `positions`.

        Args:
          step: as for `rules.sampling.sample`.
          before: tokens between the committed ones and each position, as for
            `rules.sampling.penalised`; None where the position comes next.
        """

        if isinstance(knobs, RepetitionKnobs):
            before = rows.tokens[:, None, :0] if before is None else before
            logits = penalised(logits, rows.tokens, rows.length, before, knobs.repetition_penalty)
        if self.greedy:
            return jnp.argmax(logits, axis=-1).astype(jnp.int32)
        uniforms = None if rows.recorded is None else rows.recorded.uniforms
        return sample(
            logits, positions, rows.keys, knobs, uniforms, top_p_rule=self.top_p_rule, step=step
        )

    def decide(
        self,
        params: Any,
        hidden: Float[Array, "B W D"],
        positions: Int[Array, "B W"],
        rows: Rows,
        knobs: Any,
        before: Int[Array, "B W K"] | None = None,
    ) -> tuple[Int[Array, "B W"], Float[Array, "B W V"]]:
        """The token at each of `positions`, as of `sample`, and the logits that say so.

        Greedy tokens do not need logits: a network with a method `most_probable` tells them without,
        and logits that nobody reads are in no program.
        """
        logits = self.network.logits(params, hidden)
        best = getattr(self.network, "most_probable", None)
        penalised = getattr(knobs, "repetition_penalty", None) is not None
        if best and self.greedy and not (penalised or self.log_probs):
            return best(params, hidden), logits
        return self.sample(logits, positions, rows, knobs, before=before), logits

    def predict(
        self,
        params: Any,
        rows: Rows,
        knobs: Any,
        hidden: Float[Array, "B R W D"],
        guesses: Int[Array, "B candidates drafts"],
    ) -> tuple[Int[Array, "B R W"], Float[Array, "B R W V"]]:
        """The token that belongs after each row's newest one and each guess after it, and the
        logits that say so.

        Candidates draw with the same noise, which belongs to positions. `guesses` begin with those
        that are judged.
        """
        count, width = hidden.shape[1:3]
        positions = rows.length[:, None] + jnp.arange(width)
        before = earlier(guesses[:, :count, : width - 1])
        if count == 1:  # of several, logits are read after the winner's last token
            chosen = self.decide(params, hidden[:, 0], positions, rows, knobs, before[:, 0])
            return jax.tree.map(lambda x: x[:, None], chosen)
        logits = self.network.logits(params, hidden)
        sample = jax.vmap(
            lambda x, before: self.sample(x, positions, rows, knobs, before=before), 1, 1
        )
        return sample(logits, before), logits

    def scores(
        self, logits: Float[Array, "B *R W V"], tokens: Int[Array, "B *R W"]
    ) -> Float[Array, "B *R W"] | None:
        """Log-probability of each token where it is kept."""
        return log_probability(logits, tokens) if self.log_probs else None

    def commit_next(
        self, params: Any, rows: Rows, hidden: Float[Array, "B 1 D"], knobs: Any
    ) -> tuple[Rows, Int[Array, "B 1"]]:
        """Samples the token after each row's last one and commits it; returns the token as well."""
        token, logits = self.decide(params, hidden, rows.length[:, None], rows, knobs)
        return rows.commit(token, jnp.ones_like(rows.length), self.scores(logits, token)), token


def check_tokens(request: Request, vocab_size: int) -> np.ndarray:
    """Which tokens are given, [B, P]. Raises ValueError where a vocabulary lacks one, or a stop
    token.
    """
    here = np.arange(request.tokens.shape[1]) < np.asarray(request.lengths)[:, None]
    if request.given is not None:
        here &= np.asarray(request.given)
    some = np.asarray(request.stop) != -1  # which stands for none
    for name, ids, given in ("token", request.tokens, here), ("stop token", request.stop, some):
        for row, place in np.argwhere(given & (np.asarray(ids, np.uint32) >= vocab_size))[:1]:
            raise ValueError(
                f"{name} {place} of row {row} must be an id below {vocab_size}, not {ids[row, place]}"
            )
    return here


def check_canvas(request: Request, given: np.ndarray, mask: int, alignment: str) -> None:
    """Refuses a mask among the given tokens, which would never be revealed, and a first token that
    nothing predicts.

    Raises:
      ValueError: either, with the row.
    """
    rows, places = np.nonzero((np.asarray(request.tokens) == mask) & given)
    if len(rows):
        raise ValueError(
            f"row {rows[0]} gives the mask token {mask} at position {places[0]}: leave a hole there instead"
        )
    begun = given[:, :1].any(axis=1)
    if alignment == "next" and not begun.all():
        raise ValueError(
            f"row {int(np.argmin(begun))} does not begin with a given token, and logits of alignment 'next' say "
            f"nothing of the first one"
        )
