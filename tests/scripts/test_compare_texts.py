"""The table of drawn texts: its rows from stubs with known answers, its files, its command, what it
refuses.
"""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
from stub_table import ALPHABET, LETTERED, PRESETS, SPECS, lettered, strict
from stubs import StubCausal

import paradec_jax as pd
from experiments.masked_diffusion import compare_texts as command
from experiments.masked_diffusion.compare_texts import (
    ONE_BY_ONE,
    Options,
    compare_texts,
)
from experiments.masked_diffusion.drawing import TEXT_ROWS, draw
from experiments.masked_diffusion.judge import TextJudge, judge_ids, judge_texts
from experiments.masked_diffusion.text_measures import reverse_perplexity, variety
from paradec_jax.data.text import character_tokenizer
from paradec_jax.decode.machine.setting import Setting
from paradec_jax.evaluate.cases import Source
from paradec_jax.families import FAMILIES, choose
from paradec_jax.store import Model

REAL = "abc def ghi " * 9
LENGTH, SAMPLES = 8, 6
SETTINGS = tuple(
    Setting("masked", pd.Masked(), pd.Masked.Knobs(steps=steps, temperature=temperature))
    for steps, temperature in ((1, 1.0), (64, 1.0), (64, 0.0))
)
RIVAL = choose("causal", ONE_BY_ONE)


def model_of(family, characters=ALPHABET):
    config = dataclasses.replace(
        FAMILIES[family].presets[PRESETS[family]], vocab_size=11, max_length=16
    )
    model = Model(config, {}, SPECS[family], character_tokenizer(characters))
    model.__dict__["network"] = LETTERED[family]
    return model


@pytest.fixture(scope="module")
def sources():
    denoiser = model_of("masked_diffusion")
    drawn = [Source("teacher", denoiser, setting) for setting in SETTINGS]
    return [*drawn, Source("rival", model_of("causal"), RIVAL)]


@pytest.fixture(scope="module")
def compared(sources):
    stages = []

    def report(stage, units):
        stages.append((stage, units))
        return stages.append

    held_out = sources[0].model.tokenizer.encode_batch([REAL, "ab"])
    options = {"length": LENGTH, "samples": SAMPLES, "report": report}
    rows, texts = compare_texts(sources, model_of("causal"), "judge", held_out, **options)
    assert stages == [("drawing texts", 4), 1, 1, 1, 1]
    return SimpleNamespace(rows=rows, texts=texts)


class TestDrawing:
    def test_calls_and_lengths(self, sources):
        drawn = [draw(source, SAMPLES, LENGTH, rows=4) for source in sources]
        (once, few), (many, some), (greedy, _), (rival, each) = drawn
        for ids, row in drawn:
            assert [len(text) for text in ids] == [LENGTH] * SAMPLES
            assert row["batch"] == 3  # two equal batches
            assert row["seconds_per_sample"] > 0 and row["compile_seconds"] >= 0
        assert (few["network_calls"], each["network_calls"]) == (1, LENGTH)
        assert 1 < some["network_calls"] <= LENGTH
        assert greedy == [LETTERED["masked_diffusion"].expected([None] * LENGTH)] * SAMPLES
        assert len(set(map(tuple, many))) > 1 and len(once) == len(rival)


class TestRows:
    def test_measures_are_those_of_the_texts(self, sources, compared):
        ids, _ = draw(sources[1], SAMPLES, LENGTH)
        row, tokenizer = compared.rows[1], sources[0].model.tokenizer
        judged = judge_ids(model_of("causal"), ids, begin=True, batch=TEXT_ROWS)
        assert row["judge_perplexity"] == judged.perplexity and row["interval"] == list(
            judged.interval
        )
        varied = variety(ids)
        assert varied.items() <= row.items()
        real = [tokenizer.encode(REAL), tokenizer.encode("ab")]
        assert row["reverse_perplexity"] == reverse_perplexity(ids, real, 11)
        assert (row["judge_reads"], row["judge_begin_of_text"], row["judge_cut"]) == (
            "ids",
            True,
            0,
        )
        assert compared.texts[1] == [tokenizer.decode(text, skip_special=True) for text in ids]
        assert row["tokens"] == row["reverse_fitted_tokens"] == SAMPLES * LENGTH

    def test_real_text(self, compared):
        row, texts = compared.rows[-1], compared.texts[-1]
        assert len(texts) == SAMPLES and all(len(text) == LENGTH and text in REAL for text in texts)
        for name in ("decoder", "steps", "network_calls", "seconds_per_sample", "device"):
            assert row[name] is None
        assert row["reverse_fitted_tokens"] == SAMPLES * LENGTH // 2
        halves = [[list(map(ALPHABET.index, text)) for text in texts[i::2]] for i in (0, 1)]
        both = [reverse_perplexity(*pair, 11) for pair in (halves, halves[::-1])]
        assert row["reverse_perplexity"] == pytest.approx(np.sqrt(np.prod(both)))

    def test_a_judge_with_another_tokenizer_reads_the_texts(self, sources):
        judge = model_of("causal", "abcdefghi ."[::-1])
        judge.__dict__["network"] = StubCausal(vocab_size=12, max_length=16)
        tokenizer = sources[0].model.tokenizer
        ids, _ = draw(sources[1], SAMPLES, LENGTH)
        measured = TextJudge(judge, "judge", tokenizer, 12, (), 8)
        row = measured.measures(ids) | measured.reverse(ids)
        texts = [tokenizer.decode(one).strip() for one in ids]
        wanted = judge_texts(judge, texts, definition="sdtt")
        assert row["judge_perplexity"] == wanted.perplexity and row["judge_reads"] == "texts"
        assert row["reverse_perplexity"] is None and row["reverse_order"] is None

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"samples": 0}, "samples must be at least 1, not 0"),
            ({"length": 3}, "length must be at least 4, not 3"),
            ({"held_out": [[1, 2, 3]]}, "hold no piece of 8 tokens"),
            (
                {"held_out": [[1] * 8, [10] * 8]},
                "real texts hold characters that the models do not know",
            ),
            ({"length": 16}, "more than the 16 positions"),
        ],
    )
    def test_refusals(self, sources, options, message):
        given = {"length": LENGTH, "samples": SAMPLES, **options}
        with pytest.raises(ValueError, match=message):
            compare_texts(sources, model_of("causal"), "judge", **given)

    def test_another_tokenizer_is_refused(self, sources):
        other = Source("other", model_of("masked_diffusion", "0123456789"), SETTINGS[0])
        with pytest.raises(ValueError, match="other has another tokenizer than teacher"):
            compare_texts(
                [sources[0], other], model_of("causal"), "judge", length=LENGTH, samples=1
            )


class TestCommand:
    @pytest.fixture
    def options(self, tmp_path, monkeypatch):
        """A denoiser and a causal model, which is the judge too, with a small table."""
        denoiser, causal = (
            lettered(tmp_path / family, family) for family in ("masked_diffusion", "causal")
        )
        monkeypatch.setattr(Model, "network", property(lambda self: LETTERED[self.family]))
        monkeypatch.setattr(command, "STEPS", ("masked --steps 1", "masked --steps 64"))
        monkeypatch.setattr(command, "TEMPERED", ("masked --steps 64 --temperature 0",))
        (tmp_path / "real.txt").write_text("abc def ghi " * 90)
        return Options((denoiser, causal), causal, tmp_path / "real.txt", samples=3)

    def test_rows_and_texts(self, options, tmp_path, capsys):
        path, texts = tmp_path / "rows.json", tmp_path / "texts"
        command.main(dataclasses.replace(options, json=str(path), texts=texts))
        rows = strict(path.read_text())
        assert [row["model"] for row in rows] == ["masked_diffusion"] * 3 + ["causal", "real text"]
        assert [row["temperature"] for row in rows] == [1, 1, 0, 1, None]
        assert {row["length"] for row in rows} == {15}, (
            "begin-of-text takes a position of the causal model"
        )
        assert {row["judge"] for row in rows} == {"causal"} and {row["seed"] for row in rows} == {1}
        assert sorted(file.name for file in texts.iterdir()) == [row["texts"] for row in rows]
        with pytest.raises(ValueError, match="--texts names a new folder"):
            command.main(dataclasses.replace(options, texts=texts))
