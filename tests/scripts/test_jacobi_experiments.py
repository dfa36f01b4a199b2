"""The scripts about Jacobi decoding at toy size, on a small model with random weights."""

import dataclasses

import numpy as np
import pytest
from experiment import read
from experiment import script as run_script

from experiments.common import plots, runner
from experiments.common.study import Study
from experiments.jacobi import side_by_side
from experiments.jacobi.study import STUDIES, compared, multiblock
from paradec_jax.config import CAUSAL_PRESETS

CONFIG = dataclasses.replace(CAUSAL_PRESETS["test-causal"], vocab_size=384, max_length=256)


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
