"""Learns the threshold of each step of a block by gradient through the decoder.

`python -m experiments.block_diffusion.learn_thresholds`. Adam moves the thresholds along the
gradient of a rollout of `SoftBlock` on training problems, where

    loss = mean over tokens of (nats of the right one in the step that reveals it) + price *
    (expected calls a token)

Texts count up to their stop token, rows as long as all that they revealed is right. With s the
shares of a block's positions that are not revealed before a call, 1 - product of (1 - s) is taken
for the chance that the call is needed. Rivals are a random search of equal cost, which decodes
training problems by `BlockDenoising`, and one threshold for all steps, set by hand. All choose
among a few candidates on tuning problems by their utility, exact answers less a price of network
calls; then everything is measured once on unseen problems of another seed, beside SDAR's threshold.

Cost counts positions that the network computes. A gradient costs four forward passes: the rollout,
the same again where segments are recomputed, and two for the backward pass.
"""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from experiments.common.candidates import GRADIENT, Contest, Learning, descend
from experiments.common.command import run as run_command
from experiments.common.pool import Pool, draw_pool
from experiments.common.record import write_record
from paradec_jax import BlockDenoising, Model, SoftBlock, facts, load, rollout
from paradec_jax.decode.rules.sampling import log_probability
from paradec_jax.decode.rules.subs import without_mask
from paradec_jax.decode.rules.windows import put, window

SDAR = 0.9  # the threshold of the released evaluation
LEAST = 0.2  # a random threshold is at least this


@dataclasses.dataclass(frozen=True)
class Options(Learning):
    """What to learn and to measure.

    Attributes:
      model: a model folder or the name of a bundled one.
      thresholds: K, how many steps of a block have a threshold of their own; the block's length
        when None.
      hand: thresholds for all steps that are tried beside SDAR's.
      price: nats that one more expected call a token is worth.
      relaxation: of the soft decoder.
      gate_temperature, token_temperature: softness of reveals and tokens.
      calls: network calls of a rollout.
      out: where the JSON goes.
    """

    model: str = "tiny-sdar"
    thresholds: int | None = None
    hand: tuple[float, ...] = (0.5, 0.7, 0.8, 0.95)
    price: float = 0.2
    relaxation: str = "straight_through"
    gate_temperature: float = 0.5
    token_temperature: float = 1.0
    calls: int = 64
    out: Path = Path("experiments/block_diffusion/results/learn_thresholds.json")


def make_loss(model: Model, pool: Pool, options: Options) -> Callable[..., Any]:
    """(logits of the thresholds, params, batch of rows) -> loss and what it is made of."""
    network, size = model.network, pool.texts.shape[1]
    decoder = SoftBlock(
        network,
        size,
        model.token_spec,
        fuse_prompt=False,
        relaxation=options.relaxation,
        greedy=True,
    )

    def loss(theta: Any, params: Any, batch: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        request, ends = batch["request"], batch["ends"][:, None]

        def record(state: Any, info: Any) -> Any:
            final, width = state.shown, info.where.shape[1]
            at = jnp.arange(final.shape[1])
            texts = jnp.pad(batch["texts"], ((0, 0), (0, final.shape[1] - size)))
            wrong = final & (state.rows.tokens != texts) & (at < ends)
            new = put(jnp.zeros_like(final), jnp.ones_like(info.where), info.at, info.where)
            right = ~jnp.any(wrong & ~new, axis=1, keepdims=True)
            counts = (info.at[:, None] + jnp.arange(width) < ends) & right
            scores = without_mask(network.logits(params, info.hidden), decoder.mask)
            leaving, staying = info.leaving * counts, info.staying * counts
            nats = -log_probability(scores, window(texts, info.at, width))
            needed = 1 - jnp.prod(1 - staying, axis=1)
            return jnp.sum(leaving * nats), jnp.sum(leaving), jnp.sum(needed)

        knobs = decoder.Knobs(
            threshold=jax.nn.sigmoid(theta),
            gate_temperature=options.gate_temperature,
            token_temperature=options.token_temperature,
        )
        _, sums = rollout(
            decoder, params, request, knobs, n=options.calls, segment=options.segment, record=record
        )
        nats, tokens, calls = (jnp.sum(x) for x in sums)
        tokens = jnp.maximum(tokens, 1e-6)
        parts = {"nats": nats / tokens, "calls_per_token": calls / tokens, "tokens": tokens}
        return parts["nats"] + options.price * parts["calls_per_token"], parts

    return loss


def learn(model: Model, pool: Pool, options: Options) -> dict[str, Any]:
    """Adam on the thresholds, from SDAR's: history, candidates and the cost."""
    count = model.network.block if options.thresholds is None else options.thresholds
    theta = jnp.full(count, np.log(SDAR / (1 - SDAR)), jnp.float32)
    learned = descend(make_loss(model, pool, options), model, pool, theta, jax.nn.sigmoid, options)
    positions = pool.prompts.shape[1] + options.calls * 2 * model.network.block
    return learned | {"cost": options.updates * options.rows * GRADIENT * positions}


def draw_thresholds(generator: np.random.Generator, count: int) -> list[float]:
    """Random thresholds: one for all steps or, as often, one for each."""
    drawn = generator.uniform(LEAST, 1.0, 1 if generator.random() < 0.5 else count)
    return np.broadcast_to(drawn, count).tolist()


def knobs_of(thresholds: Sequence[float]) -> Any:
    """Thresholds as the discrete decoder's knobs."""
    schedule: Any = np.asarray(thresholds, np.float32)
    return BlockDenoising.Knobs(threshold=schedule)


def main(options: tyro.conf.OmitArgPrefixes[Options]) -> None:
    """Learns, searches, chooses, measures; prints and writes the result."""
    model = load(options.model)
    if model.family != "block_diffusion":
        raise ValueError(f"model must be of family block_diffusion, not {model.family}")
    pool = draw_pool(model, options.pool, options.seed, options.problem_steps)
    learned = learn(model, pool, options)
    count = len(learned["candidates"][0])
    contest = Contest(model, BlockDenoising(rule="dynamic"), knobs_of, "thresholds", options)
    searched = contest.search(
        pool,
        lambda generator: draw_thresholds(generator, count),
        lambda decoded: int(decoded.positions.sum()),
        learned["cost"],
    )
    methods = {
        "learned": learned["candidates"],
        "random search": searched["candidates"],
        "one by hand": [[x] * count for x in (*options.hand, SDAR)],
    }
    result = {"learner": learned, "random_search": searched}
    result |= contest.result(methods, [("hand-set (SDAR)", [SDAR] * count)], options.seed)
    write_record(options.out, options, result, dtypes=facts.dtypes(model.params))


if __name__ == "__main__":
    run_command(main)
