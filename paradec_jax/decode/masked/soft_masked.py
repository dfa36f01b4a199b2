"""The masked sampler made differentiable: revealed tokens that the next calls read as relaxed vectors.

The step is that of `Masked`, with the same keys and so the same tokens. Who is revealed and which token is committed
stay discrete and carry no gradient; the vector that later calls read of a revealed position does. With l its logits,
T the temperature, g the Gumbel noise that draws its token y, and E the embedding::

    q                   softmax((log softmax(l / T) + g) / tau)      a Gumbel-softmax sample (arXiv 1611.01144)
    soft                q E
    straight_through    sg(E[y] - q E) + q E                         forward E[y], backward q E

So gradients reach the parameters, T and tau through every call after the reveal. Given positions may be vectors
instead of tokens (`SoftGiven`), and gradients reach those too.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from paradec_jax.decode.machine.decoder import DecoderBase
from paradec_jax.decode.machine.knobs import check_range
from paradec_jax.decode.machine.request import RecordedDraws, Request
from paradec_jax.decode.machine.rows import Rows
from paradec_jax.decode.masked.unmask import (
    Draw,
    MaskedKnobs,
    MaskedState,
    Unmasked,
    begin,
    check_order,
    unmask,
)
from paradec_jax.decode.rules.randomness import Purpose, fold
from paradec_jax.decode.rules.relaxation import RELAXATIONS, relaxed
from paradec_jax.decode.rules.sampling import filtered_probabilities, gumbel
from paradec_jax.nn.precision import at_least_float32

LOWEST = -1e6  # the logarithm of no probability, finite so that its gradient is 0 and not NaN


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SoftMaskedKnobs(MaskedKnobs):
    """Of `Masked`, and how soft its tokens are.

    Attributes:
      token_temperature: tau of the mixture that stands for a token, above 0.
    """

    token_temperature: Float[Array, ""] | float = 1.0

    def check(self) -> None:
        """Raises ValueError for values outside their range, unless they are traced."""
        check_range(self.token_temperature, "token_temperature", lambda x: x > 0, "above 0")
        super().check()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SoftGiven(RecordedDraws):
    """Vectors that the network reads in place of the embeddings of given tokens.

    Attributes:
      vectors: of the positions of `Request.tokens`; what stands at a hole or after a row's length is not read,
        [B, P, D].
    """

    vectors: Float[Array, "B P D"] | None = dataclasses.field(default=None, metadata={"per_row": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SoftMaskedState(MaskedState):
    """The state of `Masked`, and what is soft about its tokens.

    Attributes:
      offsets: what is added to the vector of each position's token, [B, S, D].
    """

    offsets: Float[Array, "B S D"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SoftUnmasked(Unmasked):
    """What a call revealed, and the head input of every position, [B, S, D]."""

    hidden: Float[Array, "B S D"]


@dataclasses.dataclass(frozen=True)
class SoftMasked(DecoderBase):
    """`Masked` whose tokens carry gradients through `rollout`.

    Attributes:
      order: as of `Masked`.
      chunk: C, positions of a row whose logits exist at once.
      relaxation: "straight_through" (what is read is a token, its gradient a mixture's) or "soft" (a mixture).
    """

    _: dataclasses.KW_ONLY
    order: str = "random"
    chunk: int = 64
    relaxation: str = "straight_through"
    Knobs: ClassVar[type] = SoftMaskedKnobs
    visibilities: ClassVar[tuple[str, ...]] = ("full",)
    alignments: ClassVar[tuple[str, ...]] = ("own",)
    any_order: ClassVar[bool] = True
    needs_cache: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_order(self.order, self.chunk)
        if self.relaxation not in RELAXATIONS:
            raise ValueError(f"relaxation must be one of {', '.join(RELAXATIONS)}, not {self.relaxation!r}")

    def init(self, params: Any, request: Request, knobs: SoftMaskedKnobs) -> SoftMaskedState:
        """As `Masked`; the vectors of given positions are those of `SoftGiven`, or their tokens'."""
        if getattr(request.recorded, "uniforms", None) is not None:
            raise ValueError("SoftMasked draws by its keys, so recorded.uniforms must be None")
        hard = begin(self, self.begin(request, 0), knobs)
        table = self.network.embedding(params)
        offsets = jnp.zeros((*hard.final.shape, table.shape[1]), table.dtype)
        vectors = getattr(request.recorded, "vectors", None)
        if vectors is not None:
            given = hard.final[:, : vectors.shape[1], None]
            difference = vectors.astype(table.dtype) - table[request.tokens]
            offsets = offsets.at[:, : vectors.shape[1]].set(jnp.where(given, difference, 0.0))
        return SoftMaskedState(**vars(hard), offsets=offsets)

    def step(
        self, params: Any, state: SoftMaskedState, knobs: SoftMaskedKnobs
    ) -> tuple[SoftMaskedState, SoftUnmasked]:
        """One call on the relaxed vectors of the canvas, for each row's next group."""
        at = jnp.zeros_like(state.rows.length)
        tokens, positions, open_, mask = state.window(at, self.size)
        table = self.network.embedding(params)
        out = self.network.forward(params, table[tokens] + state.offsets, positions, None, mask)
        state = state.spend(out.counts, state.rows.limit)
        draw = self._draw(table, state.rows, knobs)
        new, info, offsets = unmask(self, params, state, out.hidden, at, state.groups, open_, draw)
        kept = jnp.where(info.where[..., None], offsets, state.offsets)
        return dataclasses.replace(new, offsets=kept), SoftUnmasked(**vars(info), hidden=out.hidden)

    def drafts(self, state: SoftMaskedState) -> Int[Array, "B S"]:
        """What is revealed after a gap."""
        return state.ahead

    def _draw(self, table: Float[Array, "V D"], rows: Rows, knobs: SoftMaskedKnobs) -> Draw:
        """Tokens as `Masked` draws them, and what the relaxation adds to their vectors."""

        def draw(logits: Array, positions: Array) -> tuple[Array, Array]:
            scores = at_least_float32(logits)
            if not self.greedy:
                probs = filtered_probabilities(logits, knobs, top_p_rule=self.top_p_rule)
                noisy = _log(probs) + gumbel(fold(rows.keys, Purpose.TOKEN, positions), logits.shape[-1])
                scores = jnp.where(jnp.asarray(knobs.temperature) > 0, noisy, scores)
            tokens = jnp.argmax(scores, axis=-1).astype(jnp.int32)
            return tokens, relaxed(table, scores, tokens, knobs.token_temperature, self.relaxation)

        return draw


def _log(probs: Float[Array, "*shape V"]) -> Float[Array, "*shape V"]:
    """Logarithms; of a token that the filters took away a number so low that it has no share and no gradient."""
    some: Bool[Array, "*shape V"] = probs > 0
    return jnp.where(some, jnp.log(jnp.where(some, probs, 1.0)), LOWEST)
