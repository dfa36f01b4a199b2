"""Lines of JSON as training examples: tokenised once into mapped arrays, then bucketed or packed
batches.

Of the lines of `data.lines` these tokens count: of messages the assistant's turns, written by the
model's template; of a prompt and its response the response and the stop after it; of a text all but
begin-of-text. A prompt is used as it is, as `paradec generate PROMPT` does. Where a prompt is
enough, a line may have no response, or end in a user's
turn: none of it counts.
"""

import collections
import dataclasses
import functools
import glob
import hashlib
import itertools
import json
import os
import uuid
from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Bool, Int32, Int64

from paradec_jax.data.endless import Batch, Endless, Part, Share, whole
from paradec_jax.data.lines import ANSWERS, line_of
from paradec_jax.disk.folders import foreign, staged
from paradec_jax.io import json_line, read_object, regular, sha256_of
from paradec_jax.text import chat

FORMAT = 2  # of the arrays in a folder
CHUNK = 1000  # lines that are tokenised together
QUANTILES = (0.25, 0.5, 0.75, 0.9, 1.0)  # of the examples' lengths, which become those of batches
DTYPES: dict[str, type] = {
    "weights": np.float32,
    "labelled": np.bool_,
}  # of batches; the others are int32
Row = tuple[list[int], list[bool]]


@dataclasses.dataclass(frozen=True, eq=False)
class Examples:
    """Lines as ids, one after the other, in mapped arrays.

    Attributes:
      ids: ids of all examples.
      counted: which of them the loss counts.
      starts: where each example begins, and the end of the last.
      digest: digest of the lines, the tokenizer, the template and the options.
      counts: numbers of `lines`, where there are some of `skipped` lines (bad), of `cut` and
        `dropped` examples (too long), and of lines with what is to be said of them.
      rule: how the counted words of messages are found, in words; empty where the model has no
        template.
    """

    ids: Int32[np.ndarray, " N"]
    counted: Bool[np.ndarray, " N"]
    starts: Int64[np.ndarray, " M_plus_1"]
    digest: str
    counts: Mapping[str, int]
    rule: str

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, i: int) -> tuple[Int32[np.ndarray, " L"], Bool[np.ndarray, " L"]]:
        place = slice(self.starts[i], self.starts[i + 1])
        return self.ids[place], self.counted[place]

    def prompt(self, i: int) -> Int32[np.ndarray, " P"]:
        """Ids before the first that counts; all where none does."""
        ids, counted = self[i]
        return ids[: int(np.argmax(counted))] if counted.any() else ids

    def __str__(self) -> str:
        less = "".join(
            f", {n:,} {name}" for name, n in self.counts.items() if n and name != "lines"
        )
        tokens = f"{len(self.ids):,} tokens, of which {int(self.counted.sum()):,} count"
        by = f" ({self.rule})" if self.rule else ""
        return f"{len(self):,} examples of {self.counts['lines']:,} lines{less}; {tokens}{by}"


def read_examples(
    source: str | os.PathLike[str],
    model: Any,
    *,
    folder: str | os.PathLike[str],
    length: int,
    long: Literal["drop", "cut"] = "drop",
    skip_bad: bool = False,
    prompts: bool = False,
) -> Examples:
    """Lines of JSON as examples for a model; tokenised once, since FOLDER/DIGEST keeps them.

    Args:
      source: a file, a folder (its *.jsonl files) or a pattern such as "data/*.jsonl".
      model: the model (`store.Model`), whose tokenizer, special tokens and template are used.
      folder: folder in which the arrays are kept.
      length: ids of the longest example.
      long: longer ones are left out ("drop") or lose their end ("cut").
      skip_bad: lines that cannot be used are counted and left out.
      prompts: whether a line may be a prompt alone.

    Raises:
      ValueError: no file; a line that cannot be used, with its number, field and reason; no example
        at all.
      OSError: a file that cannot be read or written.
    """
    if model.tokenizer is None:
        raise ValueError("the model has no tokenizer, which data as text needs")
    files = files_of(source)
    told = [FORMAT, length, long, skip_bad, prompts, dataclasses.asdict(model.token_spec)]
    told += [model.chat_template, dict(model.special_tokens), model.tokenizer.digest()]
    digest = hashlib.sha256(json.dumps(told).encode())
    for path in files:
        digest.update(sha256_of(path).encode())
    place = Path(folder) / digest.hexdigest()[:16]
    if place.exists() and foreign(place):
        place.rename(f"{place}.{uuid.uuid4().hex}")  # nothing is replaced
        print(f"{place} is not as it was written: its tokens are made again from the lines")
    if not place.exists():
        with staged(place) as temporary:
            _write(temporary, files, model, length, long, skip_bad, prompts)
    about = read_object(place / "about.json")
    ids = np.memmap(place / "ids", np.int32, "r")
    counted = np.memmap(place / "counted", bool, "r")
    return Examples(ids, counted, np.load(place / "starts.npy"), digest.hexdigest(), **about)


def files_of(source: str | os.PathLike[str]) -> list[Path]:
    """The files of a source in order. Raises ValueError where there is none."""
    path = Path(source)
    pattern = Path(glob.escape(str(path))) / "*.jsonl" if path.is_dir() else path
    files = [path] if path.is_file() else sorted(map(regular, glob.glob(str(pattern))))
    if not files:
        raise ValueError(f"data: there is no file {pattern}")
    return files


def _write(
    folder: Path,
    files: Sequence[Path],
    model: Any,
    length: int,
    long: str,
    skip_bad: bool,
    prompts: bool,
) -> None:
    counts: Any = collections.Counter()
    starts, lines, encode = (
        [0],
        _lines(files),
        functools.partial(_encoded, model, prompts, skip_bad),
    )
    with (
        (folder / "ids").open("wb") as ids,
        (folder / "counted").open("wb") as counted,
        ThreadPoolExecutor() as pool,
    ):
        while chunk := list(itertools.islice(lines, CHUNK)):
            for rows, notes in filter(None, pool.map(encode, chunk)):
                counts.update(dict.fromkeys(("lines", *notes), 1))
                for whole in rows:
                    row, marks = (one[:length] for one in whole)
                    if len(whole[0]) > length:
                        fate = "cut" if long == "cut" and any(marks[1:]) else "dropped"
                        counts[fate] += 1
                        if fate == "dropped":
                            continue
                    np.asarray(row, np.int32).tofile(ids)
                    np.asarray(marks, bool).tofile(counted)
                    starts.append(starts[-1] + len(row))
    if len(starts) == 1:
        less = ", ".join(f"{n} {name}" for name, n in counts.items())
        raise ValueError(f"data: {', '.join(map(str, files))} gives no example ({less})")
    np.save(folder / "starts.npy", np.asarray(starts, np.int64))
    template = model.chat_template
    rule = template and (
        "of messages by the template's "
        f"{'generation marks' if 'endgeneration' in chat.reads(template) else 'prefixes'}"
    )
    about = {"counts": counts, "rule": rule or ""}
    (folder / "about.json").write_text(json.dumps(about) + "\n", encoding="utf-8")


def _lines(files: Sequence[Path]) -> Iterator[tuple[str, bytes]]:
    """Where each line is, and its bytes."""
    for path in files:
        with path.open("rb") as file:
            for number, data in enumerate(file, 1):
                yield f"line {number} of {path}", data


def _encoded(model: Any, prompts: bool, skip_bad: bool, line: tuple[str, bytes]) -> Any:
    """What `encoded` gives of a line, or None of a blank one. Raises ValueError unless bad lines
    are left out.
    """
    where, data = line
    try:
        record = json_line(data, where)
        return None if record is None else encoded(record, model, prompts)
    except ValueError as error:
        if skip_bad:
            return [], ["skipped"]
        raise error if str(error).startswith(where) else ValueError(f"{where}: {error}") from error


def encoded(record: Mapping[str, Any], model: Any, prompts: bool) -> tuple[list[Row], list[str]]:
    """Ids of a line and which of them count, and what is to be said of it.

    A conversation is one example where each answer's prompt begins with the text before it, and
    several elsewhere.

    Raises:
      ValueError: a line that cannot be used; the message names the field.
    """
    spec, words, (kind, content, answer, passed) = (
        model.token_spec,
        model.tokenizer,
        line_of(record),
    )
    notes = [f'with "{name}" passed over' for name in passed]
    alone, bos, stop = prompts and kind == "prompt" and answer is None, spec.bos, spec.stop[:1]
    texts = [("", content) if kind == "text" else (content, answer or "")]
    if kind == "messages":
        if model.chat_template is None:
            raise ValueError('"messages" need a chat template, and the model has none')
        text, bos, stop = chat.conversation(model, content), None, ()
        alone = prompts and content["messages"][-1]["role"] != "assistant"
        texts = [(text, "")] if alone else chat.answered(model, content)
    elif kind == "prompt" and answer is None and not alone:
        raise ValueError(
            f'"response" must be a string, not None: of {ANSWERS} the line has none, but {[*record]}'
        )
    rows: list[Row] = [([], [])]
    for before, text in texts:
        added = words.encode_after(
            before, text
        )  # as a model's own words follow a prompt that has been read
        ids = words.begun(words.encode(before) + added, bos)
        first = max(len(ids) - len(added), bos in ids[:1])
        if (
            not alone and ids[-1:] and ids[-1] not in spec.stop
        ):  # which a text may have brought, written out
            ids += stop
        counted = [i >= first for i in range(len(ids))]
        if not (alone or any(counted[1:])):
            continue
        if not (
            alone
            or stop
            or any(
                i in spec.stop or words.stands_alone(i) for i in words.encode(text.rstrip())[-1:]
            )
        ):
            notes.append("without an end of the turn that counts")
        whole, marks = rows[-1]
        if ids[: len(whole)] == whole:  # the prompt of this answer begins with the row before
            counted[: len(marks)] = rows.pop()[1]
        rows.append((ids, counted))
    if not rows[-1][0] and not alone:
        raise ValueError(f'"{kind}" has no turn of an assistant or no text that the loss counts')
    return rows, notes


# Batches


class Bucket(NamedTuple):
    """Rows of one length.

    Attributes:
      length: T of its batches.
      rows: B of its batches.
      batches: batches of an epoch.
      members: examples of all rows, one row after the other.
      bounds: where each row begins among the members, and the end of the last.
    """

    length: int
    rows: int
    batches: int
    members: Int64[np.ndarray, " N"]
    bounds: Int64[np.ndarray, " R_plus_1"]


@dataclasses.dataclass(frozen=True, eq=False)
class BatchMaker:
    """Makes batch i, a pure function of the fields and i; each epoch of `batches` has every example
    once.
    """

    examples: Examples
    seed: int
    packed: bool
    buckets: tuple[Bucket, ...]
    block: int | None = None
    filler: int = 0

    @property
    def batches(self) -> int:
        """Batches of an epoch."""
        return sum(bucket.batches for bucket in self.buckets)

    @functools.lru_cache(maxsize=2)  # noqa: B019
    def plan(self, epoch: int) -> list[tuple[Bucket, np.ndarray]]:
        """Bucket and rows of each batch of an epoch."""
        rng = np.random.Generator(np.random.Philox([self.seed % 2**64, epoch]))
        plan = []
        for bucket in self.buckets:
            rows = rng.permutation(len(bucket.bounds) - 1)
            plan += [(bucket, some) for some in np.array_split(rows, bucket.batches)]
        return [plan[i] for i in rng.permutation(len(plan))]

    def __call__(self, index: int) -> Batch:
        """Batch `index`."""
        return self.part(index, whole).rows

    def part(self, index: int, share: Share) -> Part:
        """Rows of batch `index`."""
        epoch, place = divmod(index, self.batches)
        bucket, rows = self.plan(epoch)[place]
        first, last = share(bucket.rows)
        names: Any = (
            ("tokens", "labelled", "positions") if self.block else ("tokens", "targets", "weights")
        )
        names += ("positions", "segments") if self.packed and not self.block else ()
        batch: Batch = {
            name: np.zeros((last - first, bucket.length), DTYPES.get(name, np.int32))
            for name in names
        }
        for i, row in enumerate(rows[first:last]):
            at = 0
            for number, example in enumerate(
                bucket.members[bucket.bounds[row] : bucket.bounds[row + 1]], 1
            ):
                values = self.values(example, bucket.length - at)
                size = len(values["tokens"])
                values |= {"positions": np.arange(size), "segments": number}
                for name in names:
                    batch[name][i, at : at + size] = values[name]
                at += size
        return Part(batch, first, bucket.rows)

    def values(self, example: int, room: int) -> dict[str, Any]:
        """Arrays of one example: with blocks whole and filled, else its tokens and the next ones."""
        ids, counted = self.examples[example]
        if self.block is None:
            return {"tokens": ids[:-1], "targets": ids[1:], "weights": counted[1:]}
        extra = 0, min(-len(ids) % self.block, room - len(ids))
        tokens = np.pad(ids, extra, constant_values=self.filler)
        return {"tokens": tokens, "labelled": np.pad(counted, extra, mode="edge")}


def example_batches(
    examples: Examples,
    *,
    seed: int,
    batch_tokens: int,
    length: int,
    packed: bool = False,
    multiple: int = 1,
    prefetch: int = 2,
    block: int | None = None,
    filler: int = 0,
) -> Endless:
    """Batches without end, of every example once an epoch, in an order drawn for each epoch.

    Bucketed rows hold one example each, in batches of a few lengths. Packed rows hold as many as
    fit, the same ones in every epoch. `Endless.make.batches` is the number of batches of an epoch.

    Args:
      examples: the examples.
      seed: seed of the orders.
      batch_tokens: most positions of a batch, padding included; at least one row.
      length: most positions of a row, T.
      packed: whether rows are packed; batches then have `positions` and `segments` [B, T], which
        count from 1.
      multiple: number that divides the rows of every batch, such as that of devices.
      prefetch: batches made ahead.
      block: length of blocks; examples are then filled up to the end of their last block, as far as
        rows have room.
      filler: token that does so, and counts where the token before it does: a model learns to end
        its last block.

    Returns:
      An iterator over {"tokens", "targets", "weights"} [B, T], or with `block` {"tokens",
      "labelled", "positions"}; rows that a batch lacks have weights 0.
    """
    sizes = np.diff(examples.starts) - 1
    if block is not None:
        sizes = np.minimum(-(-(sizes + 1) // block) * block, length)

    def bucket(length: int, members: np.ndarray, counts: Any) -> Bucket:
        most = max(batch_tokens // length // multiple, 1) * multiple
        batches = -(-len(counts) // most)
        rows = -(-len(counts) // (batches * multiple)) * multiple  # of the fullest batch
        return Bucket(length, rows, batches, members, np.cumsum([0, *counts]))

    if packed:
        rows = pack(sizes, length)
        buckets = [bucket(length, np.concatenate(rows), [len(row) for row in rows])]
    else:
        lengths = bucket_lengths(sizes, length)
        which = np.searchsorted(lengths, sizes)
        groups = [(lengths[i], np.flatnonzero(which == i)) for i in np.unique(which)]
        buckets = [bucket(length, group, np.ones_like(group)) for length, group in groups]
    told = [examples.digest, seed, batch_tokens, length, packed, multiple]
    told += [] if block is None else [block, filler]
    digest = hashlib.sha256(json.dumps(told).encode()).hexdigest()
    return Endless(
        BatchMaker(examples, seed, packed, tuple(buckets), block, filler), prefetch, digest
    )


def bucket_lengths(sizes: Int64[np.ndarray, " M"], most: int) -> list[int]:
    """A few lengths for rows of these sizes: quantiles, rounded up to multiples of a power of two."""
    unit = max(8, 2 ** (int(sizes.max()).bit_length() - 4))
    ends = np.quantile(sizes, QUANTILES, method="higher")
    return sorted({min(-(-int(end) // unit) * unit, most) for end in ends})


def pack(sizes: Sequence[int] | np.ndarray, length: int) -> list[list[int]]:
    """Numbers of the examples of each row: the longest first, each in the fullest row that has room
    for it.
    """
    rows: list[list[int]] = []
    free: list[tuple[int, int]] = []  # room and number of each row, ascending
    for example in np.argsort(-np.asarray(sizes), kind="stable"):
        size = int(sizes[example])
        place = bisect_left(free, (size, -1))
        room, row = free.pop(place) if place < len(free) else (length, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(int(example))
        insort(free, (room - size, row))
    return rows
