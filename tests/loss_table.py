"""Every objective on a tiny network, with batches of four rows: all of which count, or only some."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import stubs

from experiments.recurrent_depth.recurrent_consistency import recurrent_consistency_loss
from experiments.recurrent_depth.stepwise import stepwise_loss
from paradec_jax import losses
from paradec_jax.config import TokenSpec
from paradec_jax.families import matrix_axes
from paradec_jax.noise import Schedule, Times
from paradec_jax.train import Rounds, TrainState, adamw, fit, make_train_step, muon

ROWS, LENGTH = 4, 8
SPEC = TokenSpec(bos=1, stop=(2,), pad=0)
MASKED = TokenSpec(mask=31, alignment="own")
SHIFTED = TokenSpec(mask=31, alignment="next")


def three(key: Any, step: Any) -> Any:
    del key, step
    return jnp.int32(3)


def one(key: Any, step: Any) -> Any:
    return three(key, step) - 2


def texts(seed: int, *shape: int) -> np.ndarray:
    """Tokens that are neither special nor the mask."""
    return np.random.default_rng(seed).integers(3, 30, shape).astype(np.int32)


def next_token_batch(seed: int) -> dict[str, np.ndarray]:
    return {
        "tokens": texts(seed, ROWS, LENGTH),
        "targets": texts(seed + 1000, ROWS, LENGTH),
        "weights": np.ones((ROWS, LENGTH), np.float32),
    }


def pair_batch(seed: int, pairs: int = 2) -> dict[str, np.ndarray]:
    return {
        "prompt": texts(seed, ROWS, 4),
        "prompt_lengths": np.asarray([4, 3, 2, 4], np.int32),
        "noisy": texts(seed + 1000, ROWS, pairs, 3),
        "clean": texts(seed + 2000, ROWS, pairs, 3),
        "pairs": np.full(ROWS, pairs, np.int32),
    }


def stepwise_batch(seed: int) -> dict[str, np.ndarray]:
    return {
        "tokens": texts(seed, ROWS, 6),
        "targets": texts(seed + 1000, ROWS, 3, 2),
        "recurrences": np.int32(3),
        "prompt_targets": texts(seed + 2000, ROWS, 4),
        "prompt_weights": np.ones((ROWS, 4), np.float32),
    }


def denoiser_batch(seed: int) -> dict[str, np.ndarray]:
    return {"tokens": texts(seed, ROWS, LENGTH), "weights": np.ones((ROWS, LENGTH), np.float32)}


def block_batch(seed: int) -> dict[str, np.ndarray]:
    positions = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), (ROWS, LENGTH)).copy()
    return {"tokens": texts(seed, ROWS, LENGTH), "labelled": positions >= 2, "positions": positions}


@dataclasses.dataclass(frozen=True)
class Objective:
    """A loss, the parameters that it trains and those that it reads, and its batches by number.

    `network` and `loss` take changes of the network's config; `loss` a chunk of positions too.
    """

    network: Callable[..., Any]
    params: Callable[..., Any]
    loss: Callable[..., Any]
    batch: Callable[[int], dict[str, np.ndarray]]
    frozen: Callable[..., Any] = lambda: None
    teacher: Callable[..., Any] = lambda: None
    rate: float = 0.1  # of plain descent
    scale: float = (
        0.0  # of the terms whose small difference the loss is: its rounding is relative to theirs
    )

    def optimizer(self, name: str, steps: int) -> Any:
        if name == "sgd":
            return optax.sgd(self.rate)
        if name == "adamw":
            # With an eps of 1e-8 gradients that are hardly more than rounding make whole updates.
            return adamw(3e-3, steps, warmup=2, eps=1e-4)
        return muon(3e-3, steps, axes=matrix_axes(self.network().config), warmup=2)


def on(
    network: Callable[..., Any],
    params: Callable[..., Any],
    loss: Callable[..., Any],
    *given: Any,
    batch: Callable[[int], Any],
    chunk: int | None = 3,
    **others: Any,
) -> Objective:
    """The row of `loss(network, *given)`."""

    def made(chunk: int | None = chunk, **changes: Any) -> Any:
        return loss(network(**changes), *given, chunk=chunk)

    return Objective(network, params, made, batch, **others)


causal = functools.partial(on, stubs.tiny_causal, stubs.tiny_causal_params)
recurrent = functools.partial(on, stubs.tiny_network, stubs.tiny_params)
denoiser = functools.partial(on, stubs.tiny_denoiser, stubs.tiny_denoiser_params)


def residual(chunk: int | None = None, **changes: Any) -> Any:
    return losses.residual_loss(
        stubs.tiny_blocks(**changes), stubs.tiny_head(**changes), MASKED, chunk=chunk
    )


def draft(chunk: int | None = None, **changes: Any) -> Any:
    rules = losses.DraftRules(anchors=4)
    drafter = stubs.tiny_drafter(**changes)
    return losses.draft_loss(stubs.tiny_causal(**changes), drafter, rules, chunk=chunk)


# At a rate of 0.1 descent on these three is not stable (the next token counts ten times, a
# divergence shrinks to nothing): on one device already, 20 updates make of a difference in the last
# bit of parameters one of up to 3e-3.
SLOW = 0.01
RULES = losses.ConsistencyRules(context="clean", after_eos="keep", ar_weight=2.0)
OBJECTIVES = {
    "next token": causal(losses.next_token_loss, batch=next_token_batch),
    "consistency": causal(losses.consistency_loss, SPEC, batch=pair_batch, rate=SLOW),
    "cllm": causal(losses.cllm_loss, SPEC, batch=functools.partial(pair_batch, pairs=1), rate=SLOW),
    "recurrent": recurrent(losses.recurrent_loss, three, 2, batch=next_token_batch, chunk=None),
    "stepwise": recurrent(stepwise_loss, three, 2, batch=stepwise_batch, chunk=None),
    "recurrent consistency": recurrent(
        recurrent_consistency_loss, three, 2, SPEC, RULES, batch=pair_batch, chunk=None
    ),
    "masked diffusion": denoiser(losses.masked_diffusion_loss, MASKED, batch=denoiser_batch),
    "full attention": on(
        stubs.tiny_full,
        stubs.tiny_full_params,
        losses.masked_diffusion_loss,
        SHIFTED,
        losses.BoundRules(Schedule("ratio"), Times("plain"), cart=0.3),
        batch=denoiser_batch,
    ),
    "forcing": on(
        stubs.tiny_full,
        stubs.tiny_full_params,
        losses.forcing_loss,
        SHIFTED,
        losses.ForcingRules(3, certainty=0.5),
        batch=denoiser_batch,
        frozen=functools.partial(stubs.tiny_full_params, 1),
    ),
    "self-distillation": denoiser(
        losses.self_distillation_loss,
        MASKED,
        batch=denoiser_batch,
        teacher=lambda: stubs.tiny_denoiser_params(seed=1),
        rate=SLOW,
    ),
    "block diffusion": on(
        stubs.tiny_blocks,
        stubs.tiny_blocks_params,
        losses.block_diffusion_loss,
        MASKED,
        batch=block_batch,
    ),
    "residual": Objective(
        stubs.tiny_head,
        stubs.tiny_head_params,
        residual,
        block_batch,
        frozen=stubs.tiny_blocks_params,
        scale=float(np.log(32)),  # a cross-entropy of 32 tokens less an entropy: 0.01 of 3
    ),
    "draft": Objective(
        stubs.tiny_drafter,
        stubs.tiny_drafter_params,
        draft,
        next_token_batch,
        frozen=stubs.tiny_causal_params,
        scale=float(np.log(32)),
    ),
}


MADE = {name: row.batch for name, row in OBJECTIVES.items()}
# Rows of the batch as they count: all of a row, a part, and a micro-batch that counts nothing at
# all.
SHARE = np.asarray([1.0, 0.5, 0.0, 0.0])


def unequal(name: str, seed: int = 1, drawn: bool = False) -> dict[str, Any]:
    """The batch of the table, with unequal numbers of trained tokens in its rows and none in the
    last two.

    It brings its noise unless that is `drawn` by the loss.
    """
    batch = dict(MADE[name](seed))
    some = np.arange(LENGTH) < SHARE[:, None] * LENGTH
    if "pairs" in batch:
        batch["pairs"] = np.minimum(np.asarray([2, 1, 0, 0]), batch["pairs"]).astype(np.int32)
    if "weights" in batch:
        batch["weights"] = some.astype(np.float32)
    if "labelled" in batch:
        batch["labelled"] &= some
    if "prompt_weights" in batch:
        batch["prompt_weights"] = (np.arange(4) < SHARE[:, None] * 4).astype(np.float32)
    return jax.tree.map(jnp.asarray, batch | ({} if drawn else fixed_noise(name, seed)))


DENOISERS = ("masked diffusion", "full attention", "self-distillation", "forcing")
# Denoisers read every position, the answers of "stepwise" are the last ones, and the states that
# are drawn in "recurrent consistency" belong to places of the whole sequence.
PADDED = [
    name for name in OBJECTIVES if name not in ("stepwise", "recurrent consistency", *DENOISERS)
]


def padded(name: str, batch: dict[str, Any]) -> dict[str, Any]:
    """The batch in longer arrays, filled up with a token that is no padding."""
    fill = dict.fromkeys(("weights", "labelled", "positions", "hidden", "reveals"), 0) | {
        "probability": 1
    }
    # axes of positions or pairs; otherwise the last one
    along = {
        "noisy": 1,
        "clean": 1,
        "state": 1,
    }
    fixed = ("prompt_lengths", "pairs", "recurrence", "step") + (
        ("noisy", "clean") if name == "cllm" else ()
    )

    def longer(key: str, array: np.ndarray) -> np.ndarray:
        axis = along.get(key, array.ndim - 1)
        extra = [(0, 3 if i == axis else 0) for i in range(array.ndim)]
        return np.pad(array, extra, constant_values=fill.get(key, 7))

    return {key: x if key in fixed else longer(key, np.asarray(x)) for key, x in batch.items()}


def fixed_noise(name: str, seed: int) -> dict[str, np.ndarray]:
    """Draws that a batch may bring, by rows, so that the whole batch has the noise of its parts."""
    rng = np.random.default_rng(seed + 3000)
    if name in DENOISERS[:2]:
        uniforms = rng.random((ROWS, LENGTH), np.float32)
        return {"time_uniforms": rng.random(ROWS, np.float32), "mask_uniforms": uniforms}
    if name in ("block diffusion", "residual", "forcing"):
        hidden = rng.random((ROWS, LENGTH)) < 0.7
        found = {"hidden": hidden, "probability": np.full((ROWS, LENGTH), 0.7, np.float32)}
        return found | (
            {"reveals": hidden[:, None] & (np.arange(LENGTH) % 3 == 0)}
            if name == "residual"
            else {}
        )
    if name == "recurrent":
        return {
            "state": rng.normal(size=(ROWS, LENGTH, 16)).astype(np.float32),
            "recurrence": np.int32(3),
        }
    return {}


class Batches:
    """Batch i is a function of i alone."""

    def __init__(self, make: Callable[[int], dict[str, np.ndarray]]) -> None:
        self.make, self.position = make, 0

    def __next__(self) -> dict[str, np.ndarray]:
        self.position += 1
        return self.make(self.position)

    def get_state(self) -> int:
        return self.position

    def set_state(self, state: int) -> None:
        self.position = state


def fitted(
    name: str,
    steps: int,
    mesh: Any,
    *,
    params: Any = None,
    data: Any = None,
    optimizer: str = "adamw",
    ema_decay: float | None = None,
    rounds: Rounds | None = None,
    hooks: Any = (),
) -> TrainState:
    """A call of `fit` with an objective of the table."""
    one = OBJECTIVES[name]
    rule = one.optimizer(optimizer, steps)
    step = make_train_step(
        one.loss(), rule, frozen=one.frozen(), rounds=rounds, ema_decay=ema_decay
    )
    given = {"ema": ema_decay is not None, "teacher": one.teacher(), "mesh": mesh}
    params = one.params() if params is None else params
    state = TrainState.create(params, rule, jax.random.key(3), **given)
    return fit(step, state, Batches(one.batch) if data is None else data, steps=steps, hooks=hooks)


def difference(found: Any, wanted: Any) -> tuple[float, str]:
    """The largest difference of two trees, over the largest number of its array, and where it is."""

    def of_leaf(path: Any, a: Any, b: Any) -> tuple[float, str]:
        a, b = np.asarray(a), np.asarray(b)
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        return float(np.max(np.abs(a - b)) / max(np.max(np.abs(b)), 1e-30)), name

    of_leaves = jax.tree_util.tree_map_with_path(of_leaf, found, wanted)
    return max(jax.tree.leaves(of_leaves, is_leaf=lambda node: isinstance(node, tuple)))
