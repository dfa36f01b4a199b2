"""What studies of recurrent depth compute: operations, schedules, deeper networks, waves."""

import dataclasses
import functools
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.recurrent_depth import serial_steps, width_depth
from experiments.recurrent_depth.distill_waves import Waves
from experiments.recurrent_depth.growth import deepen_core
from experiments.tasks import word_problems
from experiments.tasks.files import write_problems
from paradec_jax import load
from paradec_jax.config import RECURRENT_PRESETS
from paradec_jax.families import init_params, parameter_shapes
from paradec_jax.models import RecurrentDepthNetwork
from paradec_jax.objectives.options import Run
from paradec_jax.objectives.run import train

pytestmark = pytest.mark.slow
TINY, CONFIG = RECURRENT_PRESETS["tiny-recurrent"], RECURRENT_PRESETS["test-recurrent"]


def sees(rule: str, query: tuple[int, int], key: tuple[int, int], copies: int) -> bool:
    """The definitions, token and copy counted from 1."""
    (token, copy), (key_token, key_copy) = query, key
    if key_token == token:
        return key_copy <= copy
    return key_token < token and (rule != "kv_share" or key_copy == copies)


@pytest.mark.parametrize("variant", width_depth.VARIANTS)
@pytest.mark.parametrize(("tokens", "factor"), [(4, 2), (5, 3)])
def test_costs_are_sums_over_masks_and_layers(variant, tokens, factor):
    order = itertools.product(range(tokens), range(1 if variant == "depth" else factor))
    order = [(token + 1, copy + 1) for token, copy in order]
    mask = np.asarray([[sees(variant, query, key, factor) for key in order] for query in order])
    recurrence, d, f, positions = 3, TINY.width, TINY.feed_forward, len(mask)
    turns = recurrence * (factor if variant == "depth" else 1)
    layers = TINY.prelude_layers + TINY.core_layers * turns + TINY.coda_layers
    products = layers * (4 * d * d + 3 * d * f) + turns * 2 * d * d
    cost = width_depth.prefill(TINY, variant, tokens, factor, recurrence)
    assert (cost.positions, cost.layers, cost.pairs) == (positions, layers, layers * mask.sum())
    assert cost.linear == 2 * positions * products + 2 * d * TINY.vocab_size
    assert cost.attention == 4 * TINY.head_dim * TINY.heads * cost.pairs
    copies = positions // tokens  # of the first token; the last position sees some of them
    stored = TINY.prelude_layers + TINY.core_layers + TINY.coda_layers
    assert cost.kept == stored * tokens * mask[-copies:, :copies].any(axis=0).sum()


def test_the_wave_is_as_deep_as_late_and_wider(tmp_path):
    r, new, path = 2, 4, tmp_path / "steps.json"
    serial_steps.main(serial_steps.Options("test-recurrent", r, new, path))
    sequential, *waves = json.loads(path.read_text())["rows"]
    assert (sequential["depth"], sequential["serial_first"], sequential["serial_all"]) == (
        [r],
        r,
        new * r,
    )
    for row in waves:
        inner = row["inner_recurrence"]
        depth = r if row["decoder"] == "wavefront" else (r // inner + 2) * inner
        width = depth // inner
        ramp = [min(step, width) for step in range(1, width + new)]
        assert (row["depth"], row["serial_first"], row["in_flight"]) == ([depth], depth, ramp)
        assert row["serial_all"] == depth + (new - 1) * inner and row[
            "core_positions"
        ] == inner * sum(ramp)


@functools.partial(jax.jit, static_argnums=0)
def logits(config, params):
    network = RecurrentDepthNetwork(config, recurrence=3)
    tokens = jax.random.randint(jax.random.key(1), (2, 7), 0, config.vocab_size)
    positions = jnp.broadcast_to(jnp.arange(7), (2, 7))
    state = network.initial_state(jax.random.split(jax.random.key(2), (2, 7)))
    return network.logits(params, network.forward_from(params, tokens, positions, state)[0].hidden)


def test_new_layers_pass_on_what_they_get_and_learn():
    params = init_params(CONFIG, jax.random.key(0))
    deeper, grown = deepen_core(CONFIG, params, jax.random.key(3), 2)
    assert jax.tree.map(jnp.shape, grown) == jax.tree.map(jnp.shape, parameter_shapes(deeper))
    np.testing.assert_allclose(logits(deeper, grown), logits(CONFIG, params), atol=2e-5)
    gradient = jax.jit(jax.grad(lambda p: jnp.sum(jnp.sin(logits(deeper, p)))))(grown)
    assert float(jnp.abs(gradient["core_1"]["mlp"]["down"]).max()) > 1e-4


def test_waves_learn_from_the_trajectories_of_a_causal_model(toys, tmp_path):
    write_problems(tmp_path / "data", word_problems(6, seed=0, steps=(2, 2), split="train"))
    waves = Waves(source=str(toys / "causal"), block=4, new_tokens=8)
    options = {
        "data": str(tmp_path / "data"),
        "updates": 2,
        "batch_tokens": 1024,
        "optimizer": "muon",
    }
    run = Run(
        model=str(toys / "recurrent"), held_out=options["data"], out=tmp_path / "run", **options
    )
    train(waves, run)
    trained, start = load(tmp_path / "run" / "model"), load(run.model)
    assert trained.config.core_layers == 2 * start.config.core_layers
    *_, last = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert last["after"]["loss"] != last["before"]["loss"]
    with pytest.raises(ValueError, match="source must be a causal model with the tokenizer of"):
        train(
            dataclasses.replace(waves, source=run.model),
            dataclasses.replace(run, out=tmp_path / "other"),
        )
