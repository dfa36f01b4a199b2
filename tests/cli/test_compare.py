"""`paradec compare` and `paradec demo` on stubs: tables, rows as JSON, what is refused."""

import dataclasses
import functools
import json
import math
import re

import pytest
from stub_table import (
    KEYS,
    LETTERED,
    STUB,
    lettered,
    put_settings,
    saved,
    small_settings,
    strict,
    zeros,
)
from stubs import StubCausal, StubDenoiser, StubHead, StubNetwork

import paradec_jax as pd
from experiments.tasks import token_spec, word_problems
from experiments.tasks.files import write_problems
from paradec_jax import cli
from paradec_jax.cli import answers, demo
from paradec_jax.cli.compare import _models
from paradec_jax.config import ResidualHeadConfig
from paradec_jax.data.problems import read_problems
from paradec_jax.decode import Residual
from paradec_jax.decode.machine.setting import Setting
from paradec_jax.evaluate.compare import compare
from paradec_jax.evaluate.tables import TABLES
from paradec_jax.families import FAMILIES
from paradec_jax.store import Model, ResidualHead

TINY = {
    "recurrent_depth": "test-recurrent",
    "causal": "test-causal",
    "block_diffusion": "test-sdar",
    "full_attention": "test-full",
}
STUBS = {
    "recurrent_depth": StubNetwork,
    "causal": StubCausal,
    "block_diffusion": functools.partial(StubDenoiser, block=4),
    "full_attention": StubDenoiser,
}
CANVAS = {"mask": 383, "alignment": "own"}  # facts of a stub that fills masks


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(saved(tmp_path_factory.mktemp("models") / "tiny"))


def easy(folder):
    """A file of problems that fit into the stubs."""
    write_problems(folder / "easy.jsonl", word_problems(4, seed=1, steps=(2, 2)))
    return str(folder / "easy.jsonl")


def compared(*models, data, more=("--timed", "1")):
    """Words of the command on easy problems in that folder, by default one of them timed."""
    return ["compare", *models, "--data", easy(data), *more]


def prompts(folder, *lines):
    """A file of lines."""
    (folder / "lines.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(folder / "lines.jsonl")


class TestAnswers:
    @pytest.fixture(autouse=True)
    def settings(self, monkeypatch):
        wave = Setting("wavefront", pd.Wavefront(inner_recurrence=2, window=3))
        put_settings(monkeypatch, "recurrent_depth", (*small_settings()[1:2], wave))
        monkeypatch.setattr(Model, "network", STUB)  # known answers, quickly compiled

    def test_json_is_all_of_stdout(self, folder, capsys, tmp_path):
        more = ("--problems", "3", "--dtype", "bfloat16", "--json")
        assert cli.main(compared(folder, data=tmp_path, more=more)) == 0
        out, err = capsys.readouterr()
        rows = strict(out)
        assert len(rows) == 2 and all(set(KEYS.split()) <= row.keys() for row in rows)
        for row in rows:
            assert (row["model"], row["problems"], row["seed"]) == ("tiny", 3, 1)
            assert row["data"] == easy(tmp_path)
            assert row["facts"]["device"]["threads"] >= 1 and row["dtype"] == "bfloat16"
            assert row["facts"]["dtypes"] == ["bfloat16"] and row["megabytes"] > 0
            low, high = row["speedup_interval"]
            assert 0 < low <= row["speedup"] <= high or len(row["passes"]) == 1
        assert "decoding in batches" in err

    def test_tables_and_a_file(self, folder, capsys, tmp_path):
        path, other = tmp_path / "rows.json", str(saved(tmp_path / "other"))
        words = compared(folder, other, data=tmp_path)
        assert cli.main([*words, "--problems", "2", "--json", str(path)]) == 0
        out, rows = capsys.readouterr().out, strict(path.read_text())
        assert [row["model"] for row in rows] == ["tiny", "tiny", "other", "other"]
        for piece in ("tiny: 2 problems", "other: 2", "wavefront", "1.00x", "r 4"):
            assert piece in out
        assert "other against tiny, one by one, same problems: +0.0 points" in out
        line = next(line for line in out.splitlines() if "wavefront" in line)
        assert re.search(r"\d\.\d\dx .* \d+\.\d\d-\d+\.\d\d", line)

    def test_problems_are_those_of_the_package_or_of_a_file(
        self, folder, capsys, monkeypatch, tmp_path
    ):
        drawn, own = [], word_problems(3, seed=5)
        write_problems(tmp_path / "own.jsonl", own)

        def keep(sources, problems, **options):
            drawn.append(problems)
            raise ValueError("enough")

        monkeypatch.setattr(answers, "compare", keep)
        for more in ([], ["--data", "tuning"], ["--data", str(tmp_path / "own.jsonl")]):
            assert cli.main(["compare", folder, *more]) == 1
        assert drawn == [read_problems("unseen")[:200], read_problems("tuning"), own]
        capsys.readouterr()

    def test_prompts_without_answers_under_a_judge(self, folder, capsys, tmp_path, monkeypatch):
        put_settings(monkeypatch, "recurrent_depth", small_settings()[:2])
        path = prompts(tmp_path, *({"prompt": f"Ana has {i}"} for i in range(3)))
        words = f"compare --model {folder} --data {path} --new-tokens 4 --judge {folder} --json"
        assert cli.main([*words.split(), str(tmp_path / "rows.json")]) == 0
        out, (few, base) = capsys.readouterr().out, strict((tmp_path / "rows.json").read_text())
        assert base["log_prob"] <= base["log_prob_interval"][1] < 0 and base["exact"] is None
        assert few["equals_greedy"] < 1 and few["log_prob"] < base["log_prob"]
        assert "log p a token" in out and "under tiny; its 95% range" in " ".join(out.split())
        assert "exact" not in out and "judged by" not in out

    def test_rows_are_kept_and_not_made_again(self, folder, capsys, tmp_path, monkeypatch):
        few, base, wave = small_settings()
        put_settings(monkeypatch, "recurrent_depth", (few, base, wave))
        monkeypatch.setattr(answers, "GROUP", 1)
        made, path = [], tmp_path / "rows.json"

        def stopped(sources, problems, **options):
            if len(made) == 1:
                raise ValueError("enough")
            made.append([source.setting for source in sources])
            return compare(sources, problems, **options)

        monkeypatch.setattr(answers, "compare", stopped)
        words = [*compared(folder, data=tmp_path), "--json", str(path)]
        assert cli.main(words) == 1 and made == [[few, base]]
        kept, made[:] = strict(path.read_text()), []
        assert cli.main(words) == 0 and made == [[base, wave]]
        rows = strict(path.read_text())
        assert (
            rows[:2] == kept
            and [row["label"] for row in rows[:2]] == ["r 2", "r 4"]
            and len(rows) == 3
        )
        assert cli.main(words) == 0 and made == [[base, wave]], "nothing is missing"
        assert "4 problems" in capsys.readouterr().out and strict(path.read_text()) == rows
        for more, differing in (
            (["--problems", "2", "--timed", "2"], "problems, timed"),
            ([], "model"),
        ):
            words[1] = words[1] if more else str(saved(tmp_path / "other"))
            assert cli.main([*words, *more]) == 1 and strict(path.read_text()) == rows
            assert f"rows of tiny with other {differing}: name another" in capsys.readouterr().err
        before = rows[0]["made_with"]
        del rows[0]["megabytes"]
        path.write_text(json.dumps(rows[:1]))
        assert [
            row["megabytes"] for row in answers._begun(str(path), {"tiny": before}).values()
        ] == [None]
        with pytest.raises(ValueError, match="rows of tiny with other adapter"):
            answers._begun(str(path), {"tiny": before | {"adapter": "digest"}})
        path.write_text("[{}]")
        assert cli.main(words) == 1 and "is not what this option writes" in capsys.readouterr().err

    def test_messages_and_chosen_decoders(self, capsys, tmp_path, monkeypatch):
        template = "{% for m in messages %}<{{ m.content }}>{% endfor %}A:"
        place = str(saved(tmp_path / "chat", chat_template=template))
        turns = [
            {"role": "user", "content": "two?"},
            {"role": "assistant", "content": "so \\boxed{2}"},
        ]
        seen = []

        def keep(sources, problems, **options):
            seen.append((sources, problems))
            raise ValueError("enough")

        monkeypatch.setattr(answers, "compare", keep)
        words = ["compare", place, "--data", prompts(tmp_path, {"messages": turns})]
        assert (
            cli.main(
                [*words, "--decoder", "wavefront", "--decoder", "autoregressive --recurrence 1"]
            )
            == 1
        )
        ((base, wave, one), (asked,)) = seen[0]
        assert (asked.prompt, asked.solution) == ("<two?>A:", "so \\boxed{2}")
        assert (
            base.model.token_spec.bos is None and base.setting.baseline and not one.setting.baseline
        )
        assert wave.setting.decoder.window == 3 and one.setting.decoder.recurrence == 1
        for decoder, message in (("lookahead", "does not suit"), ("guess", "it takes one of")):
            capsys.readouterr()
            assert (
                cli.main([*words, "--decoder", decoder]) == 1 and message in capsys.readouterr().err
            )


@pytest.mark.slow
@pytest.mark.parametrize("family", TINY)
def test_every_bundled_setting_is_strict_json(family, tmp_path, capsys, monkeypatch):
    config = dataclasses.replace(
        FAMILIES[family].presets[TINY[family]], vocab_size=384, max_length=256
    )
    spec, head = token_spec(), None
    if family in ("block_diffusion", "full_attention"):
        spec = dataclasses.replace(spec, **CANVAS)
    if family == "block_diffusion":
        shape = ResidualHeadConfig.of(config, layers=1)
        head = ResidualHead(shape, zeros(shape))
        of = StubDenoiser(block=4, vocab_size=384, max_length=256)
        monkeypatch.setattr(ResidualHead, "network", StubHead(of))
    place = str(saved(tmp_path / "tiny", config, spec, head=head))
    monkeypatch.setattr(Model, "network", STUBS[family](vocab_size=384, max_length=256))
    assert cli.main([*compared(place, data=tmp_path), "--problems", "1", "--json"]) == 0
    rows = strict(capsys.readouterr().out)
    settings = [one for one in TABLES[family] if one.name != "drafted"]  # without an adapter
    assert [row["decoder"] for row in rows] == [setting.name for setting in settings]
    assert all(set(KEYS.split()) <= row.keys() and row["family"] == family for row in rows)
    for row, setting in zip(rows, settings, strict=True):
        values = vars(setting.values).items()
        infinite = {
            name for name, value in values if isinstance(value, float) and math.isinf(value)
        }
        assert all(row["settings"][name] is None for name in infinite)
        # drafts change no token, and the stub fills masks in any order alike
        if family != "recurrent_depth":
            assert row["equals_greedy"] == 1.0


@pytest.mark.slow
def test_without_a_head_its_rivals_remain(tmp_path, capsys, monkeypatch):
    """Decoders that ask the model's head are left out, and that is said; those with the zero head
    stay.
    """
    family = FAMILIES["block_diffusion"]
    rows = tuple(s for s in TABLES[family.name] if s.baseline or type(s.decoder) is Residual)[:3]
    put_settings(monkeypatch, family.name, rows)
    config = dataclasses.replace(family.presets["test-sdar"], vocab_size=384, max_length=256)
    place = str(saved(tmp_path / "tiny", config, dataclasses.replace(token_spec(), **CANVAS)))
    monkeypatch.setattr(Model, "network", StubDenoiser(block=4, vocab_size=384, max_length=256))
    assert cli.main([*compared(place, data=tmp_path), "--problems", "1", "--json"]) == 0
    said = capsys.readouterr()
    told = [(row["decoder"], row["settings"].get("head")) for row in strict(said.out)]
    assert told == [("block", None), ("residual", "zero")]
    assert "has no head: decoders that ask one are left out" in said.err


@pytest.mark.slow
def test_families_share_one_table(folder, tmp_path, monkeypatch):
    """The first model's baseline is that of all rows; a row equals its own model's one by one."""
    stubs = {"recurrent_depth": STUB, "causal": StubCausal(vocab_size=384, max_length=256)}
    monkeypatch.setattr(Model, "network", property(lambda self: stubs[self.family]))
    monkeypatch.setattr(answers, "GROUP", 1)
    put_settings(monkeypatch, "recurrent_depth", small_settings()[:2])
    put_settings(monkeypatch, "causal", TABLES["causal"][:1])
    shape = FAMILIES["causal"].presets["test-causal"]
    shape = dataclasses.replace(shape, vocab_size=384, max_length=256)
    other, path = str(saved(tmp_path / "other", shape)), tmp_path / "rows.json"
    words = compared(other, folder, data=tmp_path, more=("--wide", "2", "--json", str(path)))
    for _ in range(2):
        assert cli.main(words) == 0
        rows = strict(path.read_text())
        assert [row["baseline"] for row in rows] == [True, False, False]
        path.write_text(json.dumps(rows[:2]))
    assert [row["equals_greedy"] == 1 for row in rows] == [True, False, True]
    assert [row["wide"]["batch"] for row in rows] == [2, 2, 2]


def test_all_are_the_bundled_models_that_answer_problems(capsys):
    names = _models("all")
    assert names[0] == "tiny-causal" and {*FAMILIES["block_diffusion"].bundled} < {*names}
    assert "no row of full_attention: no model is bundled" in capsys.readouterr().err


def test_a_family_stands_for_its_bundled_models():
    assert _models("causal") == FAMILIES["causal"].bundled and _models("a/folder") == ("a/folder",)


def test_a_family_without_bundled_models_asks_for_one(monkeypatch, capsys):
    none = dataclasses.replace(FAMILIES["causal"], bundled=())
    monkeypatch.setitem(FAMILIES, "causal", none)
    assert cli.main(["compare", "causal"]) == 1
    assert "no model of causal is bundled: --model takes a folder" in capsys.readouterr().err


def test_masked_diffusion_is_compared_elsewhere(tmp_path, capsys):
    place = lettered(tmp_path / "denoiser", "masked_diffusion")
    assert cli.main(["compare", place]) == 1
    assert "python -m experiments.masked_diffusion.compare_texts" in capsys.readouterr().err


class TestDemo:
    def test_every_family_one_by_one_and_in_parallel(self):
        """All families with bundled models are there, and each model and decoder suits the other."""
        bundled = {name for name, family in FAMILIES.items() if family.bundled}
        assert {name.replace(" ", "_") for name in demo.FAMILIES} == bundled
        for name, rows in demo.FAMILIES.items():
            own = FAMILIES[name.replace(" ", "_")]
            assert {model for model, _ in rows} <= {*own.bundled} and len(rows) == 2
            assert {type(setting.decoder) for _, setting in rows} <= {
                *map(type, own.decoders.values())
            }

    def test_the_table(self, folder, tmp_path, capsys, monkeypatch):
        denoiser = lettered(tmp_path / "denoiser", "masked_diffusion")
        judge = lettered(tmp_path / "judge", "causal")
        stubs = LETTERED | {"recurrent_depth": STUB}
        monkeypatch.setattr(Model, "network", property(lambda self: stubs[self.family]))
        one, wave = (demo.FAMILIES["recurrent depth"][i][1] for i in (0, 1))
        single, steps = (demo.FAMILIES["masked diffusion"][i][1] for i in (0, 1))
        words, texts = ((folder, one), (folder, wave)), ((denoiser, single), (denoiser, steps))
        monkeypatch.setattr(demo, "FAMILIES", {"recurrent depth": words, "masked diffusion": texts})
        monkeypatch.setattr(demo, "read_problems", lambda name: word_problems(2, steps=(2, 2)))
        for name, value in {
            "PROBLEMS": 2,
            "TEXTS": 3,
            "LENGTH": 8,
            "PASSES": 2,
            "JUDGE": judge,
        }.items():
            monkeypatch.setattr(demo, name, value)
        assert cli.main(["demo"]) == 0
        out, err = capsys.readouterr()
        lines = [line for line in out.splitlines() if "│" in line]
        assert len([line for line in lines if "1.00x" in line]) == 2  # one by one, once a family
        for piece in ("wavefront of 8", "0 of 2", "8 steps", "tokens a call: ", "ratio: "):
            assert piece in out
        assert "compiling" in err and "decoding" in err
