"""Continuations cut where the text ends, files of results, and the script that scores a benchmark with them."""

import dataclasses
import json
import sys

import jax
import numpy as np
import pytest
from test_benchmarks import FUNCTIONS, SUMS, TASKS, needs_linux, write
from test_generate import CONFIG, Recital, recite

import paradec_jax as pd
from experiments import evaluate as script
from paradec_jax.config import CAUSAL_PRESETS
from paradec_jax.data import build_tokenizer, token_spec
from paradec_jax.evaluate import continuations as continued
from paradec_jax.evaluate.benchmarks import gsm8k, instruct, mbpp
from paradec_jax.evaluate.benchmarks.items import Item
from paradec_jax.evaluate.continuations import before, continuations, cut
from paradec_jax.evaluate.options import DECODERS, choose
from paradec_jax.evaluate.results import Results, write_table
from paradec_jax.models import causal
from paradec_jax.models.recurrent_depth import parameter_shapes
from paradec_jax.store import Model, save
from paradec_jax.testing import StubNetwork

GREEDY = pd.AutoRegressive(greedy=True)


@pytest.fixture(scope="module")
def model():
    return Model(CONFIG, {}, token_spec(), build_tokenizer())


def on(model, network):
    """The model with another network."""
    copied = dataclasses.replace(model)
    copied.__dict__["network"] = network
    return copied


class TestContinuations:
    PROMPTS = ("Ana has 3 apples.", "Ben", "Cal and Dan have 2 pears.")

    def test_reasons_texts_and_counts(self, model):
        script = "10 apples"
        tokens = len(model.tokenizer.encode(script))
        prompt = "Ana"
        start = 1 + len(model.tokenizer.encode(prompt))
        network = recite(model.tokenizer, script, start)

        def one(**more):
            return next(continuations(on(model, network), [prompt], GREEDY, rows=1, **more))[0]

        ended, cut_short = one(max_new_tokens=20), one(max_new_tokens=2)
        assert (ended.text, ended.reason, len(ended.tokens)) == (script, "stop token", tokens + 1)
        assert ended.network_calls == tokens + 1 and ended.prompt_tokens == start
        assert cut_short.reason == "budget" and len(cut_short.tokens) == 2
        stopped = one(max_new_tokens=20, stop=("zzz", " app"))
        assert (stopped.text, stopped.reason) == ("10", "stop string")
        # Calls are counted up to the token that completes the stop string and no further.
        assert stopped.network_calls == len(stopped.tokens) <= tokens

    def test_batches_of_one_shape_do_not_change_a_row(self, model):
        network = StubNetwork(vocab_size=384, max_length=256)
        found = {}
        for rows in (2, 4):
            options = {"max_new_tokens": 5, "stop": ("e",), "rows": rows}
            batches = list(continuations(on(model, network), self.PROMPTS, GREEDY, **options))
            assert [len(batch) for batch in batches] == {2: [2, 1], 4: [3]}[rows]
            found[rows] = [dataclasses.replace(row, seconds=0.0) for batch in batches for row in batch]
        assert found[2] == found[4]

    def test_what_the_release_leaves_behind_is_cut(self, model):
        tokenizer, spec = model.tokenizer, model.token_spec
        words = tokenizer.encode(" 1 2 3")
        beyond = [*words, spec.stop[0], *words]  # tokens behind a stop token
        assert cut(tokenizer, spec, beyond, 20, ()) == (beyond[:4], " 1 2 3", "stop token")
        assert cut(tokenizer, spec, beyond, 2, ()) == (words[:2], " 1 2", "budget")
        assert cut(tokenizer, spec, words, 20, ("2",)) == (words, " 1 ", "stop string")
        assert before("a b c", ("c", "b")) == "a " and before("abc", ()) == "abc"

    def test_official_stays_within_the_budget(self, model):
        network = StubNetwork(vocab_size=384, max_length=256)
        official = pd.OfficialWavefront(width=3, inner_recurrence=4, headway=2, greedy=True)
        one = next(continuations(on(model, network), ["Ana"], official, max_new_tokens=3, rows=1))[0]
        expected = network.expected([1, *model.tokenizer.encode("Ana")], 3)
        assert list(one.tokens) == expected and one.text == model.tokenizer.decode(expected)

    def test_rows_below_one(self, model):
        with pytest.raises(ValueError, match="rows must be at least 1, not 0"):
            next(continuations(model, ["Ana"], GREEDY, max_new_tokens=1, rows=0))


class TestOptions:
    def test_each_decoder_takes_its_own(self):
        decoders = DECODERS["recurrent_depth"]
        decoder, knobs = choose("adaptive", decoders["adaptive"], options={"recurrence": 3, "top_p": 0.5})
        assert (decoder.max_recurrence, knobs.top_p, decoder.greedy) == (3, 0.5, True)
        decoder, knobs = choose("official", decoders["official"], options={"width": 9, "temperature": 0.2})
        assert (decoder.width, knobs.temperature, decoder.greedy) == (9, 0.2, False)
        sampled = pd.AutoRegressive.Knobs(temperature=1.0)
        assert not choose("static", decoders["static"], sampled)[0].greedy
        with pytest.raises(ValueError, match="--inner-recurrence is no option of --decoder static"):
            choose("static", decoders["static"], options={"inner_recurrence": 2})


class TestResults:
    SETTINGS = {"task": "gsm8k", "decoder_settings": {"width": 3}}  # noqa: RUF012

    def test_a_file_is_continued(self, tmp_path):
        path = tmp_path / "out.jsonl"
        Results(path, self.SETTINGS).add([{"id": "a", "text": "\u2028 1"}])
        with path.open("a") as file:
            file.write('{"id": "b", "te')  # killed while it wrote
        again = Results(path, self.SETTINGS)
        assert list(again.lines) == ["a"]
        again.add([{"id": "b", "text": "2"}])
        assert list(Results(path, self.SETTINGS).lines.values()) == [
            {"id": "a", "text": "\u2028 1"},
            {"id": "b", "text": "2"},
        ]

    def test_other_settings_and_other_files(self, tmp_path):
        path = tmp_path / "out.jsonl"
        Results(path, self.SETTINGS)
        written = path.read_bytes()
        with pytest.raises(ValueError, match="other settings: width is 4 and was 3; name another file"):
            Results(path, {"task": "gsm8k", "decoder_settings": {"width": 4}})
        assert path.read_bytes() == written
        path.write_text("a text\n")
        with pytest.raises(ValueError, match="is no file of results"):
            Results(path, self.SETTINGS)
        with pytest.raises(FileNotFoundError, match="there is no folder"):
            Results(tmp_path / "no" / "out.jsonl", self.SETTINGS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "tiny"
    params = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), parameter_shapes(CONFIG))
    save(path, Model(CONFIG, params, token_spec(), build_tokenizer()))
    return path


class TestScript:
    @pytest.fixture(autouse=True)
    def known_answers(self, monkeypatch):
        self.decoded = []
        generate = continued.generate

        def watch(model, prompts, *args, **options):
            self.decoded.extend(prompts)
            return generate(model, prompts, *args, **options)

        monkeypatch.setattr(continued, "generate", watch)
        monkeypatch.setattr(Model, "network", Recital((48,), max_length=256))

    def run(self, folder, tmp_path, *more, decoder="static"):
        arguments = ["--model", str(folder), "--out", str(tmp_path / "out.jsonl"), "--decoder", decoder]
        return script.main([*map(str, more), *arguments])

    def test_gsm8k_resumes_and_refuses(self, folder, tmp_path, capsys):
        path = write(tmp_path / "f.jsonl", SUMS)
        task = ["gsm8k", path, "--shots", "0", "--max-new-tokens", "4", "--rows", "2"]
        assert self.run(folder, tmp_path, *task, "--limit", "2") == 0
        assert len(self.decoded) == 2
        assert self.run(folder, tmp_path, *task) == 0
        assert len(self.decoded) == 4 and "3 - 7" in self.decoded[2]  # the third item, and padding
        header, *lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
        assert header["settings"]["shots"] == 0 and header["settings"]["decoder"] == "static"
        assert [line["id"] for line in lines] == ["gsm8k/0", "gsm8k/1", "gsm8k/2"]
        fields = (
            "prompt_tokens generated_tokens network_calls recurrences stop_reason text score seconds rows"
        )
        assert all(set(fields.split()) | {"id"} == line.keys() for line in lines)
        assert all(line["generated_tokens"] == line["network_calls"] == 4 for line in lines)
        out = capsys.readouterr().out
        assert "flexible" in out and "strict" in out and "3 by budget" in out and "1.00" in out
        assert self.run(folder, tmp_path, *task, "--recurrence", "2") == 1
        assert "recurrence is 2 and was None" in capsys.readouterr().err
        assert self.run(folder, tmp_path, *task, "--seed", "2") == 1
        assert len(self.decoded) == 4

    def test_long_prompts(self, folder, tmp_path, capsys):
        rows = [*SUMS, {"question": "Why? " * 60, "answer": "#### 1"}]
        task = ["gsm8k", write(tmp_path / "f.jsonl", rows), "--shots", "0", "--max-new-tokens", "4"]
        assert self.run(folder, tmp_path, *task) == 1
        err = capsys.readouterr().err
        assert "1 of 4 prompts do not fit" in err and "252 for a prompt" in err and err.count("\n") == 1
        assert not self.decoded and not (tmp_path / "out.jsonl").exists()
        assert self.run(folder, tmp_path, *task, "--skip-long") == 0
        assert "1 items with longer prompts were left out" in capsys.readouterr().out
        assert self.run(folder, tmp_path, *task[:2], "--shots", "8", "--skip-long") == 1
        assert "4 of 4 prompts do not fit" in capsys.readouterr().err

    @needs_linux
    def test_code_runs_only_when_asked_to(self, folder, tmp_path, capsys, monkeypatch):
        solution = "    return 2 * x\n#"
        tokenizer = build_tokenizer()
        start = 1 + len(tokenizer.encode(FUNCTIONS[0]["prompt"]))
        monkeypatch.setattr(Model, "network", recite(tokenizer, solution, start))
        path = write(tmp_path / "f.jsonl", FUNCTIONS[:1])
        task = ["humaneval", path, "--max-new-tokens", "40"]
        assert self.run(folder, tmp_path, *task) == 0
        out = capsys.readouterr().out
        assert "Nothing was run" in out and "not run" in out
        samples = [json.loads(x) for x in (tmp_path / "out.samples.jsonl").read_text().splitlines()]
        assert samples == [{"task_id": "Own/0", "completion": "    return 2 * x"}]
        assert json.loads((tmp_path / "out.jsonl").read_text().splitlines()[1])["score"] is None
        decoded = len(self.decoded)
        assert self.run(folder, tmp_path, *task, "--execute") == 0
        assert len(self.decoded) == decoded
        assert "100.0%" in capsys.readouterr().out
        assert json.loads((tmp_path / "out.jsonl").read_text().splitlines()[1])["score"]["passed"] is True

    def test_user_errors_are_one_sentence(self, folder, tmp_path, capsys):
        path = write(tmp_path / "f.jsonl", SUMS)
        cases = [
            (["gsm8k", tmp_path / "none.jsonl"], "there is no file"),
            (["gsm8k", path, "--execute"], "are not code"),
            (["gsm8k", path, "--seconds", "0", "--shots", "0", "--max-new-tokens", "4"], "--seconds must be"),
            (["gsm8k", path, "--limit", "0"], "--limit must be at least 1"),
            (["gsm8k", path, "--width", "4"], "--width is no option of --decoder static"),
            (
                ["gsm8k", path, "--rows", "0", "--shots", "0", "--max-new-tokens", "4"],
                "rows must be at least 1",
            ),
            (["mbpp", path], 'the field "task_id" is missing'),
            (["gsm8k", path, "--shots", "9"], "shots must be 0 to 8"),
        ]
        for arguments, message in cases:
            assert self.run(folder, tmp_path, *arguments) == 1, arguments
            err = capsys.readouterr().err
            assert err.startswith("evaluate: ") and message in err and err.count("\n") == 1
        assert not self.decoded


CAUSAL = dataclasses.replace(CAUSAL_PRESETS["test-causal"], vocab_size=384, max_length=256)
TEMPLATE = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}{{ '[assistant]\n' }}"


@pytest.fixture(scope="module")
def causal_folder(tmp_path_factory):
    """A causal model with random weights and a chat template."""
    path = tmp_path_factory.mktemp("models") / "causal"
    params = causal.init_params(CAUSAL, jax.random.key(3))
    save(path, Model(CAUSAL, params, token_spec(), build_tokenizer(), TEMPLATE))
    return path


class TestCausalModels:
    def run(self, folder, out, *more):
        return script.main([*map(str, more), "--model", str(folder), "--out", str(out)])

    def lines(self, out):
        header, *lines = [json.loads(line) for line in out.read_text().splitlines()]
        return header["settings"], lines

    def test_every_decoder_writes_the_same(self, causal_folder, tmp_path, capsys):
        path = write(tmp_path / "f.jsonl", SUMS)
        task = ["gsm8k", path, "--shots", "0", "--max-new-tokens", "6", "--limit", "2", "--rows", "2"]
        options = {
            "static": (),
            "jacobi": ("--block", "4", "--running", "True", "--candidate-rows", "3"),
            "multiblock": ("--block", "3", "--blocks", "3", "--pool", "2", "--spawn", "0"),
        }
        found, rows = {}, {}
        for name, more in options.items():
            out = tmp_path / f"{name}.jsonl"
            chosen = ["--decoder", name] if name != "jacobi" else []  # the usual one
            assert self.run(causal_folder, out, *task, *chosen, *more) == 0, capsys.readouterr().err
            settings, found[name] = self.lines(out)
            assert settings["decoder"] == name and "chat_sha256" not in settings
            rows[name] = settings["decoder_settings"].get("rows")
        assert [line["text"] for line in found["jacobi"]] == [line["text"] for line in found["static"]]
        assert [line["text"] for line in found["multiblock"]] == [line["text"] for line in found["static"]]
        assert {line["network_calls"] for line in found["static"]} == {6}
        assert rows == {"static": None, "jacobi": 3, "multiblock": 0}

    def test_messages_in_the_chat_template(self, causal_folder, tmp_path, monkeypatch):
        asked, answer = [], "Here:\n```python\nimport math\ndef double(x):\n    return 2 * x\n```\nDone."

        def known(model, prompts, *rest, stop, **options):
            asked.extend(prompts)
            assert stop == () and options["max_new_tokens"] == 20
            yield [continued.Continuation(answer, (5,), "stop token", 3, 2, 2, 0.1) for _ in prompts]

        monkeypatch.setattr(script, "continuations", known)
        path, out = write(tmp_path / "f.jsonl", FUNCTIONS[:1]), tmp_path / "out.jsonl"
        assert self.run(causal_folder, out, "humaneval", path, "--chat", "--max-new-tokens", "20") == 0
        (prompt,) = asked
        assert prompt.startswith("[user] Complete") and prompt.endswith("```\n[assistant]\n")
        assert FUNCTIONS[0]["prompt"].strip() in prompt
        settings, (line,) = self.lines(out)
        assert line["text"] == answer and settings["stop"] == [] and len(settings["chat_sha256"]) == 64
        (sample,) = [json.loads(x) for x in (tmp_path / "out.samples.jsonl").read_text().splitlines()]
        assert sample["completion"] == "\nimport math\ndef double(x):\n    return 2 * x\n"
        if sys.platform == "linux":
            judged = ["humaneval", path, "--chat", "--max-new-tokens", "20", "--execute"]
            assert self.run(causal_folder, out, *judged) == 0
            assert self.lines(out)[1][0]["score"]["passed"] is True and len(asked) == 1

    def test_user_errors_are_one_sentence(self, causal_folder, folder, tmp_path, capsys):
        task = ["gsm8k", write(tmp_path / "f.jsonl", SUMS), "--max-new-tokens", "4"]
        cases = [
            (causal_folder, ["--decoder", "wavefront"], "of family causal; it takes one of static, jacobi"),
            (folder, ["--decoder", "jacobi"], "of family recurrent_depth; it takes one of static, adaptive"),
            (causal_folder, ["--recurrence", "2"], "whose layers are passed once"),
            (
                causal_folder,
                ["--decoder", "static", "--candidate-rows", "2"],
                "--candidate-rows is no option of --decoder static",
            ),
            (causal_folder, ["--chat", "--shots", "2"], "without solved examples"),
            (folder, ["--chat"], "needs a model with a chat template"),
        ]
        for model, more, message in cases:
            assert self.run(model, tmp_path / "out.jsonl", *task, *more) == 1, more
            err = capsys.readouterr().err
            assert err.startswith("evaluate: ") and message in err and err.count("\n") == 1
        assert not (tmp_path / "out.jsonl").exists()


class TestInstruct:
    @pytest.mark.parametrize(
        ("text", "code"),
        [
            ("x = 1", "x = 1"),
            ("a\n```python\nx = 1\n```\n```python\ny\n```", "x = 1\n"),
            ("```bash\nls\n```\n```py\nx = 1\n```", "x = 1\n"),
            ("```\nx = 1\n", "x = 1\n"),  # cut by the budget
            ("```bash\nls\n```", "ls\n"),
        ],
    )
    def test_first_code(self, text, code):
        assert instruct.first_code(text) == code

    def test_boxed_numbers_reach_both_extractions(self):
        item = Item("gsm8k/0", "Q: What is 2 + 3?\nA:", (), "1,005")
        assert instruct.INSTRUCT["gsm8k"].message(item).startswith("What is 2 + 3?\n\nReason")
        judge = instruct.INSTRUCT["gsm8k"].judged
        right = gsm8k.score(item, judge("First \\boxed{7}, then \\boxed{\\$1005} of 3."))
        assert right.flexible and not right.strict
        plain = gsm8k.score(item, judge("So \\boxed{1,005} of 3."))
        assert plain.flexible and plain.strict
        assert judge("The answer is 4.") == "The answer is 4."

    def test_tasks_of_mbpp_lose_their_mark(self, tmp_path):
        item = mbpp.read(write(tmp_path / "f.jsonl", TASKS), shots=0).items[0]
        message = instruct.INSTRUCT["mbpp"].message(item)
        assert "[BEGIN]" not in message and "assert add(0) == 11" in message


def test_a_table_is_json_with_csv_beside_it(tmp_path):
    path = tmp_path / "new" / "table.json"
    rows = [{"a": 1, "of": [1, 2]}, {"a": 2.5, "b": "x, y"}]
    write_table(path, {"rows": rows}, rows)
    assert json.loads(path.read_text()) == {"rows": rows}
    assert path.with_suffix(".csv").read_text() == 'a,b\n1,\n2.5,"x, y"\n'
    with pytest.raises(TypeError):
        write_table(path, {"rows": object()}, [])
    assert json.loads(path.read_text()) == {"rows": rows} and len(list(path.parent.iterdir())) == 2
