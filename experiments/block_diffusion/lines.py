"""Rows of the studies of block diffusion: a model, a decoder and its knobs on the problems of a
ground.

A row belongs to weights and a setting, not to a study. Those of a ground lie in one file, and each
is decoded once, whichever study asks for it first; a study that was stopped goes on with the rows
that are missing. Rows of one backbone, whatever heads they have, are decoded beside its static
decoding of one token a step, their baseline.
"""

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments.block_diffusion.problems import Problems
from experiments.common.record import rows_begun, write_record
from paradec_jax import BlockDenoising, Model, load, store
from paradec_jax.cli.output import progress
from paradec_jax.decode.machine.setting import Setting
from paradec_jax.evaluate.cases import Source
from paradec_jax.evaluate.compare import compare
from paradec_jax.evaluate.intervals import bootstrap, ends, paired, ratio
from paradec_jax.generate import lacking

Row = dict[str, Any]
GROUP = 8  # settings that are decoded together, next to the baseline
DIGEST = 8  # hexadecimal digits that stand for a text


@dataclasses.dataclass(frozen=True, eq=False)
class Line:
    """A row that a study asks for.

    Attributes:
      name: what its weights are called, as a picture's legend has it.
      place: model folder, or name of a bundled model.
      setting: the decoder; with head None it asks the head of the folder.
    """

    name: str
    place: str
    setting: Setting

    @property
    def label(self) -> str:
        """Name and setting."""
        return f"{self.name}, {self.setting.name}, {self.setting.label()}".removesuffix(", ")


def baseline_of(temperature: float) -> Setting:
    """Static decoding, one token a step."""
    knobs = BlockDenoising.Knobs(temperature=temperature)
    return Setting("block", BlockDenoising(rule="static"), knobs, baseline=True)


def digest(*trees: Any) -> str:
    """Names arrays and what else is said of a model."""
    found = hashlib.sha256()
    for leaf in jax.tree.leaves(trees):
        if isinstance(leaf, str):
            found.update(leaf.encode())
        else:
            array = np.asarray(leaf)
            found.update(f"{array.shape} {array.dtype}".encode() + array.tobytes())
    return found.hexdigest()


@dataclasses.dataclass(frozen=True, eq=False)
class Loaded:
    """A model of a line, and what names its backbone and its head."""

    model: Model
    backbone: str
    head: str | None


class Rows:
    """The rows of a file, decoded where they are missing."""

    def __init__(self, path: Path, problems: Problems, kept: dict[str, Any]) -> None:
        """Reads the rows that are there.

        Args:
          path: of the file.
          problems: of the ground.
          kept: what must be the same for two rows to stand in one file.

        Raises:
          ValueError: a file of other options, or of something else.
        """
        self.path, self.problems, self.kept = path, problems, kept
        self.rows: dict[str, Row] = rows_begun(path, kept) or {}
        self._models: dict[str, Loaded] = {}

    def of(self, lines: Sequence[Line]) -> list[Row]:
        """The rows of lines, in their order, each beside its rivals (`beside`).

        Raises:
          ValueError: two lines of one label, a model of another family, or what a decoder refuses.
        """
        labels = [line.label for line in lines]
        if twice := sorted({label for label in labels if labels.count(label) > 1}):
            raise ValueError(f"two rows are called {twice[0]}")
        missing = [line for line in lines if self._key(line) not in self.rows]
        groups: dict[str, list[Line]] = {}
        for line in missing:
            groups.setdefault(self.loaded(line).backbone, []).append(line)
        for group in groups.values():
            for first in range(0, len(group), GROUP):
                self._decode(group[first : first + GROUP])
        found = [
            {
                "label": line.label,
                "line": line.name,
                "block": of.model.network.block,
                "backbone": of.backbone,
            }
            | self.rows[self._key(line)]
            for line in lines
            for of in [self.loaded(line)]
        ]
        return beside(found)

    def loaded(self, line: Line) -> Loaded:
        """The model of a line.

        Raises:
          ValueError: a model of another family.
        """
        if line.place not in self._models:
            model = load(line.place, dtype="float32")
            if model.family != "block_diffusion":
                raise ValueError(
                    f"{line.place} is of family {model.family}; these studies are of block diffusion"
                )
            about = f"{model.config} {model.token_spec}"
            head = None if model.head is None else digest(model.head.params, f"{model.head.config}")
            self._models[line.place] = Loaded(model, digest(model.params, about), head)
        return self._models[line.place]

    def _key(self, line: Line) -> str:
        """What tells rows of a file apart."""
        found, decoder = self.loaded(line), line.setting.decoder
        if lacking(found.model, decoder):
            raise ValueError(
                f"{line.place} has no residual head, which {line.label} asks: train one (recipes/head.sh)"
            )
        asks = "head" in decoder.further_networks and decoder.head is None
        settings = json.dumps(line.setting.settings(), sort_keys=True)
        return f"{found.backbone} {found.head if asks else '-'} {type(decoder).__name__} {settings}"

    def _decode(self, lines: Sequence[Line]) -> None:
        """Decodes lines of one backbone beside its baseline, and writes the file."""
        start = dataclasses.replace(lines[0], setting=baseline_of(self.problems.temperature))
        others = [line for line in lines if self._key(line) != self._key(start)]
        every = [start, *others]
        sources = [
            Source(store.names_of([line.place])[0], self.loaded(line).model, line.setting)
            for line in every
        ]
        with progress() as report:
            result = compare(
                sources,
                self.problems.prompts,
                seed=self.kept["seed"],
                budget=self.problems.budget,
                score=self.problems.score,
                timed=0,
                rows=self.problems.rows,
                report=report,
            )
        assert result.calls is not None
        blocks = (
            None
            if self.problems.blocks is None
            else [self.problems.blocks(texts) for texts in result.texts]
        )
        for i, line in enumerate(every):
            row = dict(result.rows[i]) | {
                "right": "".join("01"[int(right)] for right in result.exact[i]),
                "calls": " ".join(map(str, result.calls[i].tolist())),
                "texts": "".join(
                    hashlib.sha256(t.encode()).hexdigest()[:DIGEST] for t in result.texts[i]
                ),
                "facts": result.facts,
            }
            if blocks is not None:
                row |= of_blocks(blocks[i], blocks[0])
            self.rows.setdefault(self._key(line), row)
        write_record(self.path, self.kept, {"rows": self.rows}, dtypes=result.facts["dtypes"])


def of_blocks(right: np.ndarray, base: np.ndarray) -> Row:
    """Share of right blocks, and its difference to the baseline's on the same texts; ranges by
    bootstrap over texts.

    Args:
      right, base: which blocks of each text are right, [N, blocks].
    """
    own, other = right.mean(axis=1), base.mean(axis=1)
    return {
        "blocks": int(right.size),
        "right_blocks": int(right.sum()),
        "block_share": float(own.mean()),
        "block_share_interval": ends(bootstrap(own)),
        "block_difference": float((own - other).mean()),
        "block_difference_interval": ends(bootstrap(own - other)),
    }


def beside(rows: Sequence[Row]) -> list[Row]:
    """Rows, each with what it gains over its rivals among them, on the same problems.

    ::

        zero    the same decoder with head "zero", where the row has a trained one
        base    `BlockDenoising` of the same rule and knobs, which a speculative decoder writes token for token
        first   the first row, where the backbone is another
    """
    found = []
    for row in rows:
        told = dict(row)
        if row["settings"].get("head", "") is None:
            told |= _against(
                "zero", row, _same(row, rows, row["decoder"], {"head": "zero", "mix": "sum"})
            )
        if row["decoder"] == "residual_speculative":
            told |= _against("base", row, _same(row, rows, "block", {}))
        if row is not rows[0]:
            told |= _against("first", row, rows[0])
        found.append(told)
    return found


def _same(row: Row, rows: Iterable[Row], decoder: str, changes: Row) -> Row | None:
    """The row of a decoder whose settings are those of another, as far as it has them and but for
    changes.
    """
    wanted = row["settings"] | changes

    def fits(other: Row) -> bool:
        return (
            other["decoder"] == decoder
            and other["backbone"] == row["backbone"]
            and all(wanted.get(name) == value for name, value in other["settings"].items())
        )

    return next((other for other in rows if fits(other)), None)


def _against(name: str, row: Row, other: Row | None) -> Row:
    """What differs between two rows, under names that begin with `name`; nothing without the other."""
    if other is None or len(other["right"]) != len(row["right"]):
        return {}
    right, rival = (np.asarray([letter == "1" for letter in of["right"]]) for of in (row, other))
    calls, of_rival = (np.asarray(of["calls"].split(), int) for of in (row, other))
    pair = paired(right, rival)
    pieces = [
        [of["texts"][i : i + DIGEST] for i in range(0, len(of["texts"]), DIGEST)]
        for of in (row, other)
    ]
    return {
        f"{name}_label": other["label"],
        f"{name}_difference": pair.difference,
        f"{name}_difference_interval": list(pair.interval),
        f"{name}_p_value": pair.p_value,
        f"{name}_fewer_calls": float(of_rival.sum() / calls.sum()),
        f"{name}_fewer_calls_interval": ends(ratio(of_rival, calls)),
        f"{name}_equal_texts": float(np.mean([a == b for a, b in zip(*pieces, strict=True)])),
    }
