"""Plain text as training batches: characters or any tokenizer.json, a held-out end, windows.

::

    file    [ ............ train ............ | held out ]        cut between characters, or between documents
    window  a stretch of `length` ids, from anywhere in the text

`Endless(WindowMaker(...), digest=text.digest)` iterates over batches, which are functions of a seed
and their number.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import tokenizers
from jaxtyping import Bool, Int32
from tokenizers import decoders, models, pre_tokenizers

from paradec_jax.config import TokenSpec
from paradec_jax.data.endless import Batch, Maker, Part, Share, generator
from paradec_jax.io import json_lines
from paradec_jax.records import record
from paradec_jax.text.tokenizer import Tokenizer

SEPARATOR = "<|endoftext|>"
MASK = "<|mask|>"


def character_tokenizer(text: str) -> Tokenizer:
    """A token for each character of a text, in their order, and last the mask, which also stands
    for all others.

    A denoiser takes no mask in a prompt, and so no character that it does not know.
    """
    tokens = [*sorted(set(text)), MASK]
    model = models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token=MASK)
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([tokenizers.AddedToken(MASK, normalized=False, special=True)])
    return Tokenizer(backend)


def character_spec(tokenizer: Tokenizer, alignment: str) -> TokenSpec:
    """Special tokens of a model on `character_tokenizer`.

    A denoiser ("own") has the last token as its mask; to a model that predicts the "next" token it
    is begin-of-text.
    """
    last = tokenizer.vocab_size - 1
    if alignment == "own":
        return TokenSpec(mask=last, alignment="own")
    return TokenSpec(bos=last, pad=last)


@record
class Text:
    """A text as ids.

    Attributes:
      train, held_out: its documents, in order; one where the file has no marks between documents.
      digest: of the file, the tokenizer and where it was cut.
    """

    train: tuple[Int32[np.ndarray, " N"], ...]
    held_out: tuple[Int32[np.ndarray, " N"], ...]
    digest: str


def documents(path: str | Path) -> list[str]:
    """The documents of a file: the `text` of each line of a .jsonl file, else what `<|endoftext|>`
    parts.

    A byte order mark at the file's begin is no part of a text, and documents of white space alone
    are left out.

    Raises:
      FileNotFoundError: no such file.
      ValueError: a line that is no object with a text, a file that is not UTF-8, or one without any
        text.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no text at {path}")
    if path.suffix == ".jsonl":
        texts = [line["text"] for _, line in json_lines(path, "text")]
    else:
        try:
            texts = path.read_text(encoding="utf-8-sig").split(SEPARATOR)
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not a text in UTF-8 ({error})") from error
    texts = [text for text in texts if text.strip()]
    if not texts:
        raise ValueError(f"{path} holds no text")
    return texts


def read_text(
    path: str | Path, tokenizer: Tokenizer | None = None, held_out: float = 0.1
) -> tuple[Text, Tokenizer]:
    """A file as ids, and the tokenizer that made them.

    Args:
      path: of the file (`documents`).
      tokenizer: what makes the ids; characters when None.
      held_out: share of the text's characters, or of its documents where there are several, that is
        held out: the last ones.

    Raises:
      FileNotFoundError: no such file.
      ValueError: a share that leaves nothing on one side, or from `documents`.
    """
    if not 0 < held_out < 1:
        raise ValueError(f"held_out must be in (0, 1), not {held_out}")
    parts = documents(path)
    if tokenizer is None:
        tokenizer = character_tokenizer("".join(parts))
    pieces: Sequence[str] = parts if len(parts) > 1 else parts[0]
    cut = int(len(pieces) * (1 - held_out))
    if not 0 < cut < len(pieces):
        raise ValueError(f"held_out {held_out} leaves no text on one side of {path}")
    sides = [[side] if isinstance(side, str) else side for side in (pieces[:cut], pieces[cut:])]
    train, rest = (
        tuple(np.asarray(ids, np.int32) for ids in tokenizer.encode_batch(side)) for side in sides
    )
    digest = hashlib.sha256(Path(path).read_bytes() + f"{tokenizer.digest()}{cut}".encode())
    return Text(train, rest, digest.hexdigest()), tokenizer


def windows(
    ids: Int32[np.ndarray, " N"], length: int, count: int | None = None
) -> Int32[np.ndarray, "N L"]:
    """Stretches of a text that do not overlap, spread evenly over it: `count` of them, as many as
    fit when None.

    Raises:
      ValueError: a text shorter than one, or more than fit.
    """
    most = len(ids) // length
    wanted = most if count is None else count
    if not 0 < wanted <= most:
        raise ValueError(f"{len(ids)} ids hold {most} windows of {length}, not {wanted}")
    starts = (np.arange(wanted) * most // wanted) * length
    return np.stack([ids[start : start + length] for start in starts])


@record
class WindowMaker(Maker):
    """Makes batch i of windows that begin anywhere in a text, a pure function of the fields and i.

    With `counted` the rows of a denoiser say which ids count, `labelled` and `weights`; else all
    do.
    """

    ids: Int32[np.ndarray, " N"]
    seed: int
    rows: int
    length: int
    bos: int | None = None
    counted: Bool[np.ndarray, " N"] | None = None

    def __post_init__(self) -> None:
        if self.rows < 1 or not 0 < self.length <= len(self.ids):
            raise ValueError(
                f"need at least one row and a length from 1 to the text's {len(self.ids)} ids, "
                f"not {self.rows} and {self.length}"
            )

    @property
    def batches(self) -> int:
        """Batches that have as many ids as the text."""
        return -(-len(self.ids) // (self.rows * self.length))

    def part(self, index: int, share: Share) -> Part:
        """Rows of batch `index`: {"tokens", "weights"}, with `bos` "targets" too, each [B, L]."""
        first, last = share(self.rows)
        most = len(self.ids) - self.length
        starts = generator(self.seed, index).integers(0, most + 1, self.rows)[first:last]
        at = starts[:, None] + np.arange(self.length)
        rows = self.ids[at]
        batch: Batch = {"tokens": rows, "weights": np.ones(at.shape, np.float32)}
        if self.bos is not None:  # for a model of the next token
            start = np.full((len(rows), 1), self.bos, np.int32)
            tokens = np.concatenate([start, rows[:, :-1]], axis=1)
            batch |= {"tokens": tokens, "targets": rows}
        if self.counted is not None:
            batch |= {"labelled": self.counted[at], "weights": self.counted[at].astype(np.float32)}
        return Part(batch, first, self.rows)
