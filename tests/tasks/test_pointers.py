"""The task of pointers, its batches, and the loss with a target for every recurrence."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.recurrent_depth.stepwise import stepwise_loss
from experiments.tasks import build_tokenizer, exact_lists, pointer_problems, token_spec
from experiments.tasks.pointers import PointerTask, Stage, pointer_batches, pointer_problem
from paradec_jax.config import RECURRENT_PRESETS
from paradec_jax.decode import Prefix
from paradec_jax.families import init_params
from paradec_jax.losses.cross_entropy import token_losses
from paradec_jax.models import RecurrentDepthNetwork
from paradec_jax.objective import weighted

TASK = PointerTask(names=12, chains=3, queries=5)
CURRICULUM = (Stage(0, 12, 1, queries=5, rows=6), Stage(2, 9, 5, queries=7, rows=4))
NETWORK = RecurrentDepthNetwork(RECURRENT_PRESETS["test-recurrent"])


def read(prompt):
    """Table and queries of a prompt, by its text alone."""
    entries, asked = prompt.split("?")
    return dict(re.findall(r" (\w+) has (\w+)", entries)), asked.split()


@pytest.mark.parametrize("nearest", [0, 3])
def test_a_problem_asks_for_the_ends_of_chains(nearest):
    for index in range(20):
        item = pointer_problem(4, index, "test", task=TASK, nearest=nearest)
        table, queries = read(item.prompt)
        assert len(table) == TASK.names and len(queries) == TASK.queries
        ends = []
        for query, distance in zip(queries, item.distance, strict=True):
            hops = 0
            while table[query] != query:
                query, hops = table[query], hops + 1
            assert hops == distance >= nearest
            ends.append(query)
        assert item.solution == f" = {' '.join(ends)}"


def batches(**options):
    options = {"curriculum": CURRICULUM, "noisy_share": 0.0, "prefetch": 0} | options
    return pointer_batches(build_tokenizer(), seed=3, chains=TASK.chains, **options)


def test_targets_follow_one_pointer_more_after_each_recurrence():
    tokenizer, batch = build_tokenizer(), next(batches())
    width = TASK.queries + 1
    assert batch["targets"].shape == (6, 5, width) and batch["recurrences"] == 1
    for row, targets in zip(batch["tokens"], batch["targets"], strict=True):
        prompt, answer = row[:-width], row[-width:]
        table, names = read(tokenizer.decode(prompt[1:]))
        assert prompt[0] == token_spec().bos and tokenizer.encode(
            tokenizer.decode(prompt[1:])
        ) == list(prompt[1:])
        for target in targets:
            assert tokenizer.decode(target[:-1]).split() == names
            assert target[-1] == token_spec().stop[0]
            names = [table[name] for name in names]
        assert tokenizer.decode(answer).split() == [
            "=",
            *tokenizer.decode(targets[-1, :-1]).split(),
        ]


def plain(logits, targets, weights):
    return weighted(token_losses(logits, targets)[0], weights).mean


@functools.partial(jax.jit, static_argnums=(2, 3))
def by_hand(params, batch, recurrence, prompt_recurrence, states):
    """Cross-entropies of answers and prompt, by the calls that decoders make."""
    tokens, targets = batch["tokens"], batch["targets"]
    rows, _, width = targets.shape
    prompt = tokens.shape[1] - width
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    at = jnp.zeros(rows, jnp.int32)

    def read(recurrence, part, prefix=None):
        network = NETWORK.at(recurrence)
        out, _ = network.forward_from(
            params, tokens[:, part], positions[:, part], states[:, part], prefix
        )
        return out.kv, network.logits(params, out.hidden)

    kv, said = read(prompt_recurrence, slice(prompt))
    first = plain(said, batch["prompt_targets"], batch["prompt_weights"])
    cache = NETWORK.write(
        NETWORK.init_cache(jax.random.split(jax.random.key(0), rows), prompt), kv, at
    )
    _, answers = read(recurrence, slice(prompt, None), Prefix(cache, at + prompt))
    return plain(answers, targets[:, recurrence - 1], jnp.ones((rows, width))), first


@pytest.fixture(scope="module")
def small_batch():
    """Any tokens will do for the loss."""
    rng = np.random.default_rng(0)
    return {
        "tokens": jnp.asarray(rng.integers(3, 32, (3, 11))),
        "targets": jnp.asarray(rng.integers(3, 32, (3, 4, 5))),
        "recurrences": jnp.int32(3),
        "prompt_targets": jnp.asarray(rng.integers(3, 32, (3, 6))),
        "prompt_weights": jnp.asarray(rng.integers(0, 2, (3, 6)), jnp.float32),
        "step": jnp.int32(0),
    }


@pytest.mark.slow
def test_the_loss_is_that_of_decoding_at_each_recurrence(small_batch):
    params = init_params(NETWORK.config, jax.random.key(0))
    loss = jax.jit(stepwise_loss(NETWORK, lambda key, step: jnp.int32(2), 2))
    key = jax.random.key(5)
    value, metrics = loss(params, None, small_batch, key)
    states = NETWORK.initial_state(jax.random.split(jax.random.split(key)[1], (3, 11)))
    parts = [by_hand(params, small_batch, r, 2, states) for r in (1, 2, 3)]
    expected = np.mean([answers for answers, _ in parts]) + parts[0][1]
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    assert metrics["prompt_recurrence"] == 2


def test_lists_are_right_as_a_whole():
    items = pointer_problems(3, seed=2, task=TASK, nearest=1)
    assert items[1] == pointer_problem(2, 1, "test", task=TASK, nearest=1)
    texts = [items[0].solution, items[1].solution + " Ana", items[1].solution]
    assert exact_lists(items)([item.prompt for item in items], texts).tolist() == [
        True,
        False,
        False,
    ]
