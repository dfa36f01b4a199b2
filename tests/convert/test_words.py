"""Tokenizer files of Hugging Face folders: what a text begins with, and special tokens by name."""

import dataclasses
import json
import re
from pathlib import Path

import pytest
import tokenizers
from exports import edit, exported, fails, imported, json_in, make_model, rows
from marks import over, peers
from small_tokenizers import KINDS
from tokenizers import models, pre_tokenizers, processors

from paradec_jax import store
from paradec_jax.config import TokenSpec
from paradec_jax.convert.engine import ConvertError
from paradec_jax.convert.words import begin_of_text
from paradec_jax.text import chat
from paradec_jax.text.tokenizer import Tokenizer

SPECIAL = ("<unk>", "<s>", "</s>", "<pad>")
BEGIN, BOTH = "<s> $A", "<s> $A </s>"


def words(post: str = "") -> Tokenizer:
    """Letters, split at blanks; with a post-processor of that template, after one of "bytes"."""
    names, template = [*SPECIAL, *"abcdefgh"], post.removeprefix("bytes").strip()
    ids = {word: i for i, word in enumerate(names)}
    backend = tokenizers.Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(list(SPECIAL))
    steps = [processors.ByteLevel(trim_offsets=False)] if "bytes" in post else []
    if template:
        special = [(text, ids[text]) for text in SPECIAL if text in template]
        steps.append(processors.TemplateProcessing(template, special_tokens=special))
    if steps:
        backend.post_processor = steps[0] if len(steps) == 1 else processors.Sequence(steps)
    return Tokenizer(backend)


@pytest.fixture
def folder(tmp_path) -> Path:
    """A model folder without a tokenizer, and what is exported of it."""
    exported(
        dataclasses.replace(make_model("qwen2"), token_spec=TokenSpec(stop=(2,), pad=3)), tmp_path
    )
    return tmp_path


def written(source: Path, tokenizer: Tokenizer | None, **config) -> Path:
    """The folder with that tokenizer and these fields of tokenizer_config.json alone."""
    if tokenizer is not None:
        tokenizer.save(source / "tokenizer.json")
    (source / "tokenizer_config.json").write_text(json.dumps(config))
    return source


class TestBeginOfText:
    @rows("begin", "post", "config", "named", "outcome")
    def test_by_whichever_file_tells_of_it(self, tmp_path, post, config, named, outcome):
        source = written(tmp_path, words(post), **config)
        if outcome in ("", 1):
            assert begin_of_text(source, named) == (outcome or None)
            return
        with pytest.raises(ConvertError, match=outcome):
            begin_of_text(source, named)

    def test_a_tokenizer_from_elsewhere_tells_of_it_too(self, folder):
        edit(folder / "exported" / "config.json", bos_token_id=1)
        words(BEGIN).save(folder / "other.json")
        (folder / "exported" / "tokenizer_config.json").unlink()
        model = imported(folder / "exported", "--tokenizer", str(folder / "other.json"))
        assert model.token_spec.bos == 1

    @over([1, None], argument="bos")
    @over(["", BEGIN, BOTH, "bytes", f"bytes {BOTH}"], argument="post")
    def test_an_exported_tokenizer_gives_the_ids_that_the_model_reads(self, tmp_path, post, bos):
        given = {"token_spec": TokenSpec(bos, (2,)), "tokenizer": words(post)}
        model = dataclasses.replace(make_model("qwen2"), **given)
        out = exported(model, tmp_path)
        backend = tokenizers.Tokenizer.from_file(str(out / "tokenizer.json"))
        begin = [] if bos is None else [bos]
        assert backend.encode("a b").ids == [*begin, 4, 5]
        steps = json.loads(backend.to_str())["post_processor"]
        assert ("ByteLevel" in json.dumps(steps)) == ("bytes" in post)
        assert imported(out).token_spec == model.token_spec

    @over(KINDS, argument="kind")
    def test_every_kind_of_tokenizer_begins_its_texts(self, tmp_path, kind):
        own = KINDS[kind]()
        model = make_model("qwen2", vocab_size=512)
        out = exported(
            dataclasses.replace(model, token_spec=TokenSpec(1, (2,)), tokenizer=own), tmp_path
        )
        backend = tokenizers.Tokenizer.from_file(str(out / "tokenizer.json"))
        assert backend.encode("a b").ids == [1, *own.encode("a b")]

    def test_a_begin_of_text_that_is_no_token(self, tmp_path, capsys):
        model = dataclasses.replace(
            make_model("qwen2"), token_spec=TokenSpec(bos=20), tokenizer=words()
        )
        store.save(tmp_path / "model", model)
        assert "the begin-of-text token 20 is none" in fails(capsys, "export", tmp_path / "model")


# Of the forms that Llama-2, Mistral, Zephyr and TinyLlama have.
TEMPLATES = {
    "llama-2": (
        "{% if messages[0]['role'] == 'system' %}"
        "{% set rest = messages[1:] %}{% set system = messages[0]['content'] %}"
        "{% else %}{% set rest = messages %}{% set system = false %}{% endif %}"
        "{% for message in rest %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must take turns') }}{% endif %}"
        "{% if loop.index0 == 0 and system != false %}"
        "{% set content = '<<SYS>>\\n' + system + '\\n<</SYS>>\\n\\n' + message['content'] %}"
        "{% else %}{% set content = message['content'] %}{% endif %}"
        "{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"
        "{% elif message['role'] == 'assistant' %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}"
        "{% endfor %}",
        "<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\na b [/INST]",
    ),
    "mistral": (
        "{%- set state = namespace(index=0) %}{%- set today = strftime_now('%Y') %}{{- bos_token }}"
        "{%- for message in messages if message.role != 'system' %}{%- set state.index = state.index + 1 %}"
        "{{- '[INST] ' ~ (message | tojson if today is none else message.content) ~ '[/INST]' }}"
        "{%- if tools is not none and tools %}{{- tools | tojson }}{%- endif %}{%- endfor %}",
        "<s>[INST] a b[/INST]",
    ),
    "zephyr": (
        "{% for message in messages %}\n{% if message['role'] == 'user' %}\n"
        "{{ '<|user|>\\n' + message['content'] + eos_token }}\n{% elif message['role'] == 'system' %}\n"
        "{{ '<|system|>\\n' + message['content'] + eos_token }}\n{% endif %}\n"
        "{% if loop.last and add_generation_prompt %}\n{{ '<|assistant|>' }}\n{% endif %}\n{% endfor %}",
        "<|system|>\nBe brief.</s>\n<|user|>\na b</s>\n<|assistant|>\n",
    ),
}
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "a b"}]


class TestSpecialTokens:
    @over(TEMPLATES)
    @over(["texts", "objects", "map", "ids"], argument="told")
    def test_templates_know_them_after_an_import(self, folder, name, told):
        template, want = TEMPLATES[name]
        texts = {"bos_token": "<s>", "eos_token": "</s>"}
        objects = {key: {"content": text, "lstrip": False} for key, text in texts.items()}
        config = {"texts": texts, "objects": objects}.get(told, {})
        source = written(folder / "exported", words(BEGIN), chat_template=template, **config)
        if told == "map":
            (source / "special_tokens_map.json").write_text(json.dumps(texts | {"pad_token": None}))
        model = imported(source)
        assert model.chat_template == template and chat.conversation(model, MESSAGES) == want
        assert model.tokenizer is not None
        ids = model.tokenizer.begun(model.tokenizer.encode(want), model.token_spec.bos)
        assert ids[0] == 1 and ids.count(1) == 1

    def test_those_that_no_id_tells_of_travel_with_the_model(self, folder):
        named = {"unk_token": "<unk>", "image_token": {"content": "<i>"}, "sep_token": None}
        model = imported(written(folder / "exported", words(), **named))
        own = {"unk_token": "<unk>", "image_token": "<i>"}
        assert model.special_tokens == own
        assert chat.special_tokens(model) == {**own, "eos_token": "</s>", "pad_token": "<pad>"}
        out = exported(model, folder / "out")
        config = json_in(out / "tokenizer_config.json")
        found = {name: text for name, text in config.items() if name.endswith("k_token")}
        assert found == {"unk_token": "<unk>"}
        assert config["eos_token"] == "</s>" and "image_token" not in config

    @over(
        [
            (
                {"bos_token": 5},
                r"bos_token of .*tokenizer_config\.json must be a text or an object",
            ),
            (
                {"added_tokens_decoder": {"1": {"content": "<pad>"}}},
                r"token 1 is '<pad>' in .*tokenizer_config\.json .*, but '<s>' in .*tokenizer\.json",
            ),
        ],
        argument="config, message",
    )
    def test_files_that_contradict_each_other(self, folder, refused, config, message):
        source = written(folder / "exported", words(), **config)
        assert re.search(message, refused(source))

    def test_a_model_without_a_template(self):
        with pytest.raises(ValueError, match="the model has no chat template"):
            chat.conversation(make_model(), MESSAGES)


@peers("torch", "transformers")
@over(TEMPLATES)
@over(["llama", "byte level"], argument="kind")
def test_transformers_writes_the_same_conversation(name, kind, tmp_path):
    import transformers

    # Of type llama: transformers splits texts by Qwen2's rules whatever the tokenizer beside a
    # model of type qwen2.
    template = TEMPLATES[name][0]
    model = dataclasses.replace(
        make_model("llama", vocab_size=512),
        token_spec=TokenSpec(1, (2,)),
        tokenizer=KINDS[kind](),
        chat_template=template,
    )
    read = transformers.AutoTokenizer.from_pretrained(str(exported(model, tmp_path)))
    text = read.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    assert text == chat.conversation(model, MESSAGES)
    for text in ("a b", "H\n  a é", "<s>a</s> b"):
        own = [1, *model.tokenizer.encode(text)]
        assert read(text)["input_ids"] == own
        assert read.decode(own, skip_special_tokens=True) == model.tokenizer.decode(
            own, skip_special=True
        )
