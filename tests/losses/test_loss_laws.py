"""Laws of every objective, the rows of `objectives.OBJECTIVES`.

Chunks change nothing, draws follow the key, what counts nothing may hold anything, padding changes
nothing, gradients are finite differences, logits never lie in memory whole, micro-batches add up to
the batch, and padding is told by lengths, not by a token. `tests/mesh` trains every row on meshes,
`tests/processes` in two processes.
"""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from loss_table import (
    DENOISERS,
    MASKED,
    OBJECTIVES,
    PADDED,
    ROWS,
    RULES,
    SPEC,
    difference,
    one,
    padded,
    three,
    unequal,
)
from marks import over
from stubs import (
    tiny_blocks,
    tiny_causal,
    tiny_denoiser,
    tiny_drafter,
    tiny_head,
    tiny_network,
)

from experiments.recurrent_depth.recurrent_consistency import recurrent_consistency_loss
from experiments.recurrent_depth.stepwise import stepwise_loss
from paradec_jax import losses
from paradec_jax.config import TokenSpec
from paradec_jax.families import parameter_shapes
from paradec_jax.noise import Schedule, Times
from paradec_jax.train import TrainState, make_train_step

# whose networks others are quick on
LONG = (
    "stepwise",
    "recurrent consistency",
    "self-distillation",
    "residual",
    "cllm",
    "forcing",
    "full attention",
)
EVERY = over(OBJECTIVES, (*LONG[:2], *LONG[-2:]))  # which studies use, and a loss of another row
# of two programs a test, which each form of a batch compiles: tokens and pairs
QUICK = over(OBJECTIVES, OBJECTIVES.keys() - {"next token", "consistency"})
RANDOM = {"recurrent", "stepwise", "recurrent consistency", "residual"}  # and what hides tokens:
RANDOM |= {*DENOISERS, "block diffusion", "draft"}


def frozen_of(name: str):
    """What a loss reads and does not train, as the train step hands it over."""
    row = OBJECTIVES[name]
    if row.teacher() is None:
        return row.frozen()
    return {"teacher": row.teacher(), "round": jnp.int32(0)}


@functools.cache
def program(name: str, chunk: int | None):
    return jax.jit(jax.value_and_grad(OBJECTIVES[name].loss(chunk=chunk), has_aux=True))


def graded(name: str, batch=None, chunk: int | None = None, key: int = 0):
    """Loss and metrics, and gradients, of the unequal batch unless told otherwise; its draws are
    those of the key.
    """
    batch = unequal(name, drawn=True) if batch is None else batch
    arguments = OBJECTIVES[name].params(), frozen_of(name), batch | {"step": jnp.int32(0)}
    return jax.tree.map(np.asarray, program(name, chunk)(*arguments, jax.random.key(key)))


def assert_same(name: str, found, wanted):
    np.testing.assert_allclose(
        found[0][0], wanted[0][0], rtol=2e-6, atol=1e-6 * OBJECTIVES[name].scale
    )
    assert found[0][1].keys() == wanted[0][1].keys()
    for key, value in wanted[0][1].items():
        np.testing.assert_allclose(found[0][1][key], value, rtol=2e-5, atol=1e-6, err_msg=key)
    assert difference(found[1], wanted[1])[0] < 2e-4


def test_every_objective_is_a_row():
    named = {
        name.removesuffix("_loss").replace("_", " ") for name in dir(losses) if "_loss" in name
    }
    named |= {"stepwise", "recurrent consistency"}  # of experiments
    named |= {"full attention"}  # the masked diffusion of another network, by other rules
    assert named == {name.replace("-", " ") for name in OBJECTIVES}


@QUICK
def test_chunks_change_nothing(name):
    whole = graded(name)
    assert max(np.max(np.abs(leaf)) for leaf in jax.tree.leaves(whole[1])) > 1e-3
    assert_same(name, graded(name, chunk=3), whole)


@QUICK
def test_draws_follow_the_key(name):
    first, second, again = (float(graded(name, key=key)[0][0]) for key in (0, 1, 0))
    assert first == again and (first != second) == (name in RANDOM)


# what says how much of a batch counts
COUNTING = (
    "weights",
    "labelled",
    "pairs",
    "prompt_weights",
)


@EVERY
def test_what_counts_nothing_may_hold_anything(name):
    """Rows without weight, what follows a row's pairs, targets that nobody asks for."""
    batch = unequal(name, drawn=True)
    free = {}
    if name == "stepwise":  # whose answers always count
        free["prompt_targets"] = np.asarray(batch["prompt_weights"]) == 0
    elif "pairs" in batch:
        later = np.arange(batch["clean"].shape[1]) >= np.asarray(batch["pairs"])[:, None]
        free |= dict.fromkeys(("noisy", "clean"), later[..., None]) | {"prompt": later[:, :1]}
    else:
        counts = np.asarray(batch["labelled" if "labelled" in batch else "weights"]) > 0
        free |= dict.fromkeys(
            batch.keys() & {"tokens", "targets"}, ~counts.any(axis=1, keepdims=True)
        )
    changed = {key: jnp.where(where, 7, batch[key]) for key, where in free.items()}
    assert all(jnp.any(value != batch[key]) for key, value in changed.items())
    assert_same(name, graded(name, batch | changed), graded(name, batch))


@over(PADDED, ("recurrent", "residual"))
def test_padding_changes_nothing(name):
    """Longer rows, prompts and answers, that hold anything where nothing counts."""
    batch = unequal(name)
    assert_same(name, graded(name, padded(name, batch)), graded(name, batch))


@EVERY
def test_a_batch_that_counts_nothing_costs_nothing(name):
    batch = unequal(name, drawn=True)
    nothing = {key: jnp.zeros_like(batch[key]) for key in COUNTING if key in batch}
    if name == "stepwise":
        nothing |= {"recurrences": jnp.int32(0)}
    (loss, metrics), gradients = graded(name, batch | nothing)
    assert loss == 0 and all(np.isfinite(value) for value in metrics.values())
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(gradients))


@over(["next token", "recurrent"], ["recurrent"])
def test_packed_rows_are_rows_of_their_own(name):
    """Two rows of five positions in one, with the initial states and the recurrence given."""
    draw, width = np.random.default_rng(0), tiny_network().config.width
    apart = {key: draw.integers(3, 20, (2, 5)).astype(np.int32) for key in ("tokens", "targets")}
    apart |= {
        "weights": np.ones((2, 5), np.float32),
        "state": draw.normal(0, 1, (2, 5, width)).astype(np.float32),
    }
    packed = {key: x.reshape(1, 10, *x.shape[2:]) for key, x in apart.items()}
    packed |= {
        "positions": np.arange(10, dtype=np.int32)[None] % 5,
        "segments": np.arange(10)[None] // 5,
    }
    given = {"recurrence": jnp.int32(2)}
    found, wanted = (graded(name, batch | given) for batch in (packed, apart))
    chex.assert_trees_all_close(found, wanted, rtol=2e-5, atol=1e-5)


@EVERY
def test_a_chunk_has_at_least_one_position(name):
    with pytest.raises(ValueError, match="chunk must be at least 1, not 0"):
        graded(name, chunk=0)


REFUSED = {
    "masked_diffusion_loss(denoiser(), TokenSpec())": "trained with a mask token",
    "self_distillation_loss(denoiser(), TokenSpec())": "trained with a mask token",
    "block_diffusion_loss(blocks(), TokenSpec())": "trained with a mask token",
    "residual_loss(blocks(), head(), TokenSpec())": "mask token",
    "block_diffusion_loss(causal(), MASKED)": "without blocks of its own needs the lengths of blocks",
    "residual_loss(causal(), head(), MASKED)": "needs the lengths of blocks",
    "next_token_loss(blocks())": "trains networks of visibility 'causal', but this one's is 'block'",
    "BoundRules(measure='noise')": "measure must be one of time, importance, change_of_variables",
    "BoundRules(steps=0)": "steps must be at least 1, not 0",
    "BoundRules(steps=4, schedule=Schedule('cosine'))": "log-linear schedule and measure 'time' alone",
    "BoundRules(steps=4, measure='importance')": "log-linear schedule and measure 'time' alone",
    "DistillationRules(jump=1)": "jump must be at least 2",
    "DistillationRules(first_steps=2, jump=4)": "first_steps at least jump, not 4 and 2",
    "DistillationRules(grid='official')": "grid must be one of paper, released, not 'official'",
    "DistillationRules(divergence='kl')": "divergence must be one of kld, forward_kl, tvd, mse",
    "DistillationRules(divergence='chi_square', released=True)": "released code has no chi_square",
    "BlockRules(blocks=())": r"blocks must be a whole number, not \(\)",
    "BlockRules(blocks=(4, 0))": "blocks must be at least 1, not 0",
    "ConsistencyRules(context='dirty')": "context must be one of nc, clean, nc_ic, not 'dirty'",
    "ConsistencyRules(window=0)": "window must be at least 1, not 0",
    "ConsistencyRules(temperature=0.0)": "temperature must be above 0",
    "ConsistencyRules(ar_weight=-1.0)": "ar_weight must be at least 0, not -1.0",
    "consistency_loss(causal(max_length=9), SPEC)(None, None, PAIRS_OF_TWO, None)": "positions of max_length 9",
    "cllm_loss(causal(), SPEC)(None, None, PAIRS_OF_TWO, None)": "cllm_loss wants one pair a row",
    "recurrent_consistency_loss(recurrent(), three, 1, SPEC, RULES, filler_share=1.5)": "filler_share must be in",
    "DraftRules(target='best')": "target must be one of law, token, not 'best'",
    "DraftRules(decay=1.5)": "decay must be at most 1, not 1.5",
    "DraftRules(anchors=0)": "anchors must be at least 1, not 0",
    "ForcingRules(labels='soft')": "labels must be one of teacher, data, not 'soft'",
    "ForcingRules(high=2.0)": "high must be at most 1, not 2.0",
    "ResidualRules(unroll=0)": "unroll must be at least 1, not 0",
    "ResidualRules(reveals=())": r"reveals must be a whole number, not \(\)",
    "ResidualRules(reveals=(1, 0))": "reveals must be at least 1, not 0",
    "ResidualRules(blocks=(0,))": "blocks must be at least 1, not 0",
    "ResidualRules(normaliser='sum')": "normaliser must be one of selfnorm, official, mean, not 'sum'",
    "ResidualRules(objective='tvd')": "objective must be one of kl, cross_entropy, mse",
    "ResidualRules(layout='packed')": "layout must be one of doubled, infer_matched",
    "ResidualRules(tokens='best')": "tokens must be one of truth, own",
}
NAMES = {name: getattr(losses, name) for name in dir(losses)} | {
    **dict(
        zip(("denoiser", "blocks", "head"), (tiny_denoiser, tiny_blocks, tiny_head), strict=True)
    ),
    **{
        "causal": tiny_causal,
        "drafter": tiny_drafter,
        "recurrent": tiny_network,
        "TokenSpec": TokenSpec,
        "Schedule": Schedule,
    },
    **{"SPEC": SPEC, "MASKED": MASKED, "RULES": RULES, "three": three},
    "recurrent_consistency_loss": recurrent_consistency_loss,
    "PAIRS_OF_TWO": OBJECTIVES["consistency"].batch(1),
}


@over(REFUSED, argument="call")
def test_what_is_refused(call):
    with pytest.raises(ValueError, match=REFUSED[call]):
        eval(call, NAMES)


# Gradients


FROZEN = losses.ConsistencyRules(teacher="frozen")


def exact(name: str):
    """A loss in float64 without a part that gradients do not cross, its batch, and what it does not
    train.

    A frozen teacher is not what is trained, gradients cross all recurrences, and a prompt has one.
    """
    row, wide = OBJECTIVES[name], {"dtype": "float64", "param_dtype": "float64"}
    network, batch, frozen = row.network(**wide), unequal(name, drawn=True), frozen_of(name)
    if name == "cllm":  # at equal copies the teacher's part is a constant of the first order
        batch |= {"noisy": batch["clean"]}
    if "consistency" in name:
        frozen = row.params()
    others = {
        "consistency": lambda: losses.consistency_loss(network, SPEC, FROZEN),
        "recurrent": lambda: losses.recurrent_loss(network, three, 3),
        "stepwise": lambda: stepwise_loss(network, one, 3),
        "recurrent consistency": lambda: recurrent_consistency_loss(
            network, three, 3, SPEC, FROZEN
        ),
    }
    loss = others[name]() if name in others else row.loss(**wide)
    return loss, batch | {"step": jnp.int32(0)}, jax.tree.map(widened, frozen)


def widened(leaf):
    return jnp.asarray(leaf, jnp.float64) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf


@over(OBJECTIVES, OBJECTIVES.keys() - {"next token", "draft", "masked diffusion"})
def test_gradients_are_finite_differences(name):
    """Along a random direction."""
    with jax.enable_x64(True):
        loss, batch, frozen = exact(name)
        point = jax.tree.map(widened, OBJECTIVES[name].params())
        leaves, tree = jax.tree.flatten(point)
        rng = np.random.default_rng(0)
        direction = tree.unflatten([jnp.asarray(rng.normal(size=leaf.shape)) for leaf in leaves])
        value = jax.jit(
            jax.value_and_grad(lambda params: loss(params, frozen, batch, jax.random.key(0))[0])
        )
        slope = sum(jax.tree.leaves(jax.tree.map(jnp.vdot, value(point)[1], direction)))
        more, less = (
            value(jax.tree.map(lambda x, d, s=step: x + s * d, point, direction))[0]
            for step in (1e-6, -1e-6)
        )
        assert abs(slope) > 1e-3 and float((more - less) / 2e-6) == pytest.approx(
            float(slope), rel=1e-5
        )


def shapes_in(jaxpr):
    """Shapes of everything that a program computes."""
    for equation in jaxpr.eqns:
        for value in equation.outvars:
            yield getattr(value.aval, "shape", ())
        for inner in jax.tree.leaves(
            list(equation.params.values()),
            is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr"),
        ):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from shapes_in(inner)


@over(OBJECTIVES, (*LONG, "recurrent"))
def test_logits_never_lie_in_memory_whole(name):
    """Neither forward nor backward: their largest array is twice as large for twice the chunk."""
    row, vocabulary = OBJECTIVES[name], 101
    changes = {"vocab_size": vocabulary}
    params, frozen = parameter_shapes(row.network(**changes).config), None
    of_frozen = {"residual": "block diffusion", "draft": "next token", "forcing": name}.get(name)
    if of_frozen is not None:
        frozen = parameter_shapes(OBJECTIVES[of_frozen].network(**changes).config)
    if name == "self-distillation":
        frozen = {"teacher": params, "round": jnp.int32(0)}
    batch = unequal(name, drawn=True) | {"step": jnp.int32(0)}
    if name == "stepwise":  # answers longer than the chunks
        batch |= {
            "tokens": jnp.zeros((ROWS, 7), jnp.int32),
            "targets": jnp.zeros((ROWS, 3, 3), jnp.int32),
        }

    def largest(chunk: int) -> int:
        loss = row.loss(chunk=chunk, **changes)
        of = jax.grad(lambda params, frozen: loss(params, frozen, batch, jax.random.key(0))[0])
        shapes = [
            shape for shape in shapes_in(jax.make_jaxpr(of)(params, frozen).jaxpr) if len(shape) > 2
        ]
        return max(int(np.prod(shape)) // vocabulary for shape in shapes if shape[-1] == vocabulary)

    assert largest(2) == 2 * largest(1)


# Parts of a batch


def loss_of(name: str):
    """The table's loss; without what depends on the number of rows of a batch."""
    row = OBJECTIVES[name]
    if name == "consistency":  # every divisor of the whole batch that the rules know
        return losses.consistency_loss(
            row.network(), SPEC, losses.ConsistencyRules(over="batch"), chunk=3
        )
    if name == "masked diffusion":
        rules = losses.BoundRules(times=Times("plain"))
        return losses.masked_diffusion_loss(row.network(), MASKED, rules, chunk=3)
    return row.loss()


# their draws are those of each micro-batch
DRAWN = (
    "stepwise",
    "recurrent consistency",
    "self-distillation",
    "draft",
)


@functools.cache
def update(name: str, accumulate: int):
    """Parameters and metrics after one update of plain descent at a rate of 1."""
    row, batch = OBJECTIVES[name], unequal(name)
    optimizer = optax.sgd(1.0)
    state = TrainState.create(row.params(), optimizer, jax.random.key(0), teacher=row.teacher())
    step = make_train_step(loss_of(name), optimizer, frozen=row.frozen(), accumulate=accumulate)
    state, metrics = step(state, batch)
    return jax.tree.map(np.asarray, (state.params, metrics))


def by_hand(name: str):
    """The same in two micro-batches, from the sums of each, with the keys that the step gives them."""
    row, batch, loss, frozen = OBJECTIVES[name], unequal(name), loss_of(name), frozen_of(name)
    key = jax.random.fold_in(jax.random.key(0), 0)

    def value(params):
        half, parts = ROWS // 2, []
        for i in range(2):
            rows = {
                k: x if not np.ndim(x) else x[i * half : (i + 1) * half] for k, x in batch.items()
            }
            parts.append(loss.sums(params, frozen, rows | {"step": 0}, jax.random.fold_in(key, i)))
        return loss.value(jax.tree.map(jnp.add, *parts))

    params = row.params()
    (found, metrics), grads = jax.jit(jax.value_and_grad(value, has_aux=True))(params)
    return jax.tree.map(jnp.subtract, params, grads), metrics | {"loss": found}


@QUICK
def test_micro_batches_add_up_to_the_batch(name):
    """Gradient and metrics are those of the whole, though half of the micro-batches count nothing."""
    params, metrics = update(name, 2)
    before = OBJECTIVES[name].params()
    assert difference(params, before)[0] > 1e-3, "nothing was trained"
    wanted = by_hand(name) if name in DRAWN else update(name, 1)
    moved = [jax.tree.map(np.subtract, found, before) for found in (params, wanted[0])]
    assert difference(*moved)[0] < 2e-4
    for key, value in wanted[1].items():
        np.testing.assert_allclose(metrics[key], value, rtol=2e-5, atol=1e-6, err_msg=key)


@over(["next token", "residual"], ["residual"])
def test_the_first_pass_over_micro_batches_runs_no_network(name):
    """It wants weights, which depend on no parameters: its share of the products of an update is
    none.
    """
    row, optimizer = OBJECTIVES[name], optax.sgd(1.0)

    def products(accumulate: int) -> int:
        state = TrainState.create(row.params(), optimizer, jax.random.key(0))
        step = make_train_step(loss_of(name), optimizer, accumulate=accumulate)
        text = step.jitted.lower(state, row.frozen(), unequal(name)).compile().as_text()
        return (
            text.count(" dot(")
            + text.count("__onednn$matmul")
            + text.count('custom_call_target="__cublas')
        )

    assert 0 < products(2) <= products(1)


# Padding


PAIRS = [name for name, row in OBJECTIVES.items() if "pairs" in row.batch(1)]


def loss_with(name: str, pad: int, chunk: int | None = None):
    spec, network = dataclasses.replace(SPEC, pad=pad), OBJECTIVES[name].network()
    if name == "consistency":
        return losses.consistency_loss(network, spec, chunk=chunk)
    if name == "cllm":
        return losses.cllm_loss(network, spec, chunk=chunk)
    rules = losses.ConsistencyRules(context="clean", ar_weight=2.0)
    return recurrent_consistency_loss(network, three, 2, spec, rules)


def stopping(name: str) -> dict[str, np.ndarray]:
    """Every answer ends in the stop token, at the end of its last block; the noisy copy has it once
    too.
    """
    batch = dict(OBJECTIVES[name].batch(1))
    clean, noisy = batch["clean"].copy(), batch["noisy"].copy()
    clean[:, -1, -1], noisy[:, -1, 0] = SPEC.stop[0], SPEC.stop[0]
    batch["prompt"] = batch["prompt"].copy()
    batch["prompt"][0, 1] = SPEC.stop[0]  # a turn of a chat ends
    return batch | {"clean": clean, "noisy": noisy}


@over(PAIRS, LONG)
def test_a_stop_token_that_is_also_the_padding_is_trained(name):
    batch, row = stopping(name), OBJECTIVES[name]
    if name == "cllm":
        batch["prompt"][0, 1] = (
            5  # what follows a stop token of the prompt is filled up with padding
        )

    def graded(pad):
        loss = jax.jit(jax.value_and_grad(loss_with(name, pad), has_aux=True))
        return loss(row.params(), None, batch | {"step": 0}, jax.random.key(0))

    (other, apart), (same, shared) = graded(0), graded(SPEC.stop[0])
    np.testing.assert_allclose(other[0], same[0], rtol=1e-6)
    assert difference(shared, apart)[0] < 1e-6


@over(PAIRS, LONG)
def test_padding_of_a_batch_is_where_it_says(name):
    """Marked positions count nowhere, whatever lies there; nothing else is taken for padding."""
    batch, row = stopping(name), OBJECTIVES[name]
    real = np.ones(batch["noisy"].shape, bool)
    real[1, -1, 1:] = False
    marked = batch | {"noisy_real": real, "clean_real": real, "step": 0}
    loss = jax.jit(jax.value_and_grad(loss_with(name, SPEC.stop[0]), has_aux=True))

    def graded(fill, given):
        changed = {key: np.where(real, batch[key], fill) for key in ("noisy", "clean")}
        return loss(row.params(), None, given | changed, jax.random.key(0))

    one, other = graded(7, marked), graded(SPEC.stop[0], marked)
    if name != "cllm":  # whose next-token term is over the whole row, as released
        assert difference(one[1], other[1])[0] < 1e-6
    unmarked = dict.fromkeys(("noisy_real", "clean_real"), real | True)
    assert difference(one[1], graded(7, marked | unmarked)[1])[0] > 1e-4
