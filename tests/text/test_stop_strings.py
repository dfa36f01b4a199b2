"""Stop strings of every kind: with special tokens in them, of single bytes, across tokens."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
from recital import CONFIG, Recital
from small_tokenizers import BOS, END, EOS, KINDS, byte_level, ids_of, llama, random_ids

import paradec_jax as pd
from paradec_jax.config import TokenSpec
from paradec_jax.store import Model
from paradec_jax.text.stop_strings import StopStrings

SPEC = TokenSpec(bos=BOS, stop=(EOS,))
ENDED = ("▁b", "<|im_end|>", "▁c", "d", "</s>")


def stopped(tokenizer, ids, *strings, prompt=(), every=1):
    """(tokens kept, text) of a row, looked at every so many tokens; None where no string ended it."""
    watch = StopStrings(tokenizer, SPEC, strings, [prompt])
    shown = ""
    for count in range(0, len(ids) + 1, every):
        watch(SimpleNamespace(rows=SimpleNamespace(completions=lambda count=count: [ids[:count]])))
        assert watch.visible(0, done=False).startswith(shown)  # nothing visible is taken back
        shown = watch.visible(0, done=False)
    found = watch.finish([ids]).get(0)
    whole = found[1] if found else tokenizer.decode_after(prompt, ids, skip_special=True)
    assert whole.startswith(shown)
    return found


@pytest.mark.parametrize("every", [1, 3, 100])
@pytest.mark.parametrize(
    ("words", "strings", "kept"),
    [
        (ENDED, ["<|im_end|>"], (2, " b")),
        (ENDED, ["im_end"], (2, " b")),
        (ENDED, ["b<|im_end|>"], (2, " ")),
        (ENDED, ["end|> c"], (3, " b")),
        (ENDED, ["<|im_end|> cd"], (4, " b")),
        (ENDED, ["b c"], (3, " ")),  # as it is shown
        (ENDED, ["d</s>"], (5, " b c")),
        (ENDED, ["</s>"], None),  # the stop token has ended the row, and nothing is cut
        (ENDED, ["<s>"], None),
        (("<|im_end|>", "▁b", "▁c"), ["c"], (3, " b ")),
        (("<|im_end|>", "▁b", "<|im_end|>"), ["b<"], (3, " ")),
        (("a", "<0x0A>", "<0xF0>", "b"), ["\n"], (2, "a")),  # the text of the first two holds it
        (("a", "<0xF0>", "<0x0A>", "b"), ["\n"], None),
        (("a", "<0xC3>", "<0xA9>", "b"), ["é"], (3, "a")),
        (("a", "<0xC3>", "<|im_end|>", "b"), ["�"], (3, "a")),
        (("a", "<0xC3>"), ["�"], (2, "a")),  # none follows that completes it
    ],
)
def test_what_ends_a_row(words, strings, kept, every):
    tokenizer = llama()
    prompt = ids_of(tokenizer, "<s>", "▁a")
    assert (
        stopped(tokenizer, ids_of(tokenizer, *words), *strings, prompt=prompt, every=every) == kept
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_ends_with_the_first_token_after_which_a_text_holds_a_string(kind):
    tokenizer, rng, found = KINDS[kind](), np.random.default_rng(2), 0
    texts = ["a", "b", "<|im", "</s>", "> ", "\n", "é", "<0", "_end|>a"]
    for _ in range(200):
        prompt, ids = random_ids(tokenizer, rng, 4), random_ids(tokenizer, rng, 12)
        ids = [token for token in ids if token != EOS]
        strings = [texts[i] for i in rng.integers(len(texts), size=2)]

        def holds(count, prompt=prompt, ids=ids, strings=strings):
            plain = [token for token in prompt if not tokenizer.is_special(token)]
            seen = [
                tokenizer.decode_after(plain, ids[:count], skip_special=skip)
                for skip in (True, False)
            ]
            return any(string in text for text in seen for string in strings)

        first = next((count for count in range(len(ids) + 1) if holds(count)), None)
        result = stopped(tokenizer, ids, *strings, prompt=prompt)
        assert (result and result[0]) == first
        if result:
            found += 1
            shown = tokenizer.decode_after(prompt, ids[:first], skip_special=True)
            assert shown.startswith(result[1]) and not any(
                string in result[1] for string in strings
            )
    assert found > 10


def test_a_begin_of_text_alone_is_no_text_that_a_blank_follows():
    tokenizer = llama()
    ids = ids_of(tokenizer, "▁b", "▁c")
    assert stopped(tokenizer, ids, " b", prompt=[BOS]) is None
    assert stopped(tokenizer, ids, " c", prompt=[BOS]) == (2, "b")
    assert stopped(tokenizer, ids, " b", prompt=ids_of(tokenizer, "<s>", "▁a")) == (1, "")


def generated(tokenizer, prompt, words, *, budget=8, stop=()):
    """What a network that recites these tokens adds to a prompt."""
    model = Model(dataclasses.replace(CONFIG, vocab_size=384), {}, SPEC, tokenizer)
    start = 1 + len(tokenizer.encode(prompt))
    network = Recital(tuple(ids_of(tokenizer, *words)), start)
    options = {"max_new_tokens": budget, "stop_strings": stop}
    return pd.generate(model, [prompt], pd.AutoRegressive(network), **options)


def test_a_prompt_and_its_continuation_joined_are_the_text_of_all_tokens():
    out = generated(llama(), "H\n", ("▁▁▁", "▁return", "▁x", "</s>"))
    assert out.text == ["    return x"] and out.reasons == [pd.Reason.STOP]


def test_a_stop_string_that_is_a_special_token_ends_a_row():
    out = generated(byte_level(), "a", ("b", "<|im_end|>", "a", "b", "</s>"), stop=["<|im_end|>"])
    assert (
        out.text == ["b"]
        and out.reasons == [pd.Reason.CALLER]
        and out.tokens == [[*out.tokens[0][:1], END]]
    )
