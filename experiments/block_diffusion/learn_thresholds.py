"""Learns the threshold of each step of a block by gradient through the decoder.

`python -m experiments.block_diffusion.learn_thresholds`. Adam moves the thresholds along the gradient of a rollout of
`SoftBlock` on training problems, where

    loss = mean over tokens of (nats of the right one in the step that reveals it) + price * (expected calls a token)

Texts count up to their stop token, rows as long as all that they revealed is right. With s the shares of a block's
positions that are not revealed before a call, 1 - product of (1 - s) is taken for the chance that the call is needed.
Rivals are a random search of equal cost, which decodes training problems by `BlockDenoising`, and one threshold for
all steps, set by hand. All choose among a few candidates on tuning problems by their utility, exact answers less a
price of network calls; then everything is measured once on unseen problems of another seed, beside SDAR's threshold.

Cost counts positions that the network computes. A gradient costs four forward passes: the rollout, the same again
where segments are recomputed, and two for the backward pass.
"""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from rich.progress import track

from experiments.common.command import run as run_command
from experiments.common.pool import Pool, batch_of, draw_pool
from experiments.common.record import write_record
from paradec_jax import BlockDenoising, Model, SoftBlock, facts, load, rollout, run
from paradec_jax.decode.machine.setting import Setting
from paradec_jax.decode.rules.sampling import log_probability
from paradec_jax.decode.rules.subs import without_mask
from paradec_jax.decode.rules.windows import put, window
from paradec_jax.evaluate import compare, exact_answers, paired, wilson, word_problems

GRADIENT = 4  # forward passes that a gradient through a checkpointed rollout costs
SDAR = 0.9  # the threshold of the released evaluation
LEAST = 0.2  # a random threshold is at least this
METHODS = ("learned", "random search", "one by hand")


@dataclasses.dataclass(frozen=True)
class Options:
    """What to learn and to measure.

    Attributes:
      model: a model folder or the name of a bundled one.
      thresholds: K, how many steps of a block have a threshold of their own; the block's length when None.
      hand: thresholds for all steps that are tried beside SDAR's.
      price: nats that one more expected call a token is worth.
      call_price: share of exact answers that one more network call a token is worth, in the choice of candidates.
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
        network, size, model.token_spec, fuse_prompt=False, relaxation=options.relaxation, greedy=True
    )

    def loss(theta: Any, params: Any, batch: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        request, ends = batch["request"], batch["ends"][:, None]

        def record(state: Any, info: Any) -> Any:
            final, width = state.final, info.where.shape[1]
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
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(options.learning_rate))
    count = model.network.block if options.thresholds is None else options.thresholds
    theta: Any = jnp.full(count, np.log(SDAR / (1 - SDAR)), jnp.float32)
    adam = optimizer.init(theta)
    value_and_grad = jax.jit(jax.value_and_grad(make_loss(model, pool, options), has_aux=True))
    marks = set(np.linspace(0, options.updates, options.candidates + 1, dtype=int)[1:].tolist())
    history: list[dict[str, Any]] = []
    candidates: list[list[float]] = []
    for i in track(range(options.updates), "learning"):
        rows = np.random.default_rng([options.seed, i]).choice(options.pool, options.rows, replace=False)
        batch = batch_of(model, pool, options.seed, rows)
        (value, parts), gradient = value_and_grad(theta, model.params, batch)
        entry = {"loss": float(value), "gradient": np.asarray(gradient, np.float64).tolist()}
        if not np.isfinite([entry["loss"], *entry["gradient"]]).all():
            raise SystemExit(f"update {i}: the loss or its gradient is not finite: {entry}")
        history.append(entry | {name: float(x) for name, x in parts.items()})
        changes, adam = optimizer.update(gradient, adam, theta)
        theta = optax.apply_updates(theta, changes)
        if i + 1 in marks:
            candidates.append(np.asarray(jax.nn.sigmoid(theta), np.float64).tolist())
    positions = pool.prompts.shape[1] + options.calls * 2 * model.network.block
    cost = options.updates * options.rows * GRADIENT * positions
    return {"history": history, "candidates": candidates, "cost": cost}


def search(model: Model, pool: Pool, options: Options, budget: float, count: int) -> dict[str, Any]:
    """Random thresholds, constant or, as often, one for each step, tried on training problems until it is spent."""
    assert model.tokenizer is not None
    decoder = dataclasses.replace(sampler(), greedy=True)
    decoder = decoder.bind(model.network, pool.texts.shape[1], model.token_spec)
    params = decoder.prepare(model.params)
    generator = np.random.default_rng([options.seed, 1])
    rows_of_trial = min(options.trial_rows, options.pool)
    trials: list[dict[str, Any]] = []
    cost = 0.0
    while cost < budget:
        rows = generator.choice(options.pool, rows_of_trial, replace=False)
        drawn = generator.uniform(LEAST, 1.0, 1 if generator.random() < 0.5 else count)
        thresholds = np.broadcast_to(drawn, count).tolist()
        request = batch_of(model, pool, options.seed, rows)["request"]
        decoded = run(decoder, params, request, knobs_of(thresholds))
        texts = [model.tokenizer.decode(ids, skip_special=True) for ids in decoded.completions()]
        exact = exact_answers([pool.problems[i] for i in rows], texts)
        calls, tokens = int(decoded.network_calls.sum()), int(decoded.generated.sum())
        found = utility(float(exact.mean()), calls / tokens, options)
        trials.append({"thresholds": thresholds, "utility": found, "exact": int(exact.sum())})
        cost += int(decoded.positions.sum())
    best = sorted(trials, key=lambda trial: -trial["utility"])[: options.candidates]
    return {"trials": len(trials), "cost": cost, "candidates": [trial["thresholds"] for trial in best]}


def utility(exact: float, calls_per_token: float, options: Options) -> float:
    """What candidates are chosen by."""
    return exact - options.call_price * calls_per_token


def sampler() -> BlockDenoising:
    """The decoder that everything is measured in."""
    return BlockDenoising(rule="dynamic")


def knobs_of(thresholds: Sequence[float]) -> Any:
    """Thresholds as the decoder's knobs."""
    return BlockDenoising.Knobs(threshold=np.asarray(thresholds, np.float32))


def measure(
    model: Model, options: Options, named: Sequence[tuple[str, list[float]]], split: str, count: int
) -> tuple[list[dict[str, Any]], np.ndarray]:
    """Rows of the decoder with each of these thresholds, all compared with the first, and what was right."""
    seed = options.seed + (split == "test")
    problems = word_problems(count, seed=seed, steps=options.problem_steps, split=split)
    settings = [
        Setting(name, sampler(), knobs_of(thresholds), baseline=i == 0)
        for i, (name, thresholds) in enumerate(named)
    ]
    result = compare(model, problems, settings, seed=seed, timed=0)
    return result.rows, result.exact


def choose(model: Model, options: Options, of: dict[str, list[list[float]]]) -> dict[str, Any]:
    """The candidate of each method with the greatest utility on the tuning problems."""
    named = [(method, thresholds) for method, found in of.items() for thresholds in found]
    rows, _ = measure(model, options, named, "tune", options.tuning)
    chosen: dict[str, Any] = {}
    for (method, thresholds), row in zip(named, rows, strict=True):
        found = utility(row["exact"] / row["problems"], row["network_calls_per_token"], options)
        if method not in chosen or found > chosen[method]["utility"]:
            chosen[method] = {"utility": found, "thresholds": thresholds}
    return chosen


def main(options: tyro.conf.OmitArgPrefixes[Options]) -> None:
    """Learns, searches, chooses, measures; prints and writes the result."""
    model = load(options.model)
    if model.family != "block_diffusion":
        raise ValueError(f"model must be of family block_diffusion, not {model.family}")
    pool = draw_pool(model, options.pool, options.seed, options.problem_steps)
    learned = learn(model, pool, options)
    count = len(learned["candidates"][0])
    found = search(model, pool, options, learned["cost"], count)
    print(
        f"random search: {found['trials']} trials, cost {found['cost']:.2e} (learner {learned['cost']:.2e})"
    )
    by_hand = [[x] * count for x in (*options.hand, SDAR)]
    candidates = (learned["candidates"], found["candidates"], by_hand)
    chosen = choose(model, options, dict(zip(METHODS, candidates, strict=True)))

    final = [("hand-set (SDAR)", [SDAR] * count)]
    final += [(method, chosen[method]["thresholds"]) for method in METHODS]
    rows, exact = measure(model, options, final, "test", options.problems)
    for (_, thresholds), row in zip(final, rows, strict=True):
        print(table_line(row, thresholds))
    differences = {method: paired(exact[1], exact[1 + METHODS.index(method)]) for method in METHODS[1:]}
    for method, rival in differences.items():
        less, more = rival.interval
        print(f"learned less {method}: {rival.difference:+.1%} [{less:+.1%}, {more:+.1%}]")
    result = {
        "learner": learned,
        "random_search": found,
        "chosen": chosen,
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
