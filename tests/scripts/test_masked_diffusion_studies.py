"""Studies of masked diffusion at toy size: rows that are drawn once, students at equal entropy."""

import dataclasses
import json
import math
from pathlib import Path

import jax
import numpy as np
import pytest

from experiments.masked_diffusion import frontier, study, texts
from experiments.masked_diffusion.texts import Texts, left_out
from paradec_jax.config import CAUSAL_PRESETS, MASKED_DIFFUSION_PRESETS
from paradec_jax.data.text import character_spec, character_tokenizer
from paradec_jax.evaluate.judge import judge_ids
from paradec_jax.evaluate.text_measures import entropy
from paradec_jax.families import parameter_shapes
from paradec_jax.store import Model, load, save

TEXT = "To be, or not to be:\nthat is the question.\n" * 12
LENGTH = 12
CHANGED = ("forward-kl", "tvd", "half-rounds", "fourths", "ema-teacher", "grid-released")


def model_of(preset, seed, tokenizer):
    config = {**MASKED_DIFFUSION_PRESETS, **CAUSAL_PRESETS}[preset]
    config = dataclasses.replace(config, vocab_size=tokenizer.vocab_size, max_length=16, layers=1)
    draw = np.random.default_rng(seed)
    params = jax.tree.map(lambda x: draw.normal(0, 0.3, x.shape).astype(np.float32), parameter_shapes(config))
    return Model(config, params, character_spec(tokenizer, "own" if "mdlm" in preset else "next"), tokenizer)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The folders that trainings leave, with random weights, and the text."""
    folder, tokenizer = tmp_path_factory.mktemp("runs"), character_tokenizer(TEXT)
    (folder / "text.txt").write_text(TEXT)
    places = {"tiny-mdlm": "test-mdlm", "halves/round-0": "test-mdlm", "halves/round-1": "test-mdlm"}
    places |= {"tiny-judge": "test-causal", "tiny-rival": "test-causal"}
    for seed, (place, preset) in enumerate(places.items()):
        save(folder / place / "model", model_of(preset, seed, tokenizer))
    (folder / "halves" / "held_out.json").write_text("{}")
    return folder


def options_of(runs, tmp_path, *names, **changes):
    small = {"steps": (2, 4), "frontier": (2, 4), "temperatures": (1.0, 0.5), "samples": 5, "rows": 3}
    paths = {"runs": runs, "text": runs / "text.txt", "drawn": tmp_path / "drawn.json"}
    small |= {"length": LENGTH, "folder": tmp_path / "results"}
    return study.Options(names, **{**paths, **small, **changes})


@pytest.fixture(scope="module")
def done(runs, tmp_path_factory):
    """Two studies that share rows: the folder, and how many rows each drew; the frontier was run twice."""
    pytest.importorskip("matplotlib")
    folder, counts, honest = tmp_path_factory.mktemp("done"), [], texts.draw

    def counting(*arguments, **options):
        counts[-1] += 1
        return honest(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(texts, "draw", counting)
        for name in ("rounds", "frontier", "frontier"):
            counts.append(0)
            study.main(options_of(runs, folder, name))
    return folder, counts


def test_a_row_is_drawn_once(done):
    folder, counts = done
    # The teacher and two students at two steps; then the teacher at a second temperature, and the rival at both.
    assert counts == [3 * 2, 2 + 2, 0]
    assert len(json.loads((folder / "drawn.json").read_text())["rows"]) == 3 * 2 + 2 + 2 + 1
    for name in ("rounds", "frontier"):
        assert (folder / "figures" / f"{name}.png").stat().st_size > 1000


def test_rows_tell_what_was_drawn(done, runs):
    folder, _ = done
    table = json.loads((folder / "results" / "rounds.json").read_text())
    rows = table["rows"]
    assert [(row["line"], row["steps"]) for row in rows] == [
        *((name, steps) for name in ("teacher", "1 round", "2 rounds") for steps in (2, 4)),
        ("real text", None),
    ]
    assert table["options"]["judge_sha256"] and table["facts"]["dtypes"] == ["float32"]
    for row in rows[:-1]:
        assert row["samples"] == 5 and row["tokens"] == 5 * LENGTH and row["dtype"] == "float32"
        assert row["network_calls"] <= row["steps"] and row["nats"] > 0 and row["reverse_perplexity"] > 1
        assert row["judge_reads"] == "ids" and "left_out" not in row
    assert len({row.get("model_sha256") for row in rows}) == 4


def test_the_frontier_compares_at_equal_entropy(done):
    folder, _ = done
    table = json.loads((folder / "results" / "frontier.json").read_text())
    assert {row["line"] for row in table["rows"]} >= {
        "teacher, 2 steps",
        "1 round",
        "autoregressive",
        "real text",
    }
    pairs = [(one["line"], one["steps"], one["curve"]) for one in table["at_equal_entropy"]]
    assert sorted(pairs) == sorted(
        (f"{name}", steps, f"teacher, {curve} steps")
        for name in ("1 round", "2 rounds")
        for steps, curve in ((2, 2), (2, 4))  # students are drawn at fewer steps than the longest curve
    )
    assert table["bars"] == []  # they are of 8, 16 and 64 steps


def test_rows_of_other_options_are_refused(done, runs, tmp_path):
    folder, _ = done
    with pytest.raises(ValueError, match="was made with other samples: name another file"):
        Texts(options_of(runs, folder, "rounds", samples=6).drawing())
    (folder / "other.json").write_text("[]")
    with pytest.raises(ValueError, match="is no file of rows"):
        Texts(options_of(runs, folder, "rounds", drawn=folder / "other.json").drawing())
    (tmp_path / "text.txt").write_text(TEXT + "Zebra" * 30)
    with pytest.raises(ValueError, match=r"holds characters that .* does not know"):
        Texts(options_of(runs, tmp_path, "rounds", text=tmp_path / "text.txt").drawing())
    with pytest.raises(ValueError, match="samples must be at least 2"):
        options_of(runs, folder, "rounds", samples=1).drawing()


def test_settings_of_every_study_differ(runs, tmp_path, capsys):
    for name in CHANGED:
        (tmp_path / name / "round-0" / "model").mkdir(parents=True)
        (tmp_path / name / "held_out.json").write_text("{}")
    for place in ("halves/round-0/model", "halves/round-10/model", "halves/round-9/model"):
        (tmp_path / place).mkdir(parents=True)
    (tmp_path / "halves" / "held_out.json").write_text("{}")
    options = study.Options(("all",), runs=tmp_path)
    assert [Path(place).parent.name for place in options.rounds] == ["round-0", "round-9", "round-10"]
    for name, one in study.STUDIES.items():
        lines = one.lines(options)
        keys = [(line.name, line.setting.label(), line.dtype) for line in lines]
        assert len(set(keys)) == len(keys) > len(options.steps), name
        for line in lines:
            if line.setting.knobs is not None:
                line.setting.knobs.check()
    assert "left out: mse, which is not in" in capsys.readouterr().err


def test_what_is_not_there_is_told(tmp_path):
    options = study.Options(("rounds",), runs=tmp_path)
    with pytest.raises(ValueError, match=r"no student in .*name --students"):
        study.STUDIES["rounds"].lines(options)
    with pytest.raises(ValueError, match=r"none of the runs halves, fourths, eighths is done in"):
        study.STUDIES["jumps"].lines(options)
    with pytest.raises(ValueError, match=r"no study tables: choose of rounds"):
        study.main(study.Options(("tables",)))
    with pytest.raises(ValueError, match="at least one number each"):
        study.Options(("rounds",), steps=())


def row_of(line, steps, log_perplexity, entropy, temperature=1.0, spread=0.0):
    """A made-up row; without group g its log-perplexity is lower by g * spread."""
    return {
        "line": line,
        "steps": steps,
        "temperature": temperature,
        "judge_perplexity": math.exp(log_perplexity),
        "fourgram_entropy": entropy,
        "left_out": {
            "log_perplexity": [log_perplexity - g * spread for g in range(4)],
            "fourgram_entropy": [entropy] * 4,
        },
    }


def test_a_curve_is_read_at_an_entropy():
    curve = [row_of("teacher, 8 steps", 8, 2 * h, h) for h in (3.0, 1.0, 2.0)]
    assert frontier.at_entropy(curve, 1.25, None) == pytest.approx(2.5)
    assert frontier.at_entropy(curve, 0.5, None) == pytest.approx(1.0)
    better = frontier.compared(row_of("5 rounds", 8, 2.5 - math.log(2), 1.25), curve)
    assert better["ratio"] == pytest.approx(0.5) and better["ratio_interval"] == pytest.approx([0.5, 0.5])
    assert better["perplexity_at_equal_entropy"] == pytest.approx(math.exp(2.5))
    wide = frontier.compared(row_of("5 rounds", 8, 2.5, 1.25, spread=0.01), curve)
    assert wide["ratio"] == pytest.approx(1) and wide["ratio_interval"][0] < 1 < wide["ratio_interval"][1]
    assert frontier.compared(row_of("5 rounds", 8, 2.5, 3.5), curve)["ratio"] is None


def test_bars_of_the_last_student():
    teacher = {8: row_of("t", 8, math.log(30), 9.0), 64: row_of("t", 64, math.log(20), 8.0)}
    student = {8: row_of("s", 8, math.log(25), 8.0), 16: row_of("s", 16, math.log(19), 7.6)}
    found = {(one["bar"].split()[0], one["steps"]): one for one in frontier.bars(teacher, student)}
    values = {key: one["value"] for key, one in found.items()}
    assert values == {
        ("perplexity", 16): pytest.approx(19 / 20),
        ("perplexity", 8): pytest.approx(25 / 20),
        ("entropy", 16): pytest.approx(7.6 / 8),
        ("entropy", 8): pytest.approx(1),
        ("share", 8): pytest.approx(0.5),
    }
    assert found["share", 8]["wanted"] == "at least 0.4" and frontier.bars(teacher, {}) == []
    assert frontier.bars({8: teacher[8], 64: teacher[8]}, student)[-1]["value"] is None


def test_students_have_temperatures_too(runs, tmp_path):
    options = options_of(
        runs, tmp_path, "frontier", frontier=(8, 16, 64), temperatures=(1.0,), student_temperatures=(1.0, 0.9)
    )
    lines = [line for line in study.of_frontier(options) if "round" in line.name]
    assert [line.name for line in lines[:4]] == ["1 round, 8 steps"] * 2 + ["1 round, 16 steps"] * 2
    assert [line.setting.label() for line in lines[:2]] == ["steps 8", "temperature 0.9, steps 8"]
    rows = [row_of(f"teacher, {steps} steps", steps, math.log(20), 8.0) for steps in (8, 16, 64)]
    for temperature, perplexity in ((1.0, 25), (0.9, 21)):
        row = row_of("1 round, 16 steps", 16, math.log(perplexity), 8.0, temperature)
        rows.append(row | {"model_sha256": "s"})
    found = [bar for bar in study.equal_entropy(rows, options)["bars"] if "perplexity" in bar["bar"]]
    assert [(bar["temperature"], bar["value"]) for bar in found] == [
        (1.0, pytest.approx(25 / 20)),
        (0.9, pytest.approx(21 / 20)),
    ]
    with pytest.raises(ValueError, match="all temperatures need at least one"):
        study.Options(("frontier",), student_temperatures=())


@pytest.mark.parametrize("definition", ["sdtt", "mdlm"])
def test_rows_know_what_they_would_be_without_some_samples(runs, definition):
    judge = load(str(runs / "tiny-judge" / "model"))
    ids = np.random.default_rng(0).integers(0, judge.config.vocab_size - 1, (7, LENGTH)).tolist()
    judged = judge_ids(judge, ids, definition=definition, begin=True)
    found = left_out(ids, judged, groups=3)
    for group in range(3):
        rest = [row for i, row in enumerate(ids) if i % 3 != group]
        again = judge_ids(judge, rest, definition=definition, begin=True)
        assert found["log_perplexity"][group] == pytest.approx(math.log(again.perplexity), rel=1e-5)
        assert found["fourgram_entropy"][group] == pytest.approx(entropy(rest, 4))
