"""Measures of models and of drawn texts, from files that you bring; `docs/measures.md` says what each one means.

`python -m experiments.benchmarks.measure ...`, for instance

    lambada lambada_test.jsonl --model DIR                       {"text": passage} a line
    choices questions.jsonl --model DIR                          {"context": .., "choices": [..], "answer": 0} a line
    texts drawn.jsonl --judge DIR --real input.txt               {"text": drawn text} a line
    mauve reference.npy sampled.npy                              features [texts, D] of both

The result is printed as JSON, and written beside what made it with --out.
"""

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro
from tyro.conf import OmitSubcommandPrefixes, Positional, arg

from experiments.common.record import write_record
from paradec_jax import store
from paradec_jax.data.text import read_text
from paradec_jax.evaluate.benchmarks.items import read_records
from paradec_jax.evaluate.choices import DRAWS as CHOICE_DRAWS
from paradec_jax.evaluate.choices import multiple_choice, read_questions
from paradec_jax.evaluate.intervals import ends
from paradec_jax.evaluate.judge import judge_texts
from paradec_jax.evaluate.lambada import lambada, read_passages
from paradec_jax.evaluate.mauve import SCALING, mauve
from paradec_jax.evaluate.ngrams import ORDER, SMOOTHING, reverse_perplexity
from paradec_jax.evaluate.spans import DRAWS, is_exact
from paradec_jax.evaluate.text_measures import has_sacrebleu, self_bleu
from paradec_jax.generate import tokenizer_of

ModelPath = Annotated[str, arg(metavar="DIR|NAME")]
Out = Annotated[Path | None, arg(metavar="FILE")]
Result = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Lambada:
    """Accuracy and perplexity of the last words of passages.

    Attributes:
      path: the passages.
      model: any model folder, or the name of a bundled model.
      draws: of the bound, where the model fills masks; 32 when left out.
      limit: passages at most, the first ones of the file.
      batch: passages of a call.
      seed: of draws and initial states.
      out: file of the result.
    """

    path: Positional[Path]
    model: ModelPath
    draws: int | None = None
    limit: int | None = None
    batch: int = 8
    seed: int = 0
    out: Out = None

    def measured(self) -> Result:
        """The result."""
        passages = _first(read_passages(self.path), self.limit)
        model = store.load(self.model)
        draws = _draws(model, self.draws, DRAWS)
        found = lambada(model, passages, draws=draws, seed=self.seed, batch=self.batch)
        return dataclasses.asdict(found) | {"perplexity_interval": ends(found.perplexity_interval)}


@dataclasses.dataclass(frozen=True)
class Choices:
    """Accuracy on questions with several continuations to choose from.

    Attributes:
      path: the questions.
      model: any model folder, or the name of a bundled model.
      draws: of the bound, where the model fills masks; 128 when left out.
      limit: questions at most, the first ones of the file.
      batch: choices of a call.
      seed: of draws and initial states.
      out: file of the result.
    """

    path: Positional[Path]
    model: ModelPath
    draws: int | None = None
    limit: int | None = None
    batch: int = 8
    seed: int = 0
    out: Out = None

    def measured(self) -> Result:
        """The result."""
        questions = _first(read_questions(self.path), self.limit)
        model = store.load(self.model)
        draws = _draws(model, self.draws, CHOICE_DRAWS)
        found = multiple_choice(model, questions, draws=draws, seed=self.seed, batch=self.batch)
        return {"questions": len(questions)} | {
            name: getattr(found, name)
            for name in (
                "accuracy",
                "interval",
                "accuracy_by_character",
                "interval_by_character",
                "likelihood",
                "draws",
            )
        }


@dataclasses.dataclass(frozen=True)
class Texts:
    """What a judge says of drawn texts, how varied they are, and what of real text they miss.

    Attributes:
      path: the texts.
      judge: any model that predicts the next token, a folder or the name of a bundled one.
      definition: of generative perplexity, "sdtt" or "mdlm".
      real: a text whose last tenth is held against them.
      batch: texts of a call.
      out: file of the result.
    """

    path: Positional[Path]
    judge: ModelPath
    definition: str = "mdlm"
    real: Path | None = None
    batch: int = 8
    out: Out = None

    def measured(self) -> Result:
        """The result."""
        texts = [record.text("text") for record in read_records(self.path)]
        judge = store.load(self.judge)
        judged = judge_texts(judge, texts, definition=self.definition, batch=self.batch)
        variety = dataclasses.asdict(judged.variety)
        intervals = {name: ends(variety[name]) for name in ("unigram_interval", "fourgram_interval")}
        bleu = self_bleu([texts]) if has_sacrebleu() and len(texts) > 1 else None
        reverse: Result = {"reverse_perplexity": None}
        if self.real is not None:
            tokenizer = tokenizer_of(judge)
            real = [ids.tolist() for ids in read_text(self.real, tokenizer)[0].held_out]
            value = reverse_perplexity(tokenizer.encode_batch(texts), real, tokenizer.vocab_size)
            reverse = {"reverse_perplexity": value, "reverse_order": ORDER, "reverse_smoothing": SMOOTHING}
        return {
            "samples": len(texts),
            "judge_perplexity": judged.perplexity,
            "interval": ends(judged.interval),
            "judge_definition": judged.definition,
            "judge_cut": judged.cut,
            **(variety | intervals),
            "self_bleu": bleu,
            **reverse,
        }


@dataclasses.dataclass(frozen=True)
class Mauve:
    """MAUVE of sampled texts against reference texts, from their features.

    Attributes:
      reference, sampled: arrays [texts, D] of one D, as `numpy.save` writes them.
      scaling: c.
      clusters: a tenth of the smaller collection when left out.
      out: file of the result.
    """

    reference: Positional[Path]
    sampled: Positional[Path]
    scaling: float = SCALING
    clusters: int | None = None
    out: Out = None

    def measured(self) -> Result:
        """The result."""
        arrays = [_features(path) for path in (self.reference, self.sampled)]
        return dataclasses.asdict(mauve(*arrays, clusters=self.clusters, scaling=self.scaling))


def _draws(model: store.Model, draws: int | None, usual: int) -> int:
    if draws is not None and is_exact(model):
        raise ValueError("--draws is for models that fill masks: the likelihoods of this one are exact")
    return usual if draws is None else draws


def _features(path: Path) -> np.ndarray:
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    found = np.load(path)
    if not isinstance(found, np.ndarray) or not np.issubdtype(found.dtype, np.floating):
        raise ValueError(f"{path} must hold one array of floating-point numbers")
    return found


def _first(items: Sequence[Any], limit: int | None) -> Sequence[Any]:
    if limit is not None and limit < 1:
        raise ValueError(f"--limit must be at least 1, not {limit}")
    return items[:limit]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; user errors are one sentence on standard error and exit code 1."""
    task: Lambada | Choices | Texts | Mauve = tyro.cli(
        OmitSubcommandPrefixes[Lambada | Choices | Texts | Mauve],  # type: ignore[misc, arg-type]
        args=argv,
        prog="measure",
        description=__doc__,
    )
    try:
        if task.out is not None and not task.out.absolute().parent.is_dir():
            raise ValueError(
                f"--out cannot write {task.out}: there is no folder {task.out.absolute().parent}"
            )
        result = task.measured()
    except (ValueError, OSError) as error:
        print(f"measure: {error}", file=sys.stderr)
        return 1
    print(json.dumps(result, indent=2))
    if task.out is not None:
        write_record(task.out, task, {"result": result})
    return 0


if __name__ == "__main__":
    sys.exit(main())
