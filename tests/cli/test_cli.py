"""The command: output, exit codes, one sentence for each user error."""

import io

import pytest
from marks import over
from stub_table import STUB, put_settings, saved, small_settings

import paradec_jax as pd
from paradec_jax import cli
from paradec_jax.decode.machine.setting import Setting
from paradec_jax.store import Model

WAVE = "wavefront --inner-recurrence 2 --window 3 --exit-threshold 0.2"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("models") / "tiny", decoder=WAVE)


@pytest.fixture(autouse=True)
def settings(monkeypatch):
    decoder = pd.Wavefront(inner_recurrence=2, window=3)
    wave = Setting("wavefront", decoder, pd.Wavefront.Knobs(exit_threshold=0.2))
    put_settings(monkeypatch, "recurrent_depth", (*small_settings()[1:2], wave))
    monkeypatch.setattr(Model, "network", STUB)  # known answers, quickly compiled


def generate_arguments(folder, *more, decoder=None):
    named = [] if decoder is None else [decoder]
    return [
        "generate",
        *named,
        "Ana has 3 apples.",
        "--model",
        str(folder),
        "--max-new-tokens",
        "6",
        *more,
    ]


def test_generate_prints_text_on_stdout_and_counts_on_stderr(folder, capsys):
    assert cli.main(generate_arguments(folder)) == 0
    out, err = capsys.readouterr()
    wave = cli.generate.choose("recurrent_depth", WAVE)
    options = {"knobs": wave.knobs, "max_new_tokens": 6}
    expected = pd.generate(pd.load(folder), ["Ana has 3 apples."], wave.decoder, **options)
    assert out == expected.text[0] + "\n"
    assert "6 tokens in" in err and "recurrences a token" in err


@over(["wavefront", "autoregressive"], ["autoregressive"], "decoder")
def test_stream_in_a_pipe_is_the_plain_text(folder, capsys, decoder):
    cli.main(generate_arguments(folder, decoder=decoder))
    plain = capsys.readouterr().out
    assert cli.main(generate_arguments(folder, "--stream", decoder=decoder)) == 0
    assert capsys.readouterr().out == plain


def test_stream_on_a_terminal_shows_candidates_in_another_colour(folder, capsys, monkeypatch):
    console = cli.watch.Console
    monkeypatch.setattr(
        cli.watch,
        "Console",
        lambda **options: console(**options, force_terminal=True, color_system="standard"),
    )
    cli.main(generate_arguments(folder))
    text = capsys.readouterr().out.strip()
    assert cli.main(generate_arguments(folder, "--stream", "--delay", "0")) == 0
    out = capsys.readouterr().out
    assert "\x1b[36m" in out  # cyan
    assert "Ana has 3 apples." in out
    assert text.split("\n")[-1] in out


@pytest.mark.slow
def test_samples_and_stop_strings(folder, capsys):
    more = ["--samples", "2", "--temperature", "1.0", "--stop", "a", "--stop", "e"]
    assert cli.main(generate_arguments(folder, *more, decoder="autoregressive")) == 0
    out, err = capsys.readouterr()
    assert "sample 0" in err and "sample 1" in err
    assert "a" not in out and "e" not in out


def test_question_and_standard_input(folder, capsys, monkeypatch):
    seen = []

    def keep(model, prompts, decoder, **options):
        seen.extend(prompts)
        raise ValueError("enough")

    monkeypatch.setattr(cli.generate, "continuation_task", keep)
    monkeypatch.setattr("sys.stdin", type("In", (), {"read": lambda self: "Who? "})())
    for words in (["-", "--question"], ["Who?"]):
        assert cli.main(["generate", *words, "--model", str(folder)]) == 1
    assert seen == ["Question: Who?\nAnswer:\n", "Who?"]


TURNS = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


@pytest.mark.parametrize("more", [[], ["--stream"], ["--question"]])
def test_chat_answers_a_message_or_every_line(tmp_path, capsys, monkeypatch, more):
    folder = saved(tmp_path / "talker", chat_template=TURNS)
    options = f"--model {folder} --max-new-tokens 3 --chat --system Briefly.".split() + more
    model, wave = pd.load(folder), cli.generate.choose("recurrent_depth", None, {})
    messages, wanted = [{"role": "system", "content": "Briefly."}], []
    for line in ("Hi", "Why? "):
        words = cli.generate.PROMPT.format(question=line.strip()) if "--question" in more else line
        messages.append({"role": "user", "content": words})
        wanted += pd.generate(
            model, messages, wave.decoder, knobs=wave.knobs, max_new_tokens=3
        ).text
        messages.append({"role": "assistant", "content": wanted[-1]})
    assert wanted[0] != wanted[1]
    monkeypatch.setattr("sys.stdin", io.StringIO("Hi\n\n  \nWhy? \n"))
    for last, texts in (([], wanted), (["Hi"], wanted[:1])):
        assert cli.main(["generate", *options, *last]) == 0
        assert capsys.readouterr().out == "".join(text + "\n" for text in texts)


def test_options_of_a_decoder_appear_with_it_alone(folder, capsys, monkeypatch):
    chosen = []

    def keep(model, decoder, prompt, text):
        chosen.append(decoder)
        raise ValueError("enough")

    monkeypatch.setattr(cli.generate, "_task", keep)
    for decoder, options in (
        ("wavefront", ["--window", "2", "--no-warm-start"]),
        (None, ["--top-p", "0.5"]),
    ):
        assert cli.main(generate_arguments(folder, *options, decoder=decoder)) == 1
        assert "enough" in capsys.readouterr().err
    wave, usual = chosen
    assert (wave.window, wave.warm_start, wave.inner_recurrence) == (2, False, 4)
    assert (usual.window, usual.warm_start) == (3, True)
    for decoder, option in (
        ("adaptive", "--window"),
        ("lookahead", "--recurrence"),
        (None, "--window"),
    ):
        with pytest.raises(SystemExit) as exit_info:
            cli.main(generate_arguments(folder, option, "3", decoder=decoder))
        assert exit_info.value.code == 2
        assert "Unrecognized" in capsys.readouterr().err


def test_words_that_name_no_decoder_are_a_prompt():
    named = (
        ["wavefront", "x"],
        ["prompt_lookup", "x"],
        ["prompt-lookup", "x"],
        ["default", "wavefront"],
    )
    for words in (*named, ["--help"], []):
        assert cli.generate.with_decoder(words) == words
    for words in (["x"], ["--stream", "x"], ["-"]):
        assert cli.generate.with_decoder(words) == ["default", *words]


def test_json_takes_a_path_of_its_kind_alone():
    for after in ([], ["tiny-sdar"], ["--seed", "2"]):
        assert cli._arguments(["compare", "--json", *after]) == ["compare", "--json", "-", *after]
    for words in (["compare", "--json", "rows.json", "tiny-sdar"], ["compare", "--json", "-"]):
        assert cli._arguments(words) == words


def test_user_errors_are_one_sentence_and_exit_code_1(folder, capsys, tmp_path):
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "config.json").write_text('{"model_type": "gpt2"}')
    cases = [
        (["compare", str(foreign)], "model_type must be one of"),
        (["generate", "hi", "--model", str(foreign)], "mdlm, not 'gpt2'"),
        (["generate", "hi", "--model", str(tmp_path / "nowhere")], "there is no model"),
        (["compare", str(folder), "--problems", "0"], "problems must be at least 1, not 0"),
        (["compare", str(folder), "--timed", "0"], "timed must be at least 1, not 0"),
        (["compare", str(folder), "--data", "nowhere.jsonl"], "nowhere.jsonl"),
        (
            ["compare", str(folder), "--json", str(tmp_path / "no" / "rows.json")],
            "there is no folder",
        ),
        (generate_arguments(folder, "--temperature", "-1"), "temperature must be at least 0"),
        (
            generate_arguments(folder, decoder="lookahead"),
            "lookahead does not suit a model of family recurrent_depth",
        ),
        (
            generate_arguments(folder, "--stream", "--samples", "2"),
            "--stream shows one continuation",
        ),
        (generate_arguments(folder, "--chat"), "no chat template"),
        (generate_arguments(folder, "--chat", "--gaps"), "give one of them"),
        (generate_arguments(folder, "--system", "x"), "--system begins a conversation"),
        (["generate", "--chat", "--samples", "2"], "goes on from one answer"),
        (
            generate_arguments(folder, "--window", "0", decoder="wavefront"),
            "window must be at least 1",
        ),
        (generate_arguments(folder, "--max-new-tokens", "9999"), "more than the 256 positions"),
    ]
    for arguments, message in cases:
        assert cli.main(arguments) == 1, arguments
        out, err = capsys.readouterr()
        assert out == "" and err.startswith("paradec: ") and message in err
        assert err.count("\n") == 1 and "Traceback" not in err


def test_help(capsys):
    for arguments in (
        [],
        ["compare"],
        ["demo"],
        ["generate"],
        ["generate", "wavefront"],
        ["import"],
    ):
        with pytest.raises(SystemExit) as exit_info:
            cli.main([*arguments, "--help"])
        assert exit_info.value.code == 0
    out = capsys.readouterr().out
    for word in [
        "demo",
        "export",
        "--alignment",
        "--json",
        "prompt-lookup",
        "--stream",
        "--inner-recurrence",
    ]:
        assert word in out
