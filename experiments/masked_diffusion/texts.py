"""Rows of the studies: texts that a model draws, what a judge says of them, how varied they are.

A row belongs to weights and a sampler, not to a study. All of them lie in one file, and each is
drawn once, whichever study asks for it first; a study that was stopped goes on with the rows that
are missing.
"""

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.common.record import rows_begun, write_record
from experiments.masked_diffusion.drawing import draw, real_row
from experiments.masked_diffusion.held_out import HeldOut
from experiments.masked_diffusion.judge import Judgement, TextJudge
from experiments.masked_diffusion.text_measures import entropy
from paradec_jax import Model, facts, load, store
from paradec_jax.cli.output import progress
from paradec_jax.data.text import read_text, windows
from paradec_jax.decode.machine.setting import Setting
from paradec_jax.evaluate.cases import Source
from paradec_jax.evaluate.judge import check_judge
from paradec_jax.generate import tokenizer_of

Row = dict[str, Any]

GROUPS = 20  # of samples that are left out in turn
REAL = "real text"


@dataclasses.dataclass(frozen=True, eq=False)
class Line:
    """A row that a study asks for.

    Attributes:
      name: what the row belongs to, as a picture's legend has it.
      place: model folder, or name of a bundled model.
      setting: the sampler.
      dtype: of weights and activations.
    """

    name: str
    place: str
    setting: Setting
    dtype: str = "float32"


@dataclasses.dataclass(frozen=True)
class Drawing:
    """What all rows of a file share.

    Attributes:
      file: where the rows lie.
      model: whose tokenizer the texts come from.
      judge: a model that predicts the next token.
      text: real text, whose last part no model was trained on; without it there is no row of real
        text, no reverse perplexity and no bound.
      held_out: its share.
      samples: texts of a row.
      length: tokens of a text.
      rows: texts drawn together.
      seed: of all draws; sample i is drawn with the same key in every row.
    """

    file: Path
    model: str
    judge: str
    text: Path | None = None
    held_out: float = 0.1
    samples: int = 512
    length: int = 256
    rows: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        if self.samples < 2 or self.length < 4 or self.rows < 1:
            raise ValueError(
                f"samples must be at least 2, length 4 and rows 1, not {self.samples}, {self.length}, {self.rows}"
            )

    def shared(self) -> dict[str, Any]:
        """What must be the same for two rows to stand in one file."""
        text = None if self.text is None else hashlib.sha256(self.text.read_bytes()).hexdigest()
        fields = dataclasses.asdict(self) | {
            "text_sha256": text,
            "judge": store.names_of([self.judge])[0],
            "judge_sha256": store.fingerprint(self.judge),
        }
        return {k: v for k, v in fields.items() if k not in ("file", "model", "text", "rows")}


class Texts:
    """The rows of a file, drawn where they are missing."""

    def __init__(self, drawing: Drawing) -> None:
        """Reads the rows that are there.

        Raises:
          ValueError: a file of other options or of something else, a judge that is none, a text
            that has characters which the model does not know or no piece of the length.
        """
        self.drawing, self.shared = drawing, drawing.shared()
        self.rows: dict[str, Row] = rows_begun(drawing.file, self.shared) or {}
        judge, model = load(drawing.judge, dtype="float32"), load(drawing.model)
        check_judge(judge)
        tokenizer = tokenizer_of(model)
        held_out: list[list[int]] = []
        if drawing.text is not None:
            parts = read_text(drawing.text, tokenizer, drawing.held_out)[0].held_out
            if any((ids == model.token_spec.mask).any() for ids in parts):
                raise ValueError(
                    f"{drawing.text} holds characters that {drawing.model} does not know"
                )
            held_out = [ids.tolist() for ids in parts]
            self._pieces = windows(np.concatenate(parts), drawing.length)
        name, size = self.shared["judge"], tokenizer.vocab_size
        self.bench = TextJudge(judge, name, tokenizer, size, held_out, drawing.rows)
        self._fingerprints: dict[str, str] = {}
        self._loaded: tuple[tuple[str, str], Model] | None = None
        self._costs: dict[tuple[str, str], dict[str, float]] = {}

    def of(self, lines: Sequence[Line], title: str) -> list[Row]:
        """The rows of lines, in their order; last one of real text, where there is any.

        Raises:
          ValueError: two lines of one name and setting, a model of another tokenizer, or what a
            decoder refuses.
        """
        names = [(line.name, line.setting.label(), line.dtype) for line in lines]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"two rows are called {twice[0]}")
        rows, missing = [], [line for line in lines if self._key(line) not in self.rows]
        with progress() as report:
            advance = report(title, len(missing))
            for line in lines:
                if (key := self._key(line)) not in self.rows:
                    self._add(key, self._drawn(line))
                    advance(1)
                label = f"{line.name}, {line.setting.name}, {line.setting.label()}".removesuffix(
                    ", "
                )
                rows.append(self.rows[key] | {"line": line.name, "label": label})
        if self.bench.held_out:
            if REAL not in self.rows:
                self._add(REAL, self._real())
            rows.append(self.rows[REAL] | {"line": REAL, "label": REAL})
        return rows

    def _key(self, line: Line) -> str:
        """What tells rows of a file apart."""
        settings = json.dumps(line.setting.settings(), sort_keys=True)
        return f"{self._sha256(line.place)} {line.dtype} {type(line.setting.decoder).__name__} {settings}"

    def _sha256(self, place: str) -> str:
        if place not in self._fingerprints:
            self._fingerprints[place] = store.fingerprint(place)
        return self._fingerprints[place]

    def _add(self, key: str, row: Row) -> None:
        self.rows[key] = row | {"facts": facts.facts()}
        dtypes = [dtype for row in self.rows.values() for dtype in row["dtypes"]]
        write_record(self.drawing.file, self.shared, {"rows": self.rows}, dtypes=dtypes)

    def _model(self, line: Line) -> Model:
        """The model of a line; the last one is kept, for they may be large."""
        key = line.place, line.dtype
        if self._loaded is None or self._loaded[0] != key:
            self._loaded = None
            model = load(line.place, dtype=line.dtype)
            if not tokenizer_of(model).same_as(self.bench.tokenizer):
                raise ValueError(f"{line.place} has another tokenizer than {self.drawing.model}")
            self._loaded = key, model
        return self._loaded[1]

    def _cost(self, line: Line) -> dict[str, float]:
        """Nats a token of held-out text, once a model; nothing without text."""
        key, held_out = (line.place, line.dtype), self.bench.held_out
        if held_out and key not in self._costs:
            model, some = self._model(line), HeldOut(self.drawing.length, 64)
            self._costs[key] = some.per_token(model, model.params, self._pieces.reshape(-1))
        return self._costs.get(key, {})

    def _drawn(self, line: Line) -> Row:
        model, drawing = self._model(line), self.drawing
        source = Source(store.names_of([line.place])[0], model, line.setting)
        ids, row = draw(
            source, drawing.samples, drawing.length, rows=drawing.rows, seed=drawing.seed
        )
        facts_of = {"model_sha256": self._sha256(line.place), "dtypes": facts.dtypes(model.params)}
        row |= facts_of | self._cost(line)
        return row | self._measured(ids) | self.bench.reverse(ids)

    def _real(self) -> Row:
        """Real text in pieces, evenly spread: as many as samples, or as there are."""
        length, count = self.drawing.length, min(self.drawing.samples, len(self._pieces))
        pieces = windows(self._pieces.reshape(-1), length, count).tolist()
        return (
            real_row(length)
            | {"dtypes": []}
            | self._measured(pieces)
            | self.bench.reverse_of_real(pieces)
        )

    def _measured(self, ids: list[list[int]]) -> Row:
        judged = self.bench.judgement(ids)
        return self.bench.measures(ids, judged) | {"left_out": left_out(ids, judged)}


def left_out(
    ids: list[list[int]], judged: Judgement, groups: int = GROUPS
) -> dict[str, list[float]]:
    """Log-perplexity and 4-gram entropy of a row without each group of its samples; sample i is of
    group i mod G.

    They give the interval of whatever is computed from several rows, whose samples share their keys
    (`text_measures.jackknife`).
    """
    without: dict[str, list[float]] = {"log_perplexity": [], "fourgram_entropy": []}
    weight = np.sign(judged.counted)
    nats = np.where(weight > 0, judged.nats, 0)
    groups = min(groups, len(ids))
    for group in range(groups):
        others = np.arange(len(ids)) % groups != group
        without["log_perplexity"].append(
            float((nats * weight)[others].sum() / weight[others].sum())
        )
        without["fourgram_entropy"].append(entropy([ids[i] for i in np.flatnonzero(others)], 4))
    return without
