"""Multiple choice: which of several continuations a model finds most probable.

Where likelihoods are bounds, all choices of a question are judged under the same times and the same hidden positions,
so that the noise of the draws falls on all alike.
"""

import dataclasses
import os
from collections.abc import Sequence

import numpy as np

from paradec_jax.evaluate.benchmarks.items import read_records
from paradec_jax.evaluate.bound import Span
from paradec_jax.evaluate.intervals import wilson
from paradec_jax.evaluate.likelihood import continuation_row
from paradec_jax.evaluate.spans import Scored, is_exact, likelihood_kind, room, score_spans
from paradec_jax.generate import tokenizer_of
from paradec_jax.store import Model

DRAWS = 128


@dataclasses.dataclass(frozen=True)
class Question:
    """A context, continuations of which one is right, and the number of that one."""

    context: str
    choices: tuple[str, ...]
    answer: int


@dataclasses.dataclass(frozen=True, eq=False)
class Chosen:
    """What `multiple_choice` returns.

    Attributes:
      picked: number of the most probable choice of each question.
      picked_by_character: of the choice that is most probable by character, as lm-eval's `acc_norm` picks.
      accuracy, accuracy_by_character: share of right picks.
      interval, interval_by_character: their 95% intervals (Wilson).
      scored: of each question, each choice's score.
      likelihood: "exact" or "bound".
      draws: of the bound; None where exact.
    """

    picked: tuple[int, ...]
    picked_by_character: tuple[int, ...]
    accuracy: float
    interval: tuple[float, float]
    accuracy_by_character: float
    interval_by_character: tuple[float, float]
    scored: tuple[tuple[Scored, ...], ...]
    likelihood: str
    draws: int | None


def read_questions(path: str | os.PathLike[str]) -> list[Question]:
    """Questions of a file of objects {"context": text, "choices": [text, ...], "answer": number from 0}.

    Raises:
      FileNotFoundError: no such file.
      ValueError: a line that is no such question; the message names it.
    """
    found = []
    for record in read_records(path):
        question = Question(record.text("context"), record.texts("choices"), record.number("answer"))
        try:
            check_question(question)
        except ValueError as error:
            raise ValueError(f"{record.where}: {error}") from error
        found.append(question)
    return found


def check_question(question: Question) -> None:
    """Refuses fewer than two choices, an empty one, or an answer that is none of them. Raises ValueError."""
    count = len(question.choices)
    if count < 2 or not all(question.choices) or not 0 <= question.answer < count:
        raise ValueError(
            f"a question needs two choices or more, none empty, and the number of one of them as its answer, "
            f"not {count} and {question.answer}"
        )


def multiple_choice(
    model: Model,
    questions: Sequence[Question],
    *,
    draws: int = DRAWS,
    seed: int = 0,
    batch: int = 8,
) -> Chosen:
    """Picks the most probable choice of each question.

    Args:
      model: with a tokenizer.
      questions: at least one; a choice follows its context as it is, so it begins with a blank where one is due.
      draws: of a bound, for each choice; all of a question share them.
      seed: of draws, and of initial latent states.
      batch: choices of a call.

    Raises:
      ValueError: no question, one that is refused, a choice longer than the model, or a model
        without likelihoods.
    """
    if not questions:
        raise ValueError("need at least one question")
    for question in questions:
        check_question(question)
    rows = [(i, choice) for i, question in enumerate(questions) for choice in question.choices]
    spans = [choice_span(model, questions[i].context, choice) for i, choice in rows]
    streams = [i for i, _ in rows]
    found = iter(score_spans(model, spans, draws=draws, streams=streams, seed=seed, batch=batch))
    scored = tuple(tuple(next(found) for _ in question.choices) for question in questions)
    picked = tuple(int(np.argmin([s.nats for s in of])) for of in scored)
    by_character = tuple(
        int(np.argmin([s.nats / len(text) for s, text in zip(of, question.choices, strict=True)]))
        for of, question in zip(scored, questions, strict=True)
    )
    right, right_by_character = (
        sum(pick == question.answer for pick, question in zip(picks, questions, strict=True))
        for picks in (picked, by_character)
    )
    count = len(questions)
    return Chosen(
        picked,
        by_character,
        right / count,
        wilson(right, count),
        right_by_character / count,
        wilson(right_by_character, count),
        scored,
        likelihood_kind(model),
        None if is_exact(model) else draws,
    )


def choice_span(model: Model, context: str, choice: str) -> Span:
    """The span that scores a continuation after a context, see `likelihood.continuation_row`."""
    row = continuation_row(tokenizer_of(model), model.token_spec, context, choice, room(model))
    return Span(row.ids, len(row.ids) - row.count)
