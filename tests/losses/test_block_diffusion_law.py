"""The loss of a network that knows the law: in the mean it is the negative log-likelihood, whatever is drawn."""

import dataclasses
import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paradec_jax.config import TokenSpec
from paradec_jax.data.chains import Followers
from paradec_jax.losses import BlockRules, block_diffusion_loss
from paradec_jax.noise import BlockNoise
from paradec_jax.noise.blocks import KINDS

LAW = Followers(symbols=3, length=4, share=0.7, seed=1)
MASK = 3
TEXTS = np.asarray(list(itertools.product(range(3), repeat=4)))
TEXT = TEXTS[np.argmin(np.where(LAW.lawful(TEXTS).all(axis=1), LAW.log_probability(TEXTS), 0))]
SAMPLES, ROWS = 16, 32  # of a row, all of them TEXT


class Read(NamedTuple):
    hidden: Any
    kv: Any


@dataclasses.dataclass(frozen=True)
class Knows:
    """Exact probabilities of a token, its own or the next one, given the tokens that a position sees."""

    shift: int = 0
    block: int | None = 2

    def forward(self, params, inputs, positions, prefix=None, mask=None):
        del params
        tokens, places, seen = inputs, positions, mask
        if prefix is not None:
            (shown, at), visible = prefix.kv, prefix.visible
            tokens, places = jnp.concatenate([shown, inputs], 1), jnp.concatenate([at, positions], 1)
            seen = jnp.concatenate([visible, mask], 2)
        texts, law = jnp.asarray(TEXTS), jnp.exp(jnp.asarray(LAW.log_probability(TEXTS), jnp.float32))
        agrees = (texts[:, places] == tokens) | (tokens == MASK)
        weight = law[:, None, None] * jnp.all(agrees[:, :, None] | ~seen, axis=-1)
        own = jax.nn.one_hot(texts[:, jnp.clip(positions + self.shift, 0, 3)], 4)
        found = jnp.einsum("nbw,nbwv->bwv", weight, own) / jnp.sum(weight, axis=0)[..., None]
        return Read(jnp.log(jnp.maximum(found, 1e-30)), (inputs, positions))

    def logits(self, params, hidden):
        del params
        return hidden


@functools.cache
def mean_of(alignment: str, kind: str, blocks: tuple[int, ...], doubled: bool):
    """Mean and standard error of the loss, in nats a labelled token."""
    spec, network = TokenSpec(mask=MASK, alignment=alignment), Knows(int(alignment == "next"))
    loss = block_diffusion_loss(network, spec, BlockRules(BlockNoise(kind), blocks, doubled))
    row = np.tile(TEXT, SAMPLES)
    batch = {
        "tokens": jnp.asarray(np.tile(row, (ROWS, 1))),
        "labelled": jnp.ones((ROWS, len(row)), bool),
        "positions": jnp.asarray(np.tile(np.tile(np.arange(4), SAMPLES), (ROWS, 1))),
    }
    draw = jax.jit(lambda key: loss(None, None, batch, key)[0])
    values = np.asarray(jax.lax.map(draw, jax.random.split(jax.random.key(0), 24)))
    return values.mean(), values.std(ddof=1) / np.sqrt(len(values))


@pytest.mark.parametrize(
    ("alignment", "kind", "blocks", "doubled"),
    [
        *(("own", kind, (2,), False) for kind in KINDS),
        ("own", "count", (1, 2, 4), False),
        ("own", "sample", (2,), True),
        ("next", "count", (2,), False),
        ("next", "block", (1, 2, 4), True),
    ],
)
def test_the_bound_is_the_likelihood(alignment, kind, blocks, doubled):
    mean, error = mean_of(alignment, kind, blocks, doubled)
    cost = -LAW.log_probability(TEXT[None])[0] / 4
    if alignment == "next":  # nothing predicts the first token, which is given
        cost = -LAW.log_conditional(TEXT[None, 1:], TEXT[:1])[0] / 3
    assert abs(mean - cost) < 4 * error + 0.005 * cost and error < 0.04 * cost


def test_blocks_of_one_token_are_the_likelihood_without_chance():
    mean, error = mean_of("own", "count", (1,), False)
    assert mean == pytest.approx(-LAW.log_probability(TEXT[None])[0] / 4, rel=1e-4) and error < 1e-5
