"""The scripts about Jacobi decoding at toy size, on a small model with random weights."""

import csv
import dataclasses
import json
import runpy
from pathlib import Path

import jax
import pytest

from paradec_jax.config import CAUSAL_PRESETS
from paradec_jax.data import build_tokenizer, token_spec
from paradec_jax.models.causal import init_params
from paradec_jax.store import Model, save

EXPERIMENTS = Path(__file__).parents[1] / "experiments"
CONFIG = dataclasses.replace(CAUSAL_PRESETS["test-causal"], vocab_size=384, max_length=256)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Two folders of random weights, one shape."""
    folder = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(("before", "after")):
        params = jax.tree.map(lambda x: 2 * x, init_params(CONFIG, jax.random.key(seed)))
        save(folder / name, Model(CONFIG, params, token_spec(), build_tokenizer()))
    return str(folder / "before"), str(folder / "after")


def read(path: Path):
    with path.with_suffix(".csv").open() as file:
        return json.loads(path.read_text()), list(csv.DictReader(file))


@pytest.fixture(scope="module")
def script():
    return runpy.run_path(str(EXPERIMENTS / "block_sizes.py"), run_name="block_sizes")


class TestBlockSizes:
    def options(self, script, tmp_path, **changes):
        small = {"presets": ("test-causal",), "windows": (1, 4), "rows": (1, 2), "context": 6, "steps": 2}
        paths = {"out": tmp_path / "rows.json", "figure": tmp_path / "figures" / "rows.png"}
        return script["Options"](**{**small, **paths, "passes": 3, **changes})

    def test_tables_hold_every_point(self, script, models, tmp_path, monkeypatch):
        two = dict(list(script["decoders"](4).items())[:2])
        monkeypatch.setitem(script["main"].__globals__, "decoders", lambda block: two)
        options = self.options(
            script,
            tmp_path,
            models=models[:1],
            blocks=(4,),
            problems=2,
            step_range=(2, 2),
            budget=6,
            batch=2,
            counts=(2, 8),
        )
        script["main"](options)
        result, table = read(options.out)
        costs, gains = result["cost"], result["gain"]
        assert len(table) == len(costs) + len(gains) and options.figure.stat().st_size > 1000
        assert [(row["window"], row["rows"]) for row in costs] == [(1, 1), (4, 1), (1, 2), (4, 2)]
        assert costs[0]["over_one_position"] == 1.0
        for row in costs:
            assert 0 < row["fastest"] <= row["microseconds"] <= row["slowest"]
            assert row["speedup_8"] is None and (row["speedup_2"] is None) == (row["window"] < 2)
            if row["speedup_2"] is not None:
                assert row["speedup_2"] == pytest.approx(2 / row["over_one_position"])
        assert [row["decoder"] for row in gains] == list(two)
        for row in gains:
            assert row["equals_greedy"] == 1.0 and row["tokens_per_network_call"] >= 1.0
            assert row["settings"]["block"] == row["block"] == 4

    def test_a_loop_of_steps_is_the_network_call_after_call(self, script):
        network = script["CausalNetwork"](CONFIG)
        params = init_params(CONFIG, jax.random.key(0))
        jnp = jax.numpy
        tokens, at = jnp.asarray([[5, 6, 7, 5, 9, 8]], jnp.int32), jnp.zeros(1, jnp.int32)
        _, found = script["run_steps"](network, 3, 2, 2, params, network.init_cache(1, 3), tokens, at)
        for _ in range(2):  # both rows begin the text, so each is a plain pass of its own
            rows = tokens.reshape(2, 3)
            out = network.forward(params, rows, jnp.tile(jnp.arange(3), (2, 1)))
            tokens = jnp.argmax(network.logits(params, out.hidden), axis=-1).reshape(1, 6)
        assert found.tolist() == tokens.tolist()

    @pytest.mark.parametrize(
        ("wrong", "message"),
        [
            ({"windows": (0,)}, "windows must be at least 1"),
            ({"presets": ("tiny-recurrent",)}, "presets must be of"),
            ({"presets": ()}, "nothing to measure"),
            ({"rows": ()}, "nothing to time"),
            ({"context": 125}, "more than the 128"),
            ({"models": ("m",), "blocks": (1,)}, "blocks must be numbers of at least 2"),
        ],
    )
    def test_refuses(self, script, tmp_path, wrong, message):
        with pytest.raises(ValueError, match=message):
            script["main"](self.options(script, tmp_path, **wrong))

    def test_refuses_models_of_another_family(self, script, tmp_path):
        with pytest.raises(ValueError, match="of family recurrent_depth"):
            script["main"](self.options(script, tmp_path, presets=(), models=("tiny-recurrent",)))
