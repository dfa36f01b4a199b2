"""Tokenizers of the kinds that checkpoints have, each with a few words: what a part of a text needs
of the rest.
"""

import numpy as np
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from paradec_jax.text.tokenizer import Tokenizer

SPECIAL = ("<unk>", "<s>", "</s>", "<|im_end|>")
UNK, BOS, EOS, END = range(4)
WORDS = (
    "▁",
    "▁▁",
    "▁▁▁",
    "▁a",
    "▁b",
    "▁c",
    "a",
    "b",
    "c",
    "d",
    "ab",
    "▁return",
    "▁x",
    "x",
    "H",
    ".",
    ",",
)
BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))
MERGES = [("▁", "▁"), ("▁▁", "▁"), ("▁", "a"), ("▁", "b"), ("▁", "c"), ("▁", "x"), ("a", "b")]


def numbered(*words: str) -> dict[str, int]:
    return {word: i for i, word in enumerate(words)}


def llama() -> Tokenizer:
    """As Llama-2's: a blank is put before every text, taken away before what is decoded, and bytes
    stand alone.
    """
    return _sentencepiece([decoders.Strip(" ", 1, 0)])


def byte_fallback() -> Tokenizer:
    """As Gemma's: bytes that stand alone, and no blank that is put anywhere."""
    backend = _sentencepiece([])._backend
    backend.normalizer = normalizers.Replace(" ", "▁")
    return Tokenizer(backend)


def _sentencepiece(last: list) -> Tokenizer:
    options = {"unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True}
    backend = tokenizers.Tokenizer(
        models.BPE(numbered(*SPECIAL, *BYTES, *WORDS), MERGES, **options)
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *last]
    backend.decoder = decoders.Sequence(steps)
    return _with_special(backend)


def metaspace() -> Tokenizer:
    """Words that begin with their blank, the first one's put before the text by the splitter."""
    backend = tokenizers.Tokenizer(
        models.BPE(numbered(*SPECIAL, *WORDS), MERGES, unk_token="<unk>")
    )
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return _with_special(backend)


def byte_level() -> Tokenizer:
    """As GPT-2's and Qwen's: every byte is a letter, and no blank is put anywhere."""
    words = numbered(*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), "Ġa", "Ġb", "ab")
    backend = tokenizers.Tokenizer(models.BPE(words, [("Ġ", "a"), ("Ġ", "b"), ("a", "b")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return _with_special(backend)


def letters(*words: str) -> Tokenizer:
    """Token i is the i-th word, most of them letters; every character is split off."""
    backend = tokenizers.Tokenizer(models.WordLevel(numbered(*words), words[0]))
    backend.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex("."), "isolated")
    backend.decoder = decoders.Fuse()
    return Tokenizer(backend)


def _with_special(backend: tokenizers.Tokenizer) -> Tokenizer:
    backend.add_special_tokens([AddedToken(text, normalized=False) for text in SPECIAL])
    return Tokenizer(backend)


KINDS = {
    "llama": llama,
    "byte fallback": byte_fallback,
    "metaspace": metaspace,
    "byte level": byte_level,
}


def ids_of(tokenizer: Tokenizer, *words: str) -> list[int]:
    """Ids of tokens as the vocabulary writes them."""
    found = [tokenizer.id_of(word) for word in words]
    assert None not in found, words
    return found


def of_bytes(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """Ids of bytes that stand alone."""
    if tokenizer.id_of("<0x00>") is not None:
        return ids_of(tokenizer, *(f"<0x{byte:02X}>" for byte in data))
    pairs = [(chr(c), tokenizer.encode(chr(c))) for c in range(256)]
    found = {b: i for text, ids in pairs for b, i in zip(text.encode(), ids, strict=False)}
    return [found[byte] for byte in data if byte in found]


def random_ids(tokenizer: Tokenizer, rng: np.random.Generator, most: int) -> list[int]:
    """Ids among which special tokens, whole and broken characters and ids beyond the vocabulary are
    frequent.
    """
    alone = of_bytes(tokenizer, "a\né日😀".encode())
    share = rng.random()
    draw = (
        lambda: alone[rng.integers(len(alone))],
        lambda: int(rng.integers(tokenizer.vocab_size + 2)),
        lambda: int(rng.integers(END + 1)),
    )
    return [
        draw[0 if rng.random() < share else rng.integers(1, 3)]() for _ in range(rng.integers(most))
    ]
