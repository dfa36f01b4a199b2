"""Chat templates: what those of releases need, one clear error for each failure, and a sandbox that
holds.
"""

import dataclasses
import json
import re
from pathlib import Path

import jax
import numpy as np
import pytest
from marks import slow
from recital import CONFIG, Recital
from small_tokenizers import BOS, END, EOS, byte_level

import paradec_jax as pd
from paradec_jax import store
from paradec_jax.cli import main
from paradec_jax.config import CAUSAL_PRESETS, TokenSpec
from paradec_jax.disk import folders
from paradec_jax.families import parameter_shapes
from paradec_jax.generate import Task, continuation_task
from paradec_jax.text import chat

# Of the form that Qwen2.5 has: a system message of its own, tools as JSON, results of tools in the
# user's turn.
TEMPLATE = """\
{%- set own = messages[0]['role'] == 'system' %}
{{- '<|im_start|>system\\n' + (messages[0]['content'] if own else 'Be of help.') }}
{%- if tools %}
    {{- '\\n<tools>' }}
    {%- for tool in tools %}
        {{- '\\n' }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- '\\n</tools>' }}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- for message in (messages[1:] if own else messages) %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user\\n<result>' + message.content + '</result><|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
USER = {"role": "user", "content": "Two and two?"}


class TestRender:
    @pytest.mark.parametrize(
        ("template", "variables", "want"),
        [
            (
                "{{ bos_token }}{{ messages[0].role }}{{ eos_token }}",
                {"bos_token": "<s>"},
                "<s>user",
            ),
            ("{% if tools is none and documents is none %}none{% endif %}", {}, "none"),
            (
                "{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}",
                {},
                "01",
            ),
            ("a{% generation %}b{{ messages|length }}{% endgeneration %}c", {}, "ab1c"),
            ("  {% if true %}\n  x\n  {% endif %}\n", {}, "  x\n"),
            ("{{ messages | tojson(indent=1) }}", {}, json.dumps([USER], indent=1)),
            ("{{ strftime_now('%d') }}", {"strftime_now": lambda form: form}, "%d"),
            ("{% set n = namespace(k=1) %}{% set n.k = 2 %}{{ n.k }}", {}, "2"),
        ],
    )
    def test_what_templates_expect(self, template, variables, want):
        assert chat.render(template, [USER], **variables) == want

    def test_today(self):
        assert re.fullmatch(
            r"\d{4}-\d\d-\d\d", chat.render("{{ strftime_now('%Y-%m-%d') }}", [USER])
        )


class TestErrors:
    @pytest.mark.parametrize(
        ("template", "message"),
        [
            ("{% if %}", r"is no Jinja: .*\(line 1\)"),
            ("\n{{ messages | unheard_of }}", r"is no Jinja: .*unheard_of.*\(line 2\)"),
            (
                "{{ raise_exception('roles must alternate') }}",
                "refuses these messages: roles must alternate",
            ),
            ("{{ messages[0].content + 1 }}", "the chat template fails: TypeError"),
            ("{{ messages[7].content.text }}", "the chat template fails: UndefinedError"),
            (
                "{% for i in range(10000000) %}{% endfor %}",
                "the chat template fails: OverflowError",
            ),
        ],
    )
    def test_templates(self, template, message):
        with pytest.raises(ValueError, match=message):
            chat.render(template, [USER])

    @pytest.mark.parametrize("template", ["{% if %}", "{{ 'a", "{{ " + "(" * 5000])
    def test_what_does_not_parse(self, template):
        for check in (chat.check, chat.reads):
            with pytest.raises(ValueError, match="chat template"):
                check(template)

    def test_a_check_computes_nothing(self):
        chat.check("{{ 9 ** 9 ** 9 }}{{ raise_exception('no') }}")

    @pytest.mark.parametrize(
        ("messages", "message"),
        [
            ([], "at least one message"),
            ("hello", "at least one message, not 'hello'"),
            ([USER, "hello"], "message 1 must be an object with a role, not 'hello'"),
            ([{"role": 3}], "message 0 must be an object with a role"),
        ],
    )
    def test_messages(self, messages, message):
        with pytest.raises(ValueError, match=message):
            chat.render(TEMPLATE, messages)

    @pytest.mark.parametrize(
        "template",
        [
            "{{ ''.__class__.__mro__[1].__subclasses__() }}",
            "{{ raise_exception.__globals__['jinja2'] }}",
            "{{ messages.append({'role': 'user'}) }}",
        ],
    )
    def test_the_sandbox_holds(self, template):
        messages = [dict(USER)]
        with pytest.raises(
            ValueError, match=r"sandbox forbids|the chat template fails: UndefinedError"
        ):
            chat.render(template, messages)
        assert messages == [USER]


@pytest.fixture
def exported(tmp_path) -> Path:
    """A Hugging Face folder without a template."""
    config = CAUSAL_PRESETS["test-causal"]
    params = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), parameter_shapes(config))
    store.save(tmp_path / "model", store.Model(config, params, TokenSpec()))
    assert main(["export", str(tmp_path / "model"), str(tmp_path / "source")]) == 0
    return tmp_path / "source"


SEVERAL = [{"name": "rag", "template": "x"}, {"name": "default", "template": "y\r\nz"}]


class TestFolders:
    def imported(self, source: Path, target: Path) -> str | None:
        assert main(["import", str(source), str(target)]) == 0
        return store.load(target).chat_template

    @pytest.mark.parametrize(
        ("given", "want"),
        [(None, None), (TEMPLATE, TEMPLATE), (SEVERAL, "y\r\nz"), (SEVERAL[:1], "x")],
    )
    def test_template_travels_with_the_model(self, exported, tmp_path, given, want):
        (exported / "tokenizer_config.json").write_text(json.dumps({"chat_template": given}))
        assert self.imported(exported, tmp_path / "a") == want
        assert main(["export", str(tmp_path / "a"), str(tmp_path / "again")]) == 0
        assert self.imported(tmp_path / "again", tmp_path / "b") == want
        (exported / folders.CHAT_TEMPLATE).write_text("of its own")
        assert self.imported(exported, tmp_path / "c") == "of its own"

    def test_templates_that_are_wrong(self, exported, tmp_path, capsys):
        others = [{"name": "rag", "template": "x"}, {"name": "tool_use", "template": "y"}]
        for value, message in (
            (others, "no chat template called default, only rag, tool_use"),
            (5, "chat_template must be a text or a list"),
            ([{"name": "a"}], "chat_template must be a text or a list"),
        ):
            (exported / "tokenizer_config.json").write_text(json.dumps({"chat_template": value}))
            assert main(["import", str(exported), str(tmp_path / "a")]) == 1
            assert message in capsys.readouterr().err and not (tmp_path / "a").exists()
        (tmp_path / "model" / folders.CHAT_TEMPLATE).write_bytes(b"\xff")
        with pytest.raises(store.StoreError, match="codec can't decode byte 0xff"):
            store.load(tmp_path / "model")


TURNS = (
    "{% for m in messages %}{{ m.role }}: {{ m.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def speaker(template: str, answer: str = "") -> tuple[store.Model, pd.AutoRegressive]:
    """A model whose stop token is not the one that ends a turn, and a decoder that gives USER that
    answer.
    """
    model = store.Model(CONFIG, {}, TokenSpec(bos=BOS, stop=(EOS,)), byte_level(), template)
    (text,), _ = chat.as_prompts(model, [[USER]])
    script = byte_level().encode(answer + "<|im_end|>" + "a" * 99)
    return model, pd.AutoRegressive(Recital(tuple(script), len(byte_level().encode(text))))


class TestAnswers:
    @pytest.mark.parametrize(
        ("template", "end"),
        [
            (TURNS, END),
            (TURNS.replace("<|im_end|>", " {{ eos_token }}"), EOS),  # by name, after a blank
            ("{% for m in messages %}<s>{{ m.content }}\n{% endfor %}", None),
            ("{{ messages | length }}</s>", None),  # the words are not in it
        ],
    )
    def test_the_end_of_a_turn(self, template, end):
        model, _ = speaker(template)
        for messages in ([USER], [USER, {"role": "assistant", "content": "<s>So"}]):
            assert chat.turn_end(model, messages) == end

    @pytest.mark.parametrize("begin", ["", "{{ bos_token }}", "<s>"])
    def test_a_conversation_is_the_template_s_text_to_the_token(self, begin):
        model, decoder = speaker(begin + TURNS, "ab ba")
        task = continuation_task(model, [USER], decoder, max_new_tokens=8)
        out, text = (
            task.run(),
            begin.replace("{{ bos_token }}", "<s>") + "user: Two and two?<|im_end|>\nassistant: ",
        )
        assert task.prompts == [model.tokenizer.encode(text)]
        assert task.prompts[0].count(BOS) == bool(begin)
        assert (out.text, out.reasons, out.tokens[0][-1]) == (["ab ba"], [pd.Reason.STOP], END)
        both = pd.generate(model, [[USER], [USER]], decoder, max_new_tokens=8, stop_strings=["ba"])
        assert both.text == ["ab "] * 2
        assert pd.generate(model, [text], decoder, max_new_tokens=8).reasons == [pd.Reason.BUDGET]

    def test_a_conversation_is_drawn_as_the_model_s_files_say(self, monkeypatch, capsys):
        seen, (model, decoder) = [], speaker(TURNS)
        monkeypatch.setattr(
            Task, "run", lambda task, *given: seen.append((given[0], task.decoder.top_p_rule))
        )
        monkeypatch.setattr(pd.Model, "network", decoder.network)
        model = dataclasses.replace(
            model, sampling={"temperature": 0.6, "penalty": 1.1}, decoder="jacobi"
        )
        for prompts, of, knobs in (
            ([[USER]], None, None),
            ([USER], decoder, None),
            (["user"], decoder, None),
            ([USER], decoder, decoder.Knobs()),
            ([USER], dataclasses.replace(decoder, greedy=True), None),
        ):
            pd.generate(model, prompts, of, knobs=knobs, max_new_tokens=1)
        drawn = [kind.Knobs(temperature=0.6) for kind in (pd.Jacobi, decoder)]
        keeps = ["keep-renormalised"] * 2 + ["keep"] * 3
        assert seen == list(zip([*drawn, None, decoder.Knobs(), None], keeps, strict=True))
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 2 and lines[0].endswith(
            "files: temperature 0.6, penalty 1.1 (not applied)"
        )

    def test_a_growing_conversation_meets_few_sizes(self):
        model, decoder = speaker(TURNS)
        talk = [USER, {"role": "assistant", "content": "4"}] * 7
        tasks = [
            continuation_task(model, talk[:n], decoder, max_new_tokens=1) for n in range(1, 14, 2)
        ]
        assert [task.request.tokens.shape[1] for task in tasks] == [32, 64, 128, 256, 256, 256, 256]

    @pytest.mark.parametrize("messages", [[[]], [USER, "x"], [[USER], "x"]])
    def test_other_things_than_messages(self, messages):
        model, decoder = speaker(TURNS)
        with pytest.raises(ValueError, match="message"):
            pd.generate(model, messages, decoder)


BOMBS = [  # programs without end, or of more memory than there is; those of one kind are slow
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    slow(
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}"
    ),
    slow(
        "{% set n = namespace(a=[1]) %}{% for i in range(60) %}{% set n.a = [n.a, n.a] %}{% endfor %}{{ n.a }}"
    ),
    "{{ 9 ** (9 ** 9) }}",
    "{{ '%2000000000d' | format(1) }}",
    slow(
        "{% set n = namespace(a='a') %}{% for i in range(60) %}{% set n.a = n.a ~ n.a %}{% endfor %}"
    ),
    "{{ messages | tojson(indent=10**9) }}",
    "{% for i in range(99999) %}{{ 'a' * 1000 }}{% endfor %}",
]


@pytest.mark.parametrize("template", BOMBS)
def test_programs_without_end_are_ended(template):
    chat.check(template)  # which runs nothing
    with pytest.raises(
        ValueError, match=r"the chat template (takes too much time or mem|makes a text of more)"
    ):
        chat.render(template, [USER])
    assert chat.render(TEMPLATE, [USER]).endswith("assistant\n")  # the next one is made


def test_a_template_is_not_too_long():
    with pytest.raises(ValueError, match="must have at most 100,000 characters, not 100,001"):
        chat.check("a" * 100_001)
