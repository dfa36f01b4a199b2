"""Lines of JSON as training examples, tokenised once into mapped arrays.

Of the lines of `data.lines` these tokens count: of messages the assistant's turns, written by the
model's template; of a prompt and its response the response and the stop after it; of a text all but
begin-of-text. A prompt is used as it is, as `paradec generate PROMPT` does. Where a prompt is
enough, a line may have no response, or end in a user's
turn: none of it counts.
"""

import collections
import dataclasses
import glob
import hashlib
import itertools
import json
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jaxtyping import Bool, Int32, Int64

from paradec_jax.data.lines import ANSWERS, line_of
from paradec_jax.disk.folders import foreign, staged
from paradec_jax.io import AnyPath, json_line, read_object, regular, sha256_of
from paradec_jax.records import record
from paradec_jax.text import chat

FORMAT = 2  # of the arrays in a folder
CHUNK = 1000  # lines that are tokenised together
Row = tuple[list[int], list[bool]]


@record
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
    source: AnyPath,
    model: Any,
    *,
    folder: AnyPath,
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
    rules = [length, long, skip_bad, prompts, dataclasses.asdict(model.token_spec)]
    rules += [model.chat_template, dict(model.special_tokens), model.tokenizer.digest()]
    digest = hashlib.sha256(json.dumps([FORMAT, *rules]).encode())
    for path in files:
        digest.update(sha256_of(path).encode())
    place = Path(folder) / digest.hexdigest()[:16]
    if place.exists() and foreign(place):
        place.rename(f"{place}.{uuid.uuid4().hex}")  # nothing is replaced
        print(f"{place} is not as it was written: its tokens are made again from the lines")
    if not place.exists():
        with staged(place) as temporary:
            counts = _write(temporary, _rows_of(files, model, prompts, skip_bad), length, long)
            if not (temporary / "ids").stat().st_size:
                less = ", ".join(f"{n} {name}" for name, n in counts.items())
                raise ValueError(f"data: {', '.join(map(str, files))} gives no example ({less})")
            rule = ""  # how the counted words of messages are found
            if template := model.chat_template:
                marks = "endgeneration" in chat.reads(template)
                rule = (
                    f"of messages by the template's {'generation marks' if marks else 'prefixes'}"
                )
            text = json.dumps({"counts": counts, "rule": rule})
            (temporary / "about.json").write_text(f"{text}\n", encoding="utf-8")
    return Examples(
        np.memmap(place / "ids", np.int32, "r"),
        np.memmap(place / "counted", bool, "r"),
        np.load(place / "starts.npy"),
        digest.hexdigest(),
        **read_object(place / "about.json"),
    )


def files_of(source: AnyPath) -> list[Path]:
    """The files of a source in order. Raises ValueError where there is none."""
    path = Path(source)
    pattern = Path(glob.escape(str(path))) / "*.jsonl" if path.is_dir() else path
    files = [path] if path.is_file() else sorted(map(regular, glob.glob(str(pattern))))
    if not files:
        raise ValueError(f"data: there is no file {pattern}")
    return files


def _write(
    folder: Path, lines: Iterable[tuple[list[Row], list[str]]], length: int, long: str
) -> dict[str, int]:
    """Writes the ids of lines, which count, and where each example starts; returns
    `Examples.counts`.
    """
    counts: collections.Counter[str] = collections.Counter()
    starts = [0]
    with (folder / "ids").open("wb") as ids, (folder / "counted").open("wb") as counted:
        for rows, notes in lines:
            counts.update(dict.fromkeys(("lines", *notes), 1))
            for row, marks in rows:
                if len(row) > length:
                    fate = "cut" if long == "cut" and any(marks[1:length]) else "dropped"
                    counts[fate] += 1
                    if fate == "dropped":
                        continue
                np.asarray(row[:length], np.int32).tofile(ids)
                np.asarray(marks[:length], bool).tofile(counted)
                starts.append(starts[-1] + min(len(row), length))
    np.save(folder / "starts.npy", starts)
    return counts


def _rows_of(
    files: Sequence[Path], model: Any, prompts: bool, skip_bad: bool
) -> Iterator[tuple[list[Row], list[str]]]:
    """What `encoded` gives of all lines but blank ones, made by threads. Raises ValueError unless
    bad lines are left out.
    """

    def one(numbered: tuple[int, bytes]) -> tuple[list[Row], list[str]] | None:
        number, data = numbered
        where = f"line {number} of {path}"
        try:
            record = json_line(data, where)
            return None if record is None else encoded(record, model, prompts)
        except ValueError as error:
            if skip_bad:
                return [], ["skipped"]
            raise (
                error if str(error).startswith(where) else ValueError(f"{where}: {error}")
            ) from error

    with ThreadPoolExecutor() as pool:
        for path in files:
            with path.open("rb") as file:
                lines = enumerate(file, 1)
                while chunk := list(itertools.islice(lines, CHUNK)):
                    yield from filter(None, pool.map(one, chunk))


def encoded(record: Mapping[str, Any], model: Any, prompts: bool) -> tuple[list[Row], list[str]]:
    """Ids of a line and which of them count, and what is to be said of it.

    A conversation is one example where each answer's prompt begins with the text before it, and
    several elsewhere.

    Raises:
      ValueError: a line that cannot be used; the message names the field.
    """
    spec, words = model.token_spec, model.tokenizer
    kind, content, answer, passed = line_of(record)
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
        # As a model's own words follow a prompt that has been read.
        added = words.encode_after(before, text)
        ids = words.begun(words.encode(before) + added, bos)
        first = max(len(ids) - len(added), bos in ids[:1])
        # A text may have brought its stop token, written out.
        if not alone and ids[-1:] and ids[-1] not in spec.stop:
            ids += stop
        counted = [i >= first for i in range(len(ids))]
        if not (alone or any(counted[1:])):
            continue
        last = words.encode(text.rstrip())[-1:]
        if not (alone or stop or any(i in spec.stop or words.stands_alone(i) for i in last)):
            notes.append("without an end of the turn that counts")
        whole, marks = rows[-1]
        if ids[: len(whole)] == whole:  # the prompt of this answer begins with the row before
            counted[: len(marks)] = rows.pop()[1]
        rows.append((ids, counted))
    if not rows[-1][0] and not alone:
        raise ValueError(f'"{kind}" has no turn of an assistant or no text that the loss counts')
    return rows, notes
