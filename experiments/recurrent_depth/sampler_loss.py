"""What `learn_sampler.py` minimises: constrained schedules, and the loss of a soft rollout."""

import dataclasses
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from experiments.common.pool import Pool
from paradec_jax import Model, SoftWavefront, rollout
from paradec_jax.decode.rules import score
from paradec_jax.decode.rules.sampling import log_probability
from paradec_jax.decode.rules.windows import window

Theta = dict[str, Any]  # unconstrained momentum, noise and exit_threshold, [K] each
# Largest momentum and noise; an exit threshold is positive.
MOST = {"momentum": 0.9, "noise": 0.5}
HAND = {
    "momentum": 0.1,
    "noise": 0.0,
    "exit_threshold": 0.03,
}  # the values of the wavefront paper, arXiv 2510.14961


@dataclasses.dataclass(frozen=True)
class Options:
    """What to learn and to measure.

    Attributes:
      model: a model folder or the name of a bundled one.
      objective: loss of a state that leaves.
      price: loss that one more expected step of a position is worth.
      call_price: share of exact answers that one more network call a token is worth, in the choice
        of candidates.
      relaxation: of the soft wavefront.
      gate_temperature, candidate_temperature: softness of exits and candidates.
      inner_recurrence, width, prefill_recurrence: of every sampler here.
      ages: K, length of the schedules.
      updates: gradient steps.
      learning_rate: of Adam, on unconstrained parameters.
      rows: training problems of an update.
      pool: training problems in all.
      steps: steps of a rollout.
      segment: steps of a segment; sqrt(steps) when None.
      problem_steps: fewest and most steps of a problem's solution.
      trial_rows: training problems of a trial of the random search.
      candidates: candidates of each method that are tried on the tuning problems.
      tuning: tuning problems.
      problems: unseen problems.
      seed: of training problems and draws; unseen problems are drawn from seed + 1.
      out: path of the JSON.
    """

    model: str = "tiny-recurrent"
    objective: Literal["distance", "likelihood"] = "distance"
    price: float = 0.02
    call_price: float = 0.1
    relaxation: Literal["straight_through", "soft"] = "straight_through"
    gate_temperature: float = 0.5
    candidate_temperature: float = 1.0
    inner_recurrence: int = 1
    width: int = 3
    prefill_recurrence: int = 4
    ages: int = 6
    updates: int = 200
    learning_rate: float = 0.05
    rows: int = 8
    pool: int = 512
    steps: int = 64
    segment: int | None = None
    problem_steps: tuple[int, int] = (2, 4)
    trial_rows: int = 64
    candidates: int = 4
    tuning: int = 200
    problems: int = 1000
    seed: int = 0
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
        relaxation=options.relaxation,
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
        states = None
        if options.objective == "distance":
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
            if states is not None:
                losses = score.latent_change(window(states, first, width), info.refined)
            else:
                logits = network.logits(params, info.hidden)
                losses = -log_probability(logits, window(texts, first + 1, width))
            leaving = info.leaving * counts
            return jnp.sum(leaving * losses), jnp.sum(leaving), jnp.sum(info.staying * counts)

        knobs = decoder.Knobs(
            **constrained(theta),
            gate_temperature=options.gate_temperature,
            candidate_temperature=options.candidate_temperature,
        )
        _, sums = rollout(
            decoder, params, request, knobs, n=options.steps, segment=options.segment, record=record
        )
        losses, left, stayed = (jnp.sum(x) for x in sums)
        left = jnp.maximum(left, 1e-6)
        parts = {
            "loss_of_states": losses / left,
            "expected_steps": stayed / left,
            "positions": left,
        }
        return parts["loss_of_states"] + options.price * parts["expected_steps"], parts

    return loss
