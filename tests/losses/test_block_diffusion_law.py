"""The loss of a network that knows the law: in the mean it is the negative log-likelihood, whatever
is drawn.
"""

import dataclasses
import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import over, slow

from experiments.tasks.chains import Followers
from paradec_jax.config import TokenSpec
from paradec_jax.losses import BlockRules, block_diffusion_loss
from paradec_jax.noise import BlockNoise
from paradec_jax.noise.blocks import KINDS

LAW = Followers(symbols=3, length=4, share=0.7, seed=1)
MASK = 3
TEXTS = np.asarray(list(itertools.product(range(3), repeat=4)))
TEXT = TEXTS[np.argmin(np.where(LAW.lawful(TEXTS).all(axis=1), LAW.log_probability(TEXTS), 0))]
SAMPLES, ROWS = 8, 48  # of a row, all of them TEXT


class Read(NamedTuple):
    hidden: Any
    kv: Any


@dataclasses.dataclass(frozen=True)
class Knows:
    """Exact probabilities of a token, its own or the next one, given the tokens that a position
    sees.
    """

    shift: int = 0
    block: int | None = 2

    def forward(self, params, inputs, positions, prefix=None, mask=None):
        del params
        tokens, places, seen = inputs, positions, mask
        if prefix is not None:
            (shown, at), visible = prefix.kv, prefix.visible
            tokens, places = (
                jnp.concatenate([shown, inputs], 1),
                jnp.concatenate([at, positions], 1),
            )
            seen = jnp.concatenate([visible, mask], 2)
        texts, law = (
            jnp.asarray(TEXTS),
            jnp.exp(jnp.asarray(LAW.log_probability(TEXTS), jnp.float32)),
        )
        agrees = (texts[:, places] == tokens) | (tokens == MASK)
        weight = law[:, None, None] * jnp.all(agrees[:, :, None] | ~seen, axis=-1)
        own = jax.nn.one_hot(texts[:, jnp.clip(positions + self.shift, 0, 3)], 4)
        found = jnp.einsum("nbw,nbwv->bwv", weight, own) / jnp.sum(weight, axis=0)[..., None]
        return Read(jnp.log(jnp.maximum(found, 1e-30)), (inputs, positions))

    def logits(self, params, hidden):
        del params
        return hidden


@functools.cache
def mean_of(alignment: str, kind: str, blocks: tuple[int, ...]):
    """Mean and standard error of the loss, in nats a labelled token."""
    spec, network = TokenSpec(mask=MASK, alignment=alignment), Knows(int(alignment == "next"))
    loss = block_diffusion_loss(network, spec, BlockRules(BlockNoise(kind), blocks))
    row = np.tile(TEXT, SAMPLES)
    batch = {
        "tokens": jnp.asarray(np.tile(row, (ROWS, 1))),
        "labelled": jnp.ones((ROWS, len(row)), bool),
        "positions": jnp.asarray(np.tile(np.tile(np.arange(4), SAMPLES), (ROWS, 1))),
    }
    draw = jax.jit(lambda key: loss(None, None, batch, key)[0])
    values = np.asarray(jax.lax.map(draw, jax.random.split(jax.random.key(0), 24)))
    return values.mean(), values.std(ddof=1) / np.sqrt(len(values))


WANTED = -LAW.log_probability(TEXT[None])[0] / 4


@over(
    [
        *((kind, (2,)) if kind == "block" else slow(kind, (2,)) for kind in KINDS),
        ("count", (1, 2, 4)),
    ],
    argument="kind, blocks",
)
def test_the_bound_is_the_likelihood(kind, blocks):
    mean, error = mean_of("own", kind, blocks)
    assert abs(mean - WANTED) < 4 * error + 0.005 * WANTED and error < 0.04 * WANTED


@pytest.mark.slow
def test_blocks_of_one_token_are_the_likelihood_without_chance():
    mean, error = mean_of("own", "count", (1,))
    assert mean == pytest.approx(WANTED, rel=1e-4) and error < 1e-5
    mean, error = mean_of("next", "count", (1,))  # nothing predicts the first token: it is given
    assert mean == pytest.approx(-LAW.log_conditional(TEXT[None, 1:], TEXT[:1])[0] / 3, rel=1e-4)
    assert error < 1e-5


def test_where_the_next_token_is_predicted_the_first_of_a_block_does_not_see_its_block():
    """Of two tokens of a block the second is seen by neither; in half of the draws the first is
    hidden beside it.
    """

    def cost(known, i):
        """-log p(x_i | the known ones)."""
        law = np.exp(LAW.log_probability(TEXTS)) * (TEXTS[:, known] == TEXT[known]).all(axis=1)
        return -np.log(law[TEXTS[:, i] == TEXT[i]].sum() / law.sum())

    wanted = cost([0], 1) + cost([0, 1], 2) + (cost([0, 1, 2], 3) + cost([0, 1], 3)) / 2
    assert wanted > 1.05 * -LAW.log_conditional(TEXT[None, 1:], TEXT[:1])[0]
    mean, error = mean_of("next", "count", (2,))
    assert abs(mean - wanted / 3) < 4 * error and error < 0.01 * wanted
