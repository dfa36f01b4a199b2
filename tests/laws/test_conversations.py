"""One text of a conversation through every door: generation, training, its prompts, and measuring."""

import functools
import itertools
import json
import tomllib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from recital import CONFIG, Recital
from small_tokenizers import byte_level
from tokenizers import AddedToken

import paradec_jax as pd
from paradec_jax import store
from paradec_jax.cli.answers import _rendered
from paradec_jax.config import TokenSpec
from paradec_jax.data.jsonl import encoded, read_examples
from paradec_jax.data.problems import encode_prompts, read_problems
from paradec_jax.generate import continuation_task
from paradec_jax.objectives.filling import unused
from paradec_jax.text import chat
from paradec_jax.text.tokenizer import Tokenizer

TABLE = tomllib.loads(Path(__file__).parents[1].joinpath("conversations.toml").read_text())
TEMPLATES = TABLE["templates"]
TOKENS = "<|im_start|> <|head|> <|/head|> <|eot|> <|user|> <|assistant|> <|end|> <start_of_turn> <end_of_turn> <User>"
TOKENS = [*TOKENS.split(), "<Assistant>", "<eos>", "<|system|>"]


def words_of(special=True):
    """Every byte a letter, and the tokens of all templates."""
    backend = byte_level()._backend
    backend.add_tokens([AddedToken(text, special=special, normalized=False) for text in TOKENS])
    return Tokenizer(backend)


WORDS = words_of()


def model_of(template, words=WORDS):
    return store.Model(
        replace(CONFIG, max_length=2048), {}, TokenSpec(bos=1, stop=(2,)), words, template
    )


def task_of(model, talk, answer="", **options):
    """A task whose model writes that answer."""
    decoder = pd.AutoRegressive(Recital((1,), max_length=2048))
    size = len(continuation_task(model, talk, decoder, max_new_tokens=1, **options).prompts[0])
    network = Recital((*model.tokenizer.encode(answer), *[9] * 99), size, max_length=2048)
    return continuation_task(model, talk, pd.AutoRegressive(network), max_new_tokens=8, **options)


REFUSE = {("gemma", "a system message"), ("gemma", "a call")}
# which writes no call, so that the answer is empty
REFUSE |= set(itertools.product(["unended"], ["a call"]))
PAIRS = [pair for pair in itertools.product(TEMPLATES, TABLE["lines"]) if pair not in REFUSE]


@pytest.mark.filterwarnings("ignore:the chat template does not read")
@pytest.mark.parametrize(("name", "line"), PAIRS)
def test_every_door_has_the_same_prompts(name, line, tmp_path):
    model, line, wanted = model_of(TEMPLATES[name]), json.loads(TABLE["lines"][line]), []
    for i, message in enumerate(line["messages"]):
        if message["role"] != "assistant":
            continue
        asked, answered = ({**line, "messages": line["messages"][:n]} for n in (i, i + 1))
        (prompt,) = task_of(model, [asked]).prompts
        (tmp_path / f"{i}.jsonl").write_text(json.dumps(asked))
        examples = read_examples(
            tmp_path / f"{i}.jsonl", model, folder=tmp_path, length=2048, prompts=True
        )
        assert examples.prompt(0).tolist() == prompt
        if message["content"]:  # else it is a call, which is no text to be measured
            (tmp_path / f"{i}.jsonl").write_text(json.dumps(answered))
            measured, items = _rendered(model, read_problems(tmp_path / f"{i}.jsonl"))
            tokens, lengths = encode_prompts(WORDS, items, spec=measured.token_spec)
            assert tokens[0, : lengths[0]].tolist() == prompt
        wanted.append(prompt)
    trained = []
    for ids, counted in encoded(line, model, False)[0]:
        trained += [ids[:i] for i in range(1, len(ids)) if counted[i] and not counted[i - 1]]
    assert trained == wanted


@pytest.mark.parametrize("case", TABLE["rows"], ids=lambda case: case["of"])
@pytest.mark.filterwarnings("error")
def test_what_counts(case):
    rows, notes = encoded(json.loads(case["line"]), model_of(TEMPLATES[case["template"]]), False)
    texts = []
    for row in rows:
        groups = itertools.groupby(zip(*row, strict=True), key=lambda pair: pair[1])
        parts = [(WORDS.decode(token for token, _ in group), counts) for counts, group in groups]
        texts.append("".join(f"[{text}]" if counts else text for text, counts in parts))
    assert ("|".join(texts), notes) == (case["want"], case.get("notes", []))


@pytest.mark.parametrize("case", TABLE["refused"], ids=lambda case: case["why"])
def test_what_is_refused(case):
    with pytest.raises(ValueError, match=case["why"]):
        encoded(json.loads(case["line"]), model_of(TEMPLATES["chatml"]), False)


def test_what_the_template_does_not_read_is_named():
    talk = {"messages": [{"role": "user", "content": "a", "name": "b", "weight": 1}], "tools": [{}]}
    with pytest.warns(UserWarning, match="does not read name, tools$"):
        assert chat.conversation(model_of(TEMPLATES["chatml"]), talk).startswith(
            "<|im_start|>user\na<|im_end|>"
        )


def test_lines_and_examples_are_counted_apart(tmp_path):
    line = json.loads(TABLE["lines"]["two turns"]) | {"id": 1}
    (tmp_path / "a.jsonl").write_text(json.dumps(line) + "\n" + json.dumps(line))
    model = model_of(TEMPLATES["qwen3"])
    found = str(read_examples(tmp_path / "a.jsonl", model, folder=tmp_path, length=2048))
    assert found.startswith('4 examples of 2 lines, 2 with "id" passed over;')


def test_no_mask_is_a_token_of_any_role():
    job = SimpleNamespace(model=model_of(TEMPLATES["phi"]), run=SimpleNamespace(model="it"))
    job.examples = SimpleNamespace(
        ids=[WORDS.id_of(text) for text in TOKENS if "system" not in text]
    )
    with pytest.raises(ValueError, match="neither it nor its chat template"):
        unused(job, "<|system|>")


def test_a_prompt_with_the_model_s_mask():
    model = model_of(None)
    model = replace(model, token_spec=replace(model.token_spec, mask=WORDS.id_of("<|eot|>")))
    with pytest.raises(ValueError, match=r"prompt 1 holds '<\|eot\|>', the model's mask"):
        continuation_task(model, ["a", "a <|eot|>"], pd.Masked(), max_new_tokens=4)


# transformers leaves a null content out, which a template that asks whether it is none does not
# foresee.
@pytest.mark.peers
@pytest.mark.filterwarnings("ignore:the chat template does not read")
@pytest.mark.parametrize(("name", "line"), [pair for pair in PAIRS if pair != ("r1", "a call")])
def test_transformers_writes_and_marks_the_same(name, line):
    transformers = pytest.importorskip("transformers")
    names = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATES[name]}
    peer = transformers.PreTrainedTokenizerFast(tokenizer_object=WORDS._backend, **names)
    model, talk = model_of(TEMPLATES[name]), json.loads(TABLE["lines"][line])
    given = chat.prepared(TEMPLATES[name], talk)
    messages, last = given.pop("messages"), {"role": "assistant", "content": "so it "}
    begun = [*talk["messages"][:-1], last]
    write = functools.partial(peer.apply_chat_template, tokenize=False, **given)
    assert write(messages) == chat.conversation(model, talk, False)
    assert write(messages[:-1], add_generation_prompt=True) == chat.conversation(
        model, {**talk, "messages": talk["messages"][:-1]}
    )
    (text,), _ = chat.as_prompts(model, [{**talk, "messages": begun}], continue_last=True)
    assert write([*messages[:-1], last], continue_final_message=True) == text
    if name in ("marked", "unended"):
        options = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
        peers = write(messages, **options)
        ((ids, counted),), _ = encoded(talk, model, False)
        assert peers["input_ids"][: len(ids)] == ids
        assert peers["assistant_masks"] == [
            *map(int, counted),
            *[0] * (len(peers["input_ids"]) - len(ids)),
        ]


def test_a_turn_ends_at_an_added_token_that_is_not_special():
    model = model_of(TEMPLATES["llama3"], words_of(special=False))
    out = task_of(model, [{"role": "user", "content": "a"}], "ab<|eot|>ba").run()
    assert (out.text, out.reasons) == (["ab"], [pd.Reason.STOP])


@pytest.mark.parametrize("name", ["chatml", "llama3", "r1"])
def test_an_unfinished_answer_goes_on(name):
    model, asked = model_of(TEMPLATES[name]), [{"role": "user", "content": "a"}]
    begun = [*asked, {"role": "assistant", "content": "so it"}]
    text = chat.conversation(model, begun, False).partition("so it")[0] + "so it"
    task = task_of(model, begun, " is", continue_last=True)
    assert task.prompts == [model.tokenizer.encode(text)] and task.run().text[0].startswith(" is")
    called = [*asked, {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}]
    for talk, option in (
        (begun, False),
        ({"messages": asked}, True),
        (["a"], True),
        (called, True),
    ):
        with pytest.raises(ValueError, match="continue_last"):
            task_of(model, talk, continue_last=option)
