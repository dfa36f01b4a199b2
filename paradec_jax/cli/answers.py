"""Rows of `paradec compare` of families that answer: made in groups, kept in a file, and not made
again.
"""

import dataclasses
import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paradec_jax import facts, store
from paradec_jax.cli.output import progress, write_json
from paradec_jax.data.problems import Problem, exact_answers, read_problems, rule_of
from paradec_jax.decode.machine.setting import Setting
from paradec_jax.evaluate.cases import Source
from paradec_jax.evaluate.compare import ROWS, TIMED, Row, compare
from paradec_jax.families import Family, choose
from paradec_jax.generate import NEW_TOKENS, lacks_head
from paradec_jax.io import text_of

GROUP = (
    3  # settings that are decoded and timed, next to the baseline, before their rows are written
)


def answers(
    family: Family,
    places: Mapping[str, str],
    models: Mapping[str, store.Model],
    seed: int,
    path: str | None,
    adapter: str | None = None,
    *,
    data: str = "unseen",
    problems: int = 200,
    timed: int = TIMED,
    new_tokens: int | None = None,
    batch: int = ROWS,
    decoder: Sequence[str] = (),
    judge: str | None = None,
) -> list[list[Row]]:
    """The rows of each model, of decoders on the same problems; the last eight arguments are
    options of the command.

    Args:
      family, places, models: family of the models; where each lies and what it is, by its name in
        the rows.
      path: JSON file of rows that are not made again; None or "-" for none.
      adapter: folder of the adapter that the models have.
    """
    items, settings = read_problems(data), _settings(family, decoder)
    rule = None if items[0].solution is None else rule_of(items)
    budget = NEW_TOKENS if rule is None and new_tokens is None else new_tokens
    items = items[:problems]
    file = None if path == "-" else path
    made: Row = {
        "problems": hashlib.sha256(repr(items).encode()).hexdigest(),
        "seed": seed,
        "timed": timed,
    }
    made |= {"new_tokens": budget, "device": facts.device()["kind"]}
    made |= {
        "judge": judge and store.digest_of(judge),
        "adapter": adapter and store.digest_of(adapter),
    }
    made_with: dict[str, Row] = {}
    for name, place in places.items():
        made_with[name] = {
            "model": store.digest_of(place),
            "dtype": models[name].config.dtype,
        } | made
    rows = _begun(file, made_with) if file and Path(file).exists() else {}
    options: dict[str, Any] = {"seed": seed, "budget": budget, "timed": timed, "rows": batch}
    options |= {"score": rule and exact_answers, "judge": judge and store.load(judge)}
    more = {"data": data, "rule": rule, "seed": seed, "judge": judge and store.names_of([judge])[0]}
    tables = []
    for name, model in models.items():
        suited: dict[Any, Setting] = {}
        for of in settings:
            if not lacks_head(model, of.decoder):
                suited.setdefault((name, of.name, of.label()), of)
        if any(lacks_head(model, of.decoder) for of in settings):
            print(
                f"{name} has no residual head: decoders that ask one are left out", file=sys.stderr
            )
        missing = suited.keys() - rows.keys()
        others = [key for key, of in suited.items() if key in missing and not of.baseline]
        size = GROUP if file else len(suited)
        groups = [others[i : i + size] for i in range(0, len(others), size)] or [[]] * len(missing)
        model, asked = _rendered(model, items)
        found = None
        for group in groups:
            chosen = {key: of for key, of in suited.items() if of.baseline or key in group}
            sources = [Source(name, model, of) for of in chosen.values()]
            with progress() as report:
                found = compare(sources, asked, **options, before=found, report=report)
            for i, (key, row) in enumerate(zip(chosen, found.rows, strict=True)):
                right = rule and "".join("01"[exact] for exact in found.exact[i].astype(int))
                row |= more | {"right": right, "facts": found.facts, "made_with": made_with[name]}
                rows.setdefault(key, row)
            if file:
                write_json(list(rows.values()), file)
        tables.append([rows[key] for key in suited])
    return tables


def _settings(family: Family, words: Sequence[str]) -> list[Setting]:
    """The rows of a family's table; of those that words name, and the baseline, where there are
    words.
    """
    settings = [of for of in family.settings if of.baseline or not words]
    for word in words:
        changed = choose(family.name, word)
        named = [of for of in family.settings if of.name == changed.name and not of.baseline]
        settings += [changed] if word.split()[1:] else named
    return settings


def _rendered(
    model: store.Model, problems: Sequence[Problem]
) -> tuple[store.Model, Sequence[Problem]]:
    """Problems with messages as texts of the model's template, and the model with the special
    tokens of these.
    """
    if isinstance(problems[0].prompt, str):
        return model, problems
    from paradec_jax.text.chat import as_prompts  # takes in Jinja, which texts do not need

    texts, spec = as_prompts(model, [item.prompt for item in problems])
    rendered = [
        dataclasses.replace(of, prompt=text) for of, text in zip(problems, texts, strict=True)
    ]
    return dataclasses.replace(model, token_spec=spec), rendered


def _begun(
    file: str, made_with: Mapping[str, Mapping[str, Any]]
) -> dict[tuple[str, str, str], Row]:
    """The rows of a file by model, decoder and label. Raises ValueError for those of other models
    or options.
    """
    try:
        rows = json.loads(text_of(Path(file)))
        begun = {
            (row["model"], row["decoder"], row["label"]): {"megabytes": None} | row for row in rows
        }
        before = {row["model"]: row["made_with"] for row in rows}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{file} holds no rows to go on from ({error!r}): name another file"
        ) from None
    for name, old in before.items():
        now = made_with.get(name, old | {"model": None})
        if differing := [key for key in now if now[key] != old.get(key)]:
            raise ValueError(
                f"{file} has rows of {name} with other {', '.join(differing)}: name another"
            )
    return begun
