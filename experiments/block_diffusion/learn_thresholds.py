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

from experiments.common.candidates import GRADIENT, Contest, descend
from experiments.common.command import run as run_command
from experiments.common.pool import Pool, draw_pool
from experiments.common.record import write_record
from paradec_jax import BlockDenoising, Model, SoftBlock, facts, load, rollout
from paradec_jax.decode.rules.sampling import log_probability
from paradec_jax.decode.rules.subs import without_mask
from paradec_jax.decode.rules.windows import put, window
from paradec_jax.evaluate.intervals import paired, wilson

SDAR = 0.9  # the threshold of the released evaluation
LEAST = 0.2  # a random threshold is at least this
METHODS = ("learned", "random search", "one by hand")


@dataclasses.dataclass(frozen=True)
class Options:
    """What to learn and to measure.

    Attributes:
      model: a model folder or the name of a bundled one.
      thresholds: K, how many steps of a block have a threshold of their own; the block's length
        when None.
      hand: thresholds for all steps that are tried beside SDAR's.
      price: nats that one more expected call a token is worth.
      call_price: share of exact answers that one more network call a token is worth, in the choice
        of candidates.
      relaxation: of the soft decoder.
      gate_temperature, token_temperature: softness of reveals and tokens.
      updates: gradient steps.
      learning_rate: of Adam, on the logits of the thresholds.
      rows: training problems of an update.
      pool: training problems in all.
      calls: network calls of a rollout.
      segment: calls of a segment; sqrt(calls) when None.
      problem_steps: fewest and most steps of a problem's solution.
      trial_rows: training problems of a trial of the random search.
      candidates: candidates that learning and search may name.
      tuning: tuning problems.
      problems: unseen problems.
      seed: of training problems and draws; unseen problems are drawn from seed + 1.
      out: where the JSON goes.
    """

    model: str = "tiny-sdar"
    thresholds: int | None = None
    hand: tuple[float, ...] = (0.5, 0.7, 0.8, 0.95)
    price: float = 0.2
    call_price: float = 0.1
    relaxation: str = "straight_through"
    gate_temperature: float = 0.5
    token_temperature: float = 1.0
    updates: int = 200
    learning_rate: float = 0.05
    rows: int = 8
    pool: int = 512
    calls: int = 64
    segment: int | None = None
    problem_steps: tuple[int, int] = (2, 4)
    trial_rows: int = 64
    candidates: int = 4
    tuning: int = 200
    problems: int = 1000
    seed: int = 0
    out: Path = Path("experiments/block_diffusion/results/learn_thresholds.json")

    def __post_init__(self) -> None:
        if self.pool < self.rows or min(self.rows, self.updates, self.candidates, self.calls) < 1:
            raise ValueError(
                f"pool {self.pool} must hold the {self.rows} rows of an update, and rows, updates {self.updates}, "
                f"candidates {self.candidates} and calls {self.calls} must be at least 1"
            )
        if self.thresholds is not None and self.thresholds < 1:
            raise ValueError(f"thresholds must be at least 1, not {self.thresholds}")
        if not self.hand or not all(0 < x <= 1 for x in self.hand):
            raise ValueError(f"hand must be thresholds above 0 and at most 1, not {self.hand}")


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
    """Adam on the thresholds, from SDAR's.

    Returns:
      The history, `candidates` on the way (the last one among them), and the cost.
    """
    count = model.network.block if options.thresholds is None else options.thresholds
    theta = jnp.full(count, np.log(SDAR / (1 - SDAR)), jnp.float32)
    history, candidates = descend(
        make_loss(model, pool, options),
        model,
        pool,
        theta,
        jax.nn.sigmoid,
        learning_rate=options.learning_rate,
        rows=options.rows,
        updates=options.updates,
        candidates=options.candidates,
        seed=options.seed,
    )
    positions = pool.prompts.shape[1] + options.calls * 2 * model.network.block
    cost = options.updates * options.rows * GRADIENT * positions
    return {"history": history, "candidates": candidates, "cost": cost}


def draw_thresholds(generator: np.random.Generator, count: int) -> list[float]:
    """Random thresholds: one for all steps or, as often, one for each."""
    drawn = generator.uniform(LEAST, 1.0, 1 if generator.random() < 0.5 else count)
    return np.broadcast_to(drawn, count).tolist()


def knobs_of(thresholds: Sequence[float]) -> Any:
    """Thresholds as the discrete decoder's knobs."""
    return BlockDenoising.Knobs(threshold=np.asarray(thresholds, np.float32))


def main(options: tyro.conf.OmitArgPrefixes[Options]) -> None:
    """Learns, searches, chooses, measures; prints and writes the result."""
    model = load(options.model)
    if model.family != "block_diffusion":
        raise ValueError(f"model must be of family block_diffusion, not {model.family}")
    pool = draw_pool(model, options.pool, options.seed, options.problem_steps)
    learned = learn(model, pool, options)
    count = len(learned["candidates"][0])
    contest = Contest(
        model, BlockDenoising(rule="dynamic"), knobs_of, options.problem_steps, options.call_price
    )
    found = contest.search(
        pool,
        lambda generator: draw_thresholds(generator, count),
        lambda decoded: int(decoded.positions.sum()),
        budget=learned["cost"],
        rows=options.trial_rows,
        kept=options.candidates,
        seed=options.seed,
    )
    print(
        f"random search: {found['trials']} trials, cost {found['cost']:.2e} (learner {learned['cost']:.2e})"
    )
    by_hand = [[x] * count for x in (*options.hand, SDAR)]
    candidates = (learned["candidates"], found["candidates"], by_hand)
    chosen = contest.choose(
        dict(zip(METHODS, candidates, strict=True)), options.tuning, options.seed
    )

    final = [("hand-set (SDAR)", [SDAR] * count)]
    final += [(method, chosen[method][1]) for method in METHODS]
    rows, exact = contest.measure(final, "test", options.problems, options.seed + 1)
    for (_, thresholds), row in zip(final, rows, strict=True):
        print(table_line(row, thresholds))
    differences = {
        method: paired(exact[1], exact[1 + METHODS.index(method)]) for method in METHODS[1:]
    }
    for method, rival in differences.items():
        less, more = rival.interval
        print(f"learned less {method}: {rival.difference:+.1%} [{less:+.1%}, {more:+.1%}]")
    result = {
        "learner": learned,
        "random_search": found,
        "chosen": {
            method: {"utility": x, "thresholds": best} for method, (x, best) in chosen.items()
        },
        "rows": rows,
        "learned_less": {method: rival._asdict() for method, rival in differences.items()},
    }
    write_record(options.out, options, result, dtypes=facts.dtypes(model.params))


def table_line(row: dict[str, Any], thresholds: Sequence[float]) -> str:
    low, high = wilson(row["exact"], row["problems"])
    told = " ".join(f"{x:.2f}" for x in thresholds)
    return (
        f"{row['decoder']:16s} exact {row['exact']}/{row['problems']} [{low:.1%}, {high:.1%}]  "
        f"calls/token {row['network_calls_per_token']:.3f}  thresholds {told}"
    )


if __name__ == "__main__":
    run_command(main)
