"""Parts of a text, encoded and decoded as parts: what comes before them decides blanks, bytes and
characters.
"""

from types import SimpleNamespace

import numpy as np
import pytest
from recital import CONFIG
from small_tokenizers import BOS, EOS, KINDS, byte_level, ids_of, llama, random_ids
from tokenizers.processors import TemplateProcessing

from experiments.tasks.auxiliary import auxiliary_task
from experiments.tasks.words import problem
from paradec_jax.cli import watch
from paradec_jax.config import TokenSpec
from paradec_jax.data.problems import encode_prompts
from paradec_jax.evaluate.likelihood import continuation_span
from paradec_jax.infill import _with_gaps
from paradec_jax.store import Model
from paradec_jax.text.tokenizer import GrowingText

SPEC = TokenSpec(bos=BOS, stop=(EOS,))


def pushed(text, ids):
    """A text with these ids, of which what is settled always stays."""
    for token in ids:
        settled = text.text
        text.push(token)
        assert text.text.startswith(settled) and text.whole.startswith(text.text)
    return text.whole


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_streams_end_as_decoding_all_ids_does(kind, skip):
    tokenizer, rng = KINDS[kind](), np.random.default_rng(0)
    for _ in range(150):
        ids, before = random_ids(tokenizer, rng, 10), random_ids(tokenizer, rng, 8)
        assert pushed(GrowingText(tokenizer, skip_special=skip), ids) == tokenizer.decode(
            ids, skip_special=skip
        )
        former, whole = (tokenizer.decode(row, skip_special=skip) for row in (before, before + ids))
        if whole.startswith(former):  # no byte of the former one was spoilt or completed
            assert former + tokenizer.decode_after(before, ids, skip_special=skip) == whole
        text = GrowingText(tokenizer, skip_special=skip, before=before)
        assert pushed(text, ids) == tokenizer.decode_after(before, ids, skip_special=skip)


@pytest.mark.parametrize(
    ("before", "ids", "text"),
    [
        (("▁", "H", "<0x0A>"), ("▁▁▁", "▁return", "▁x"), "    return x"),
        ((), ("▁▁▁", "▁return"), "   return"),  # no text before: the blank of a beginning
        (("<s>",), ("▁a",), "a"),
        (
            ("<s>", "▁a", "</s>"),
            ("▁b",),
            " b",
        ),  # the last token that has a text is not the last one
        (("▁a", "<0xC3>"), ("<0xA9>", "b"), "éb"),
        (("▁a", "<0xC3>"), ("b",), "b"),
        (("▁a", "<0x0A>"), ("<0xF0>", "b"), "\N{REPLACEMENT CHARACTER}b"),
        (("▁a",), (), ""),
    ],
)
def test_a_continuation_keeps_its_blanks_and_characters(before, ids, text):
    tokenizer = llama()
    before, ids = ids_of(tokenizer, *before), ids_of(tokenizer, *ids)
    assert tokenizer.decode_after(before, ids, skip_special=True) == text


def test_a_character_that_the_ids_complete_is_theirs():
    tokenizer = byte_level()
    first, second, third = tokenizer.encode("日")
    assert tokenizer.decode_after([first, second], [third, *tokenizer.encode("a")]) == "日a"
    text = GrowingText(tokenizer, before=[first])
    text.push(second)
    assert text.text == ""
    text.push(third)
    assert text.text == text.whole == "日"


def test_a_byte_is_kept_while_the_next_may_spoil_it():
    tokenizer = llama()
    text, settled = GrowingText(tokenizer), []
    for token in ids_of(tokenizer, "a", "<0x0A>", "<0xF0>", "b", "<0x0A>"):
        text.push(token)
        settled.append(text.text)
    assert settled == ["a", "a", "a", "a��b", "a��b"] and text.whole == "a��b\n"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("before", "text"),
    [("a", " b c"), ("a.", "  b"), ("a ", "b"), ("a ", " b"), ("a", "b"), ("", "a"), ("a", "")],
)
def test_what_follows_a_text_is_encoded_as_its_part(kind, before, text):
    tokenizer = KINDS[kind]()
    ids = tokenizer.encode_after(before, text)
    assert tokenizer.decode_after(tokenizer.encode(before), ids) == text
    found, places = tokenizer.encode_with_offsets(text, before)
    assert found == ids and all(0 <= start <= end <= len(text) for start, end in places)


@pytest.mark.parametrize("kind", KINDS)
def test_gaps_training_rows_and_likelihoods_hold_the_whole_text(kind):
    tokenizer = KINDS[kind]()
    filled = [
        BOS if token < 0 else token
        for token in _with_gaps(tokenizer, SPEC, ["a ", "b ", 2, " b. c", 1])
    ]
    assert filled[0] == BOS and tokenizer.decode(filled, skip_special=True) == "a b  b. c"
    span = continuation_span(tokenizer, SPEC, "a", "b c", 64)
    assert tokenizer.decode(span.ids, skip_special=True) == "ab c"
    assert tokenizer.decode_after(span.ids[: span.start], span.ids[span.start :]) == "b c"


@pytest.mark.parametrize("kind", ["llama", "byte fallback", "byte level"])
def test_answers_of_training_begin_no_text(kind):
    tokenizer, item = KINDS[kind](), problem(0, 0, "train", (2, 2))
    task = auxiliary_task(0, 3, "steps")
    for prompt, answer in ((item.prompt, item.solution), (task.prompt, task.answer)):
        read = tokenizer.begun(tokenizer.encode(prompt), BOS)
        ids = tokenizer.encode_after(prompt, answer)
        assert tokenizer.decode([*read, *ids], skip_special=True) == prompt + answer
        assert tokenizer.encode_with_offsets(answer, prompt)[0] == ids


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_that_brings_its_begin_of_text_gets_no_second_one(kind):
    tokenizer = KINDS[kind]()
    tokens, lengths = encode_prompts(tokenizer, ["<s>a", "a", "</s>"], spec=SPEC, bucket=1)
    rows = [row[:length].tolist() for row, length in zip(tokens, lengths, strict=True)]
    assert [row.count(BOS) for row in rows] == [1, 1, 1] and {row[0] for row in rows} == {BOS}
    assert _with_gaps(tokenizer, SPEC, ["<s>a", 1]).count(BOS) == 1
    assert tokenizer.begun([], None) == [] and tokenizer.begun([EOS], None) == [EOS]


def test_what_moves_on_the_screen_goes_on_where_the_text_shown_ends():
    tokenizer = byte_level()
    first, second = tokenizer.encode("é")
    rows = SimpleNamespace(completions=lambda: [[*tokenizer.encode("a"), first]])
    decoder = SimpleNamespace(
        drafts=lambda state: np.asarray([[second, *tokenizer.encode("b"), -1]])
    )
    task = SimpleNamespace(
        prompts=[[BOS]], decoder=decoder, model=Model(CONFIG, {}, SPEC, tokenizer)
    )
    assert watch._moving(task, SimpleNamespace(rows=rows), "a") == "éb"


@pytest.mark.parametrize(
    ("post", "framing"),
    [
        (None, ([], [])),
        ("<s> $A", ([BOS], [])),
        ("<s> $A </s>", ([BOS], [EOS])),
        ("$A </s>", ([], [EOS])),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_what_a_file_puts_before_and_after_a_text(kind, post, framing):
    tokenizer = KINDS[kind]()
    if post is not None:
        special = [("<s>", BOS), ("</s>", EOS)]
        tokenizer._backend.post_processor = TemplateProcessing(post, special_tokens=special)
    assert tokenizer.framing() == framing
