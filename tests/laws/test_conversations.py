"""One text of a conversation through every door: generation, training, its prompts, and measuring."""

import itertools
import json
from dataclasses import replace

import pytest
from conversations import (
    CHATML,
    GEMMA,
    LLAMA3,
    MARKED,
    QWEN2,
    QWEN3,
    R1,
    SYSTEM,
    TALK,
    TEMPLATES,
    TOOLS,
    called,
)
from conversations import next_ends, tokenizer, unended
from recital import CONFIG, Recital

import paradec_jax as pd
from paradec_jax import chat, store
from paradec_jax.cli.answers import _rendered
from paradec_jax.config import TokenSpec
from paradec_jax.data.jsonl import encoded, read_examples
from paradec_jax.data.problems import encode_prompts, read_problems
from paradec_jax.generate import continuation_task

WORDS = tokenizer()
DECODER = pd.AutoRegressive(Recital((1,), max_length=2048))
TALKS = {
    "two turns": {"messages": TALK},
    "a system message": {"messages": [SYSTEM, *TALK]},
    "no thought": {
        "messages": TALK,
        "chat_template_kwargs": {"enable_thinking": False, "date_string": "today"},
    },
    "a call": {"messages": called({"a": 1}), "tools": TOOLS},
    "a call as text": {"messages": called('{"a": 1}'), "tools": json.dumps(TOOLS)},
    "null everywhere": {
        "messages": [message | {"tool_calls": None, "name": None} for message in TALK],
        "tools": None,
    },
}


def model_of(template, words=WORDS, **options):
    config = replace(CONFIG, max_length=2048)
    return store.Model(config, {}, TokenSpec(bos=1, stop=(2,), pad=0), words, template, **options)


# A template of its own says that it has no system messages, and that roles alternate.
PAIRS = [
    pair
    for pair in itertools.product(TEMPLATES, TALKS)
    if pair[0] != "gemma" or pair[1] in ("two turns", "no thought")
]


@pytest.mark.filterwarnings("ignore:the chat template does not read")
@pytest.mark.parametrize(("name", "talk"), PAIRS)
def test_every_door_has_the_same_prompts(name, talk, tmp_path):
    model, line, wanted = model_of(TEMPLATES[name]), TALKS[talk], []
    for i, message in enumerate(line["messages"]):
        if message["role"] != "assistant":
            continue
        part, answered = ({**line, "messages": line["messages"][:n]} for n in (i, i + 1))
        (prompt,) = continuation_task(model, [part], DECODER, max_new_tokens=1).prompts
        ((ids, _),), _ = encoded(part, model, True)
        (tmp_path / f"{i}.jsonl").write_text(json.dumps(part))
        examples = read_examples(tmp_path / f"{i}.jsonl", model, folder=tmp_path, length=2048, prompts=True)
        assert ids == prompt == examples.prompt(0).tolist()
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


def shown(line, template, words=WORDS, prompts=False):
    """The texts of a line, with brackets around what counts, and what is said of it."""
    rows, notes = encoded(line, model_of(template, words), prompts)
    texts = []
    for row in rows:
        groups = itertools.groupby(zip(*row, strict=True), key=lambda pair: pair[1])
        parts = [(words.decode(token for token, _ in group), counts) for counts, group in groups]
        texts.append("".join(f"[{text}]" if counts else text for text, counts in parts))
    return texts, notes


def said(role, content, **more):
    return {"role": role, "content": content, **more}


ASKED, USER = said("user", "?"), "<|im_start|>user\n?<|im_end|>\n"
HEAD, END = "<|im_start|>assistant\n", "<|im_end|>\n"
ONE = f"{USER}{HEAD}[4{END}]"
FIRST = [said("assistant", "hi"), ASKED, said("assistant", "4")]
THINKS = f"{USER}{HEAD}[<think>\nhm\n</think>\n\n4{END}]"


def talk(*messages, **more):
    return {"messages": [*messages], **more}


SHOWN = {
    "the assistant first": (talk(*FIRST), CHATML, [f"{HEAD}[hi{END}]{ONE}"]),
    "after a system message": (
        talk(*FIRST[:1]),
        QWEN2,
        [f"<|im_start|>system\nBe of help.{END}{HEAD}[hi{END}]"],
    ),
    "first, in marks": (talk(*FIRST), MARKED, [f"{HEAD}[hi<|im_end|>]\n{USER}{HEAD}[4<|im_end|>]"]),
    "weight 0": (talk(said("assistant", "bad", weight=0), *FIRST[1:]), CHATML, [f"{HEAD}bad{END}{ONE}"]),
    "train false, in marks": (
        talk(
            ASKED, said("assistant", "bad", train=False), ASKED, said("assistant", "4", train=True, weight=1)
        ),
        MARKED,
        [f"{USER}{HEAD}bad{END}{ONE}"],
    ),
    "null content of a call": (talk(*called({"a": 1})[:2]), QWEN2, None),
    "parts": (talk(said("user", [{"type": "text", "text": "?"}]), FIRST[2]), CHATML, [ONE]),
    "parts in a template for them": (
        talk(said("user", [{"type": "text", "text": "?"}]), FIRST[2]),
        QWEN3,
        None,
    ),
    "a thought": (talk(ASKED, said("assistant", "4", reasoning="hm")), QWEN3, [THINKS]),
    "a thought by its name": (talk(ASKED, said("assistant", "4", reasoning_content="hm")), QWEN3, [THINKS]),
    "completion": ({"prompt": "a", "completion": "b"}, None, ["<s>a[b</s>]"]),
    "messages each": ({"prompt": [*FIRST[:2]], "completion": FIRST[2:]}, CHATML, [f"{HEAD}hi{END}{ONE}"]),
    "a prompt of messages": ({"prompt": [ASKED], "answer": "4"}, CHATML, [ONE]),
    "from and value": (
        {"conversations": [{"from": "human", "value": "?"}, {"from": "gpt", "value": "4"}]},
        CHATML,
        [ONE],
    ),
    "role in conversations": ({"conversations": [ASKED, FIRST[2]]}, CHATML, [ONE]),
    "null beside": ({"text": None, "messages": [ASKED, FIRST[2]], "tools": None}, CHATML, [ONE]),
}


@pytest.mark.parametrize("case", SHOWN)
def test_what_counts(case):
    line, template, wanted = SHOWN[case]
    print(shown(line, template))
    if wanted:
        assert shown(line, template) == (wanted, [])
