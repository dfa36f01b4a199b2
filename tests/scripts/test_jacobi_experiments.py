"""The scripts about Jacobi decoding at toy size, on a small model with random weights."""

import dataclasses
import math

import jax
import numpy as np
import pytest
from experiment import read
from experiment import script as run_script

from experiments.common import plots, runner
from experiments.common.study import Study
from experiments.jacobi import side_by_side
from experiments.jacobi.study import STUDIES, compared, multiblock
from paradec_jax.config import CAUSAL_PRESETS
from paradec_jax.families import init_params

CONFIG = dataclasses.replace(CAUSAL_PRESETS["test-causal"], vocab_size=384, max_length=256)


@pytest.fixture(scope="module")
def script():
    return run_script("jacobi/block_sizes")


class TestBlockSizes:
    def options(self, script, tmp_path, **changes):
        small = {
            "presets": ("test-causal",),
            "windows": (1, 4),
            "candidates": (1, 2),
            "context": 6,
            "steps": 2,
        }
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
        result, _ = read(options.out)
        costs, gains = result["cost"], result["gain"]
        assert options.figure.stat().st_size > 1000
        assert [(row["window"], row["candidates"]) for row in costs] == [(1, 1), (4, 1), (1, 2), (4, 2)]
        assert costs[0]["over_one_position"] == 1.0
        for row in costs:
            assert 0 < row["fastest"] <= row["microseconds"] <= row["slowest"]
            assert len(row["passes"]) == 3
            assert row["speedup_8"] is None and (row["speedup_2"] is None) == (row["window"] < 2)
            low, high = row["speedup_2_interval"]
            assert (low is None) == (row["speedup_2"] is None)
            if low is not None:
                assert row["speedup_2"] == pytest.approx(2 / row["over_one_position"])
                assert low <= row["speedup_2"] <= high
                low, high = row["over_one_position_interval"]
                assert low <= row["over_one_position"] <= high
        assert [row["decoder"] for row in gains] == list(two)
        for row in gains:
            assert row["equals_greedy"] == 1.0 and row["tokens_per_network_call"] >= 1.0
            assert row["settings"]["block"] == row["block"] == 4

    def test_a_window_that_holds_the_tokens_has_a_speed_up_with_a_range(self, script):
        row = script["speedups"](4, (0.5, (0.25, 0.75)), (2, 4, 8))
        assert row["speedup_4"] == 2 and row["speedup_4_interval"] == [1, 3] and row["speedup_8"] is None
        assert script["speedups_told"](row) == {2: "1.00x [0.50, 1.50]", 4: "2.00x [1.00, 3.00]"}
        alone = script["speedups"](4, (0.5, (0.0, math.inf)), (2,))
        assert script["speedups_told"](alone) == {2: "1.00x, no range"}

    def test_a_loop_of_steps_is_the_network_call_after_call(self, script):
        network = script["TransformerNetwork"](CONFIG)
        params = init_params(CONFIG, jax.random.key(0))
        jnp = jax.numpy
        tokens, at = jnp.asarray([[5, 6, 7, 5, 9, 8]], jnp.int32), jnp.zeros(1, jnp.int32)
        _, found = script["run_steps"](network, 2, 2, params, network.init_cache(jnp.zeros(1), 3), tokens, at)
        for _ in range(2):  # both candidates begin the text, so each is a plain pass of its own
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
            ({"candidates": ()}, "nothing to time"),
            ({"context": 125}, "more than the 128"),
            ({"dtype": "bfloat16"}, "a CPU times float32 weights alone"),
            ({"models": ("m",), "blocks": (1,)}, "blocks must be numbers of at least 2"),
        ],
    )
    def test_refuses(self, script, tmp_path, wrong, message):
        with pytest.raises(ValueError, match=message):
            script["main"](self.options(script, tmp_path, **wrong))

    def test_refuses_models_of_another_family(self, script, tmp_path):
        with pytest.raises(ValueError, match="of family recurrent_depth"):
            script["main"](self.options(script, tmp_path, presets=(), models=("tiny-recurrent",)))


class TestStudies:
    def options(self, tmp_path, model, *names):
        options = {"problems": 2, "timed": 0, "rows": 2, "budget": 5, "folder": tmp_path / "results"}
        return runner.Options(names, model=model, **options)

    def test_a_study_of_a_causal_model_is_written_and_drawn(self, models, tmp_path):
        pytest.importorskip("matplotlib")
        choices = ("block", "pool"), ("blocks", "spawn")
        settings = [multiblock(3, blocks, spawn) for blocks, spawn in ((1, None), (2, 0.0), (2, 1.0))]
        toy = Study("Toy", lambda r: settings, *choices, "grid", "causal")
        runner.main({"toy": toy}, self.options(tmp_path, models[0], "all"))
        table, lines = read(tmp_path / "results" / "toy-before.json")
        assert list(table["rows"]) == [
            "autoregressive",
            "multiblock, block 3",
            "multiblock, block 3, blocks 2, spawn 0",
            "multiblock, block 3, blocks 2, spawn 1",
        ]
        assert [line["settings"].get("spawn") for line in lines][2:] == [0.0, 1.0]
        assert {row["equals_greedy"] for row in table["rows"].values()} == {1.0}
        picture = tmp_path / "figures" / "toy-before.png"
        assert picture.stat().st_size > 1000
        rows = list(table["rows"].values())
        for kind, x, lines in (("curves", "spawn", "blocks"), ("bars", None, None)):
            other = Study("Toy", lambda r: [], x, lines, kind, "causal")
            plots.draw(other, rows, picture.with_name(f"{kind}.png"))
            assert picture.with_name(f"{kind}.png").stat().st_size > 1000

    def test_models_of_another_family_are_refused(self, tmp_path):
        for names in (("jacobi_candidates",), ("all",)):
            with pytest.raises(SystemExit, match="jacobi_candidates does not suit tiny-recurrent of family"):
                runner.main(STUDIES, self.options(tmp_path, "tiny-recurrent", *names))
        assert not (tmp_path / "results").exists()

    def test_the_sweep_is_a_full_grid(self):
        rows = [setting.settings() for setting in STUDIES["jacobi_sweep"].others(1)]
        columns = {(row["block"], row["pool"]) for row in rows}
        lines = {(row["blocks"], row["spawn"]) for row in rows}
        assert len(rows) == len(columns) * len(lines) == 9 * 7


class TestSideBySide:
    @pytest.fixture
    def script(self):
        return side_by_side

    def test_models_are_paired_with_the_first(self, script, models, tmp_path, monkeypatch):
        few = compared(4)[2:3]
        monkeypatch.setattr(script, "compared", lambda block: few)
        answers = {"before": [True, False, False], "after": [True, True, True]}
        honest = script.compare

        def known(model, problems, settings, *, name, **options):
            score = lambda problems, texts: np.asarray(answers[name])  # noqa: E731
            return honest(model, problems, settings, name=name, score=score, **options)

        monkeypatch.setattr(script, "compare", known)
        options = script.Options(
            models, block=4, problems=3, steps=(2, 2), budget=5, rows=3, out=tmp_path / "rows.json"
        )
        script.main(options)
        result, table = read(options.out)
        rows = result["rows"]
        assert [row["model"] for row in rows] == ["before", "before", "after", "after"]
        assert len(table) == 4 and result["options"]["models"] == ["before", "after"]
        for row in rows:
            later = row["model"] == "after"
            assert row["exact"] == (3 if later else 1)
            assert row["difference"] == pytest.approx(2 / 3 if later else 0.0)
            assert (row["only_here_exact"], row["only_first_model_exact"]) == (2 * later, 0)
            assert row["equals_greedy"] == 1.0
        assert {line["label"] for line in table} == {"autoregressive", "jacobi, block 4, running True"}

    def test_names_and_refusals(self, script, tmp_path):
        runs = "runs/mask-nc/round-0/model", "runs/mask-clean/round-0/model"
        assert script.names_of(["tiny-causal", runs[0]]) == ["tiny-causal", "mask-nc/round-0"]
        assert script.names_of(["a/x", "b/x"]) == ["a/x", "b/x"]
        for wrong, message in (((), "at least one"), (("a", "a"), "each of them once")):
            with pytest.raises(ValueError, match=message):
                script.evaluate(script.Options(wrong))
        with pytest.raises(ValueError, match="needs a causal model"):
            script.evaluate(script.Options(("tiny-recurrent",), problems=1))


class TestRecipes:
    @pytest.fixture
    def recipes(self):
        return run_script("jacobi/distill")

    def test_recipes_of_a_table_differ_in_what_it_is_about(self, recipes):
        def facts(recipe):
            found = dataclasses.asdict(recipe)
            (stage,) = found.pop("rounds")
            return found | stage | {"name": None}

        masks = [facts(recipe) for recipe in recipes["MASKS"].values()]
        assert [item.pop("rules")["context"] for item in masks] == ["nc", "nc_ic", "clean"]
        assert masks[0] == masks[1] == masks[2]
        noise = [facts(recipe) for recipe in recipes["SCHEDULES"].values()]
        found = {(item.pop("order"), item.pop("window")) for item in noise}
        assert found == {(order, w) for order in ("linear", "random", "reverse") for w in (4, 8)}
        assert all(item == noise[0] for item in noise)
        assert {name: recipe.name for name, recipe in recipes["RECIPES"].items()} == {
            name: name for name in recipes["RECIPES"]
        }

    def test_the_first_round_reads_shared_trajectories(self, recipes, models, tmp_path, monkeypatch):
        gathered, read, scope = [], [], recipes["main"].__globals__
        monkeypatch.setitem(scope, "gather", lambda *rest: gathered.append(rest[-1]))
        monkeypatch.setitem(scope, "Trajectories", read.append)
        monkeypatch.setitem(scope, "train", lambda model, *rest, **options: model)
        two = (recipes["Round"](), recipes["Round"](block=32))
        recipe = dataclasses.replace(recipes["Recipe"](), start=models[0], rounds=two, replay_tokens=None)
        recipes["main"](recipe, folder=tmp_path / "run", trajectories=tmp_path / "shared")
        assert gathered == [tmp_path / "shared", tmp_path / "run" / "round-1" / "trajectories"] == read
        assert (tmp_path / "run" / "round-1" / "model" / "config.json").exists()
