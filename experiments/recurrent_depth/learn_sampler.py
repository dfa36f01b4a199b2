"""Learns the wavefront's schedules by gradient through the sampler.

`python -m experiments.recurrent_depth.learn_sampler`. Momentum, noise and exit threshold get one
value for each age of a position. Adam moves them along the gradient of a soft rollout on training
problems, where

    loss = mean over positions of (loss of the state that leaves) + price * (expected steps of the
    position)

The first term is the distance to the state after r = 16 recurrences along the right text. Positions
after a wrong committed token do not count.
The rival is a random search of equal cost that decodes training problems in the discrete sampler.
Both choose among a few candidates on tuning problems by their utility, exact answers less a price
of network calls; then everything is measured once in the discrete sampler on unseen problems,
beside the paper's hand-set values and those that were tuned by hand.

Cost counts passes of the core over a position. A gradient costs four forward passes: the rollout,
the same again where segments are recomputed, and two for the backward pass; the teacher's pass is
the learner's as well.
"""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from experiments.common.command import run
from experiments.common.record import write_record
from experiments.recurrent_depth.candidates import GRADIENT, Contest, Learning, descend, listed
from experiments.recurrent_depth.pool import Pool, draw_pool
from paradec_jax import Decoded, Model, SoftWavefront, Wavefront, facts, load, rollout
from paradec_jax.decode.rules import score
from paradec_jax.decode.rules.windows import window

Theta = dict[str, Any]  # unconstrained momentum, noise and exit_threshold, [K] each
# Largest momentum and noise; an exit threshold is positive.
MOST = {"momentum": 0.9, "noise": 0.5}
# the values of the wavefront paper, arXiv 2510.14961
HAND = {
    "momentum": 0.1,
    "noise": 0.0,
    "exit_threshold": 0.03,
}
TUNED = (
    {**HAND, "momentum": 0.0, "exit_threshold": 0.1},
    {**HAND, "momentum": 0.0, "exit_threshold": 0.4},
)


@dataclasses.dataclass(frozen=True)
class Options(Learning):
    """What to learn and to measure.

    Attributes:
      model: a model folder or the name of a bundled one.
      price: loss that one more expected step of a position is worth.
      gate_temperature, candidate_temperature: softness of exits and candidates.
      inner_recurrence, width, prefill_recurrence: of every sampler here.
      ages: K, length of the schedules.
      steps: steps of a rollout.
      out: path of the JSON.
    """

    model: str = "tiny-recurrent"
    price: float = 0.02
    gate_temperature: float = 0.5
    candidate_temperature: float = 1.0
    inner_recurrence: int = 1
    width: int = 3
    prefill_recurrence: int = 4
    ages: int = 6
    steps: int = 64
    out: Path = Path("experiments/recurrent_depth/results/learn_sampler.json")


def start(options: Options) -> Theta:
    """The paper's values, with a noise of 0.01 in the place of 0, at which a bounded one has no
    gradient.
    """
    values = HAND | {"noise": 0.01}
    return {
        name: jnp.full(options.ages, unconstrained(name, value)) for name, value in values.items()
    }


def unconstrained(name: str, value: float) -> float:
    """The parameter that `constrained` maps to a value."""
    if name == "exit_threshold":
        return float(np.log(value))
    return float(np.log(value / (MOST[name] - value)))


def constrained(theta: Theta) -> Theta:
    """Knobs: momentum and noise between 0 and `MOST`, the threshold above 0."""
    return {
        name: jnp.exp(x) if name == "exit_threshold" else MOST[name] * jax.nn.sigmoid(x)
        for name, x in theta.items()
    }


def make_loss(model: Model, pool: Pool, options: Options) -> Any:
    """(theta, params, batch of rows) -> loss and what it is made of."""
    network, width = model.network, options.width
    decoder = SoftWavefront(
        network,
        pool.texts.shape[1],
        window=width,
        inner_recurrence=options.inner_recurrence,
        prefill_recurrence=options.prefill_recurrence,
        greedy=True,
    )
    room = ((0, 0), (0, width + 1))

    def teacher(params: Any, texts: Any, keys: Any) -> Any:
        """States after r recurrences along the right texts, [B, S, D]."""
        positions = jnp.broadcast_to(jnp.arange(texts.shape[1]), texts.shape)
        view = network.view(positions)
        e, kv = network.embed(params, texts, view, network.empty_window(*texts.shape))
        state = network.initial_state(
            jax.vmap(lambda key: jax.random.split(key, texts.shape[1]))(keys)
        )
        return network.recur(params, state, e, view, kv, network.recurrence)[0]

    def loss(theta: Theta, params: Any, batch: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        request, texts = batch["request"], jnp.pad(batch["texts"], room)
        states = jnp.pad(teacher(params, batch["texts"], request.keys), (*room, (0, 0)))
        at = jnp.arange(texts.shape[1])

        def record(state: Any, info: Any) -> Any:
            rows = state.rows
            first = rows.length - info.committed - 1
            positions = first[:, None] + jnp.arange(width)
            answer = (at >= request.lengths[:, None]) & (at <= first[:, None])
            common = min(rows.tokens.shape[1], texts.shape[1])
            wrong = (rows.tokens[:, :common] != texts[:, :common]) & answer[:, :common]
            counts = (positions < batch["ends"][:, None] - 1) & ~jnp.any(wrong, axis=1)[:, None]
            losses = score.latent_change(window(states, first, width), info.refined)
            leaving = info.leaving * counts
            return jnp.sum(leaving * losses), jnp.sum(leaving), jnp.sum(info.staying * counts)

        knobs = decoder.Knobs(
            **constrained(theta),
            gate_temperature=options.gate_temperature,
            candidate_temperature=options.candidate_temperature,
        )
        _, sums = rollout(decoder, params, request, knobs, n=options.steps, record=record)
        losses, left, stayed = (jnp.sum(x) for x in sums)
        left = jnp.maximum(left, 1e-6)
        parts = {
            "loss_of_states": losses / left,
            "expected_steps": stayed / left,
            "positions": left,
        }
        return parts["loss_of_states"] + options.price * parts["expected_steps"], parts

    return loss


def learn(model: Model, pool: Pool, options: Options) -> dict[str, Any]:
    """Adam on the schedules, from the paper's: history, candidates and the cost."""
    loss = make_loss(model, pool, options)
    learned = descend(loss, model, pool, start(options), constrained, options)
    prefill = pool.prompts.shape[1] * options.prefill_recurrence
    step = options.steps * options.width * options.inner_recurrence
    taught = pool.texts.shape[1] * model.network.recurrence
    cost = options.updates * options.rows * (GRADIENT * (prefill + step) + taught)
    return learned | {"cost": cost}


def draw_schedule(generator: np.random.Generator, ages: int) -> dict[str, list[float]]:
    """A random schedule: each knob constant or, as often, drawn anew for each age."""

    def draw(low: float, high: float) -> np.ndarray:
        return np.broadcast_to(
            generator.uniform(low, high, 1 if generator.random() < 0.5 else ages), ages
        )

    noise = draw(0, 0.3) * (generator.random() < 0.5)
    return listed(
        {"momentum": draw(0, 0.6), "noise": noise, "exit_threshold": np.exp(draw(-4.6, 0.7))}
    )


def cost_of(decoded: Decoded, pool: Pool, options: Options) -> float:
    """Passes of the core over a position.

    A batch goes on until its last row has stopped, but a row's own calls are what its sampler
    needs.
    """
    rows = len(decoded.generated)
    steps = (int(decoded.network_calls.sum()) - rows) * options.width * options.inner_recurrence
    return steps + rows * pool.prompts.shape[1] * options.prefill_recurrence


def knobs_of(schedule: dict[str, Any]) -> Any:
    """A schedule as the discrete sampler's knobs."""
    arrays: Any = {name: np.asarray(x, np.float32) for name, x in schedule.items()}
    return Wavefront.Knobs(**arrays)


def main(options: tyro.conf.OmitArgPrefixes[Options]) -> None:
    """Learns, searches, chooses, measures; prints and writes the result."""
    model = load(options.model)
    pool = draw_pool(model, options.pool, options.seed, options.problem_steps)
    learned = learn(model, pool, options)
    sampler = Wavefront(
        inner_recurrence=options.inner_recurrence,
        window=options.width,
        prefill_recurrence=options.prefill_recurrence,
    )
    contest = Contest(model, sampler, knobs_of, options)
    searched = contest.search(
        pool,
        lambda generator: draw_schedule(generator, options.ages),
        lambda decoded: cost_of(decoded, pool, options),
        learned["cost"],
    )
    named = [
        ("hand-set (paper)", HAND),
        *((f"tuned by hand, exit {x['exit_threshold']}", x) for x in TUNED),
    ]
    by_hand = [  # as schedules, so that all settings share one program
        (name, {knob: [value] * options.ages for knob, value in values.items()})
        for name, values in named
    ]
    methods = {"learned": learned["candidates"], "random search": searched["candidates"]}
    result = {"learner": learned, "random_search": searched}
    result |= contest.result(methods, by_hand, options.seed + 1)
    write_record(options.out, options, result, dtypes=facts.dtypes(model.params))


if __name__ == "__main__":
    run(main)
