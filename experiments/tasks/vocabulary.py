"""The small tokenizer of the word problems: a token for each word and digit, bytes for the rest."""

import dataclasses
import re

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from experiments.tasks import words as wp
from paradec_jax.config import TokenSpec
from paradec_jax.data.text import MASK
from paradec_jax.text.tokenizer import Tokenizer

SPECIAL_TOKENS = ("<|pad|>", "<|bos|>", "<|eos|>")

# A digit, a word of bounded length or a mark, each with the space before it; any other space alone.
PIECES = r" ?[0-9]| ?[A-Za-z]{1,24}| ?[^\sA-Za-z0-9]|\s"

_MAX_PIECE_BYTES = 64


def token_spec() -> TokenSpec:
    """Special tokens of `build_tokenizer`."""
    return TokenSpec(bos=1, stop=(2,), pad=0)


def denoising_spec(tokenizer: Tokenizer, alignment: str = "own") -> TokenSpec:
    """Special tokens of `build_tokenizer(mask=True)`, whose last token is the mask."""
    return dataclasses.replace(token_spec(), mask=tokenizer.vocab_size - 1, alignment=alignment)


def build_tokenizer(*, mask: bool = False) -> Tokenizer:
    """Builds the tokenizer of the word problems.

    Each word of the templates and each digit is one token, with and without a space before it where
    both occur; any other text falls back to bytes, so every text has ids and comes back unchanged.

    Args:
      mask: whether there is a mask, after all others, which keep their ids.
    """
    special = (*SPECIAL_TOKENS, MASK) if mask else SPECIAL_TOKENS
    last = [MASK] if mask else []
    tokens = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet()), *_words(), *last]
    vocabulary = {token: i for i, token in enumerate(dict.fromkeys(tokens))}
    # The name of the unknown token is asked for by the model and never used: every byte is in the
    # vocabulary.
    model = models.WordPiece(
        vocabulary,
        unk_token=SPECIAL_TOKENS[0],
        continuing_subword_prefix="",
        max_input_chars_per_word=_MAX_PIECE_BYTES,
    )
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([tokenizers.AddedToken(text, normalized=False) for text in special])
    return Tokenizer(backend)


def _words() -> list[str]:
    """Words, digits and signs of the problems as vocabulary entries; "Ġ" is how byte-level writes a
    space.
    """
    templates = [relation.sentence for relation in wp.RELATIONS]
    templates += [wp.GIVEN, *wp.DISTRACTORS, wp.STEP, wp.STEP_MORE, wp.STEP_TOTAL, *wp.FINDINGS]
    templates += [wp.ASK_VALUE, wp.ASK_MORE, wp.ASK_TOTAL]
    words = {
        word
        for text in templates
        for word in re.findall("[A-Za-z]+", re.sub(r"\{.*?\}", " ", text))
    }
    spaced = [*wp.NAMES, *wp.ITEMS, *sorted(words), *"0123456789", *"+-*/="]
    return ["Question", "Answer", *wp.NAMES, *("Ġ" + word for word in spaced)]
