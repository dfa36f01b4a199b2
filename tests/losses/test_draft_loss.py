"""The loss of masks that guess: against each mask read at the end of a text of its own."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import over
from stubs import tiny_causal, tiny_causal_params, tiny_drafter, tiny_drafter_params

from paradec_jax.losses import DraftRules, draft_loss
from paradec_jax.losses.drafts import draw_anchors

NETWORK, DRAFTER = tiny_causal(), tiny_drafter()
FROZEN, PARAMS = tiny_causal_params(gain=2.0), tiny_drafter_params()
COUNT, LENGTH = DRAFTER.count, 10
# Answers of six tokens: in the first row they end the text, in the second they do not.
TEXTS = np.random.default_rng(0).integers(0, 32, (2, LENGTH + 1)).astype(np.int32)
COUNTED = np.zeros((2, LENGTH), np.float32)
COUNTED[0, 4:], COUNTED[1, 2:8] = 1, 1
BATCH = {"tokens": TEXTS[:, :-1], "targets": TEXTS[:, 1:], "weights": COUNTED}
ANCHORS = 5  # all places before two tokens of an answer, so that each is drawn once
RULES = {
    target: DraftRules(target=target, decay=0.8, anchors=ANCHORS) for target in ("law", "token")
}


@functools.cache
def graded(target: str, chunk: int | None = None):
    loss = draft_loss(NETWORK, DRAFTER, RULES[target], chunk=chunk)
    return jax.jit(jax.value_and_grad(lambda *given: loss(*given), (0, 1), has_aux=True))


@functools.cache
def plain_masks():
    """Of each row, anchor and mask that is asked: the logarithms of p and q [V], and the target.

    A mask is read at the end of a text of its own, the tokens up to the anchor and masks 1 to j.
    """
    both, found = {"network": FROZEN, "drafter": PARAMS}, []

    @functools.partial(jax.jit, static_argnums=2)
    def of_mask(ids, before, length):
        positions = jnp.arange(length)[None]
        hidden = DRAFTER.forward(both, ids[None], positions).hidden[:, -1]
        informed = DRAFTER.informed(both, hidden, before[None])
        return jax.nn.log_softmax(NETWORK.logits(FROZEN, informed)[0])

    positions = jnp.broadcast_to(jnp.arange(LENGTH), (2, LENGTH))
    hidden = NETWORK.forward(FROZEN, jnp.asarray(BATCH["tokens"]), positions).hidden
    own = jax.nn.log_softmax(NETWORK.logits(FROZEN, hidden))
    for row, text in enumerate(TEXTS):
        for anchor in range(LENGTH - 1):
            if not COUNTED[row, anchor] or not COUNTED[row, anchor + 1]:
                continue
            for j in range(1, COUNT + 1):
                place = anchor + j
                if place < LENGTH and COUNTED[row, place]:
                    ids = np.append(text[: anchor + 1], DRAFTER.vocab_size + np.arange(j))
                    q = of_mask(jnp.asarray(ids), text[place], len(ids))
                    found.append((j, np.asarray(own[row, place]), np.asarray(q), text[place + 1]))
    return found


@pytest.mark.parametrize("target", RULES)
def test_each_mask_is_one_at_the_end_of_its_own_text(target):
    (loss, metrics), (_, frozen) = graded(target)(PARAMS, FROZEN, BATCH, jax.random.key(0))
    total = weight = 0.0
    hits: dict[int, list[bool]] = {j: [] for j in range(1, COUNT + 1)}
    for j, p, q, token in plain_masks():
        nats = np.sum(np.exp(p) * (p - q)) if target == "law" else -q[token]
        total, weight = total + 0.8 ** (j - 1) * nats, weight + 0.8 ** (j - 1)
        hits[j].append(int(np.argmax(q)) == token)
    assert loss == pytest.approx(total / weight, rel=2e-5)
    for j, found in hits.items():
        assert metrics[f"hits_{j}"] == pytest.approx(np.mean(found), abs=1e-6)
    assert [len(found) for found in hits.values()] == [10, 8, 6]
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(frozen)), "the model learns nothing"


def test_every_parameter_of_the_drafter_learns():
    _, (gradients, _) = graded("law")(PARAMS, FROZEN, BATCH, jax.random.key(0))
    assert all(np.abs(leaf).max() > 1e-6 for leaf in jax.tree.leaves(gradients))


@pytest.mark.slow
def test_masks_that_say_what_the_model_says_cost_nothing():
    """An answer that repeats one token after a text of it: the model's rows agree, and a mask whose
    vector is the token's embedding is a row of them.
    """
    token, texts = 7, np.full((1, LENGTH + 1), 7, np.int32)
    batch = {"tokens": texts[:, :-1], "targets": texts[:, 1:], "weights": COUNTED[:1]}
    zeros = jax.tree.map(jnp.zeros_like, PARAMS)
    given = dict(zeros, masks=jnp.tile(FROZEN["embedding"][token], (COUNT, 1)))
    value = graded("law")
    (loss, _), _ = value(given, FROZEN, batch | {"tokens": texts[:, :-1]}, jax.random.key(0))
    assert abs(float(loss)) < 1e-5
    (other, _), _ = value(zeros, FROZEN, batch, jax.random.key(0))
    assert float(other) > 0.05, "masks of zeros are no rows of the token"


# Anchors


@over([1, 3, 8], argument="count")
def test_anchors_stand_where_answers_are_and_are_spread(count):
    places = jnp.asarray([[0, 1, 1, 0, 1, 1, 0], [0, 0, 0, 0, 0, 1, 0], [0] * 7], bool)
    drawn, some = jax.vmap(lambda key: draw_anchors(places, count, key))(
        jax.random.split(jax.random.key(0), 400)
    )
    assert some[0].tolist() == [True, True, False]
    first, second = np.asarray(drawn[:, 0]), np.asarray(drawn[:, 1])
    assert (np.diff(first) >= 0).all() and (second == 5).all()
    shares = np.bincount(first.ravel(), minlength=7) / first.size
    np.testing.assert_allclose(shares[[1, 2, 4, 5]], 0.25, atol=0.08 / np.sqrt(count))
    assert shares[[0, 3, 6]].sum() == 0
    if count == 8:  # twice as many as there are places
        assert (first == [1, 1, 2, 2, 4, 4, 5, 5]).all()
