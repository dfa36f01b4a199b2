"""The script that scores a benchmark, on tiny models: files that are continued, decoders, chats, refusals."""

import dataclasses
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from benchmark_files import FUNCTIONS, SUMS, needs_linux, write
from recital import CONFIG, Recital, recite

from experiments.benchmarks import evaluate as script
from paradec_jax.config import CAUSAL_PRESETS
from paradec_jax.data import build_tokenizer, token_spec
from paradec_jax.evaluate import continuations as continued
from paradec_jax.families import init_params, parameter_shapes
from paradec_jax.store import Model, save


@dataclasses.dataclass(frozen=True)
class RecurrentRecital(Recital):
    """What recites has no latents, and says the same after any number of recurrences."""

    def at(self, recurrence):
        return self if recurrence is None else dataclasses.replace(self, recurrence=recurrence)

    def init_cache(self, keys, size, *, scale=1.0, states=None):
        return super().init_cache(keys, size)

    def latents(self, cache, positions):
        return jnp.zeros((*positions.shape, 1))

    def forward_from(self, params, inputs, positions, states, prefix=None, mask=None):
        return self.forward(params, inputs, positions, prefix, mask), states


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
        monkeypatch.setattr(Model, "network", RecurrentRecital((48,), max_length=256))

    def run(self, folder, tmp_path, *more, decoder="autoregressive"):
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
        assert header["settings"]["shots"] == 0 and header["settings"]["decoder"] == "autoregressive"
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

    def test_processes_share_the_items_and_the_last_merges(self, folder, tmp_path, capsys):
        path = write(tmp_path / "f.jsonl", SUMS)
        task = ["gsm8k", path, "--shots", "0", "--max-new-tokens", "4", "--rows", "2"]
        assert self.run(folder, tmp_path, *task, "--process", "1", "--processes", "2") == 0
        assert "Process 1 of 2 has done its items" in capsys.readouterr().out
        assert len(self.decoded) == 2 and "1,000 + 1" in self.decoded[0]  # the second item, and padding
        assert not (tmp_path / "out.jsonl").exists()
        assert self.run(folder, tmp_path, *task, "--process", "2", "--processes", "2") == 1
        assert "--process must be from 0 to 1" in capsys.readouterr().err
        assert self.run(folder, tmp_path, *task) == 0  # alone: what is missing
        assert "3 by budget" in capsys.readouterr().out and len(self.decoded) == 4
        _, *lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
        assert [line["id"] for line in lines] == ["gsm8k/0", "gsm8k/1", "gsm8k/2"]
        assert [file.name for file in tmp_path.iterdir() if "part" in file.name] == []

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
        monkeypatch.setattr(
            Model, "network", RecurrentRecital(recite(tokenizer, solution, start).script, start)
        )
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
            (["gsm8k", path, "--window", "4"], "--window is no option of autoregressive"),
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
    params = init_params(CAUSAL, jax.random.key(3))
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
            "autoregressive": (),
            "jacobi": ("--block", "4", "--running", "True", "--candidates", "3"),
            "multiblock": ("--block", "3", "--blocks", "3", "--pool", "2", "--spawn", "0"),
        }
        found, candidates = {}, {}
        for name, more in options.items():
            out = tmp_path / f"{name}.jsonl"
            chosen = ["--decoder", name] if name != "jacobi" else []  # the usual one
            assert self.run(causal_folder, out, *task, *chosen, *more) == 0, capsys.readouterr().err
            settings, found[name] = self.lines(out)
            assert settings["decoder"] == name and "chat_sha256" not in settings
            candidates[name] = settings["decoder_settings"].get("candidates")
        assert [line["text"] for line in found["jacobi"]] == [
            line["text"] for line in found["autoregressive"]
        ]
        assert [line["text"] for line in found["multiblock"]] == [
            line["text"] for line in found["autoregressive"]
        ]
        assert {line["network_calls"] for line in found["autoregressive"]} == {6}
        assert candidates == {"autoregressive": None, "jacobi": 3, "multiblock": None}

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
            (
                causal_folder,
                ["--decoder", "wavefront"],
                "of family causal; it takes one of autoregressive, jacobi",
            ),
            (
                folder,
                ["--decoder", "lookahead"],
                "of family recurrent_depth; it takes one of autoregressive, adaptive",
            ),
            (causal_folder, ["--recurrence", "2"], "whose layers are passed once"),
            (
                causal_folder,
                ["--decoder", "autoregressive", "--candidates", "2"],
                "--candidates is no option of autoregressive",
            ),
            (causal_folder, ["--chat", "--shots", "2"], "without solved examples"),
            (folder, ["--chat"], "needs a model with a chat template"),
        ]
        for model, more, message in cases:
            assert self.run(model, tmp_path / "out.jsonl", *task, *more) == 1, more
            err = capsys.readouterr().err
            assert err.startswith("evaluate: ") and message in err and err.count("\n") == 1
        assert not (tmp_path / "out.jsonl").exists()
