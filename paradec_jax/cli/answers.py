"""Rows of `paradec compare`: made in groups, kept in a file, and not made again."""

import dataclasses
import hashlib
import itertools
import json
import operator
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import jax
import numpy as np
from tyro.conf import Positional, UseAppendAction, arg

from paradec_jax import facts, store
from paradec_jax.cli.output import JsonPath, progress, write_json
from paradec_jax.config import Ranged
from paradec_jax.data.problems import Problem, exact_answers, read_problems, rule_of
from paradec_jax.decode.machine import Setting
from paradec_jax.evaluate.cases import Source
from paradec_jax.evaluate.compare import ROWS, TIMED, compare
from paradec_jax.evaluate.fields import Row
from paradec_jax.evaluate.tables import TABLES
from paradec_jax.families import choose
from paradec_jax.generate import NEW_TOKENS, lacking
from paradec_jax.io import text_of
from paradec_jax.records import choices

LINE = "{model}: {decoder}, {label}: {tokens_per_network_call:.2f} tokens a call"
GROUP = 3  # settings that are decoded and timed beside the baseline before their rows are written
LATER = ("megabytes", "parameters", "wide")  # fields that files of earlier versions lack
Key = tuple[str, str, str]  # of a row: model, decoder, label


@choices
class Options(Ranged):
    """What to compare.

    Attributes:
      model: model folders, names of bundled models, or what else `paradec_jax.load` takes; or a
        family (recurrent_depth, causal, block_diffusion), which stands for its bundled models, or
        "all" for those of all families. Models of several families stand in one table, compared
        with the first model one by one. --model may stand before them.
      data: JSON lines with "prompt", and "answer" or "response" where there is one; or with
        "messages", which the model's chat template makes a prompt of, the last one the answer where
        it is an assistant's. A text is right that has the answer's number after the last "####", or
        else content of the last \\boxed{}, or else whole text, as the first answer has it. "unseen"
        and "tuning" are word problems of the package: 1,000 that nothing was chosen on, and 200 for
        choosing settings.
      problems: number of problems, the first of the file.
      seed: of all draws.
      timed: problems of the speed measurement.
      wide: problems that are decoded in one call for a second measurement of speed; none by
        default.
      new_tokens: tokens of an answer at most; room for the longest answer of the file by default,
        or 200 without any.
      batch: problems decoded together where speed is not measured.
      decoder: decoder to compare with one by one, as of `paradec generate`: all rows of a name, or
        one with options, "jacobi --block 8"; may be given several times. The whole table of the
        family by default, and where models are of several families those rows of it that are cheap.
      judge: model that judges texts, a folder or the name of a bundled one.
      dtype: float32 or bfloat16, of parameters and computation; as stored by default.
      adapter: folder of a LoRA adapter in PEFT's layout, for each of the models.
      json: print nothing but a list of JSON objects, one a row; with a PATH that ends in .json,
        write the list there as well as printing the table. Rows are written as soon as they are
        known, and the same command goes on with those that are missing.
    """

    model: Positional[Annotated[tuple[str, ...], arg(metavar="SOURCE")]] = ("recurrent_depth",)
    data: Annotated[str, arg(metavar="FILE|NAME")] = "unseen"
    problems: int = 200
    seed: int = 1
    timed: int = TIMED
    wide: int | None = None
    new_tokens: int | None = None
    batch: int = ROWS
    decoder: UseAppendAction[tuple[str, ...]] = ()
    judge: Annotated[str | None, arg(metavar="SOURCE")] = None
    dtype: str | None = None
    adapter: Annotated[str | None, arg(metavar="FOLDER")] = None
    json: JsonPath = None

    @property
    def file(self) -> str | None:
        """File of rows that are not made again."""
        return None if self.json == "-" else self.json


def answers(
    options: Options,
    places: Mapping[str, str],
    models: Mapping[str, store.Model],
    tables: Mapping[str, Sequence[Setting]] = TABLES,
) -> list[list[Row]]:
    """The rows of each table, of decoders on the same problems: a table a model, or one of all
    models where they are of several families.

    In one table the baseline is the first model's, and `equals_greedy` is the share of texts that
    the row's own model writes one by one.

    Args:
      options: options of the command.
      places, models: where each model lies and what it is, by its name in the rows.
      tables: settings by family, or by name of a model.

    Raises:
      ValueError: problems as messages, of which templates of several families make different texts.
    """
    items = read_problems(options.data)
    rule = None if items[0].solution is None else rule_of(items)
    budget = NEW_TOKENS if rule is None and options.new_tokens is None else options.new_tokens
    items = items[: options.problems]
    made_with = _made_with(options, items, budget, places, models)
    rows = _begun(options.file, made_with) if options.file and Path(options.file).exists() else {}
    judge = store.load(options.judge) if options.judge else None
    shared = {
        "data": options.data,
        "rule": rule,
        "seed": options.seed,
        "judge": options.judge and store.names_of([options.judge])[0],
    }
    shared_base = len({model.family for model in models.values()}) > 1
    if shared_base and not isinstance(items[0].prompt, str):
        raise ValueError("models of several families are compared on prompts, not on messages")
    found: list[list[Row]] = []
    first: list[Source] = []  # in one table, what models after the first are compared with
    before = None
    for name, model in models.items():
        suited = _suited(name, model, options.decoder, tables)
        model, asked = _rendered(model, items)
        alone: Sequence[str] = ()  # what the model writes one by one
        before = before if shared_base else None
        for group in _groups(suited, suited.keys() - rows.keys(), options.file is not None):
            if first and alone:
                group = {key: of for key, of in group.items() if not of.baseline}
            sources = [
                Source(name, model, dataclasses.replace(of, baseline=False) if first else of)
                for of in group.values()
            ]
            with progress() as report:
                before = compare(
                    [*first, *sources],
                    asked,
                    seed=options.seed,
                    budget=budget,
                    score=exact_answers if rule else None,
                    judge=judge,
                    timed=options.timed,
                    wide=options.wide or 0,
                    rows=options.batch,
                    before=before,
                    report=report,
                )
            made = [*zip(group.items(), before.texts[len(first) :], strict=True)]
            alone = next((texts for (_, of), texts in made if of.baseline), alone)
            for i, ((key, setting), texts) in enumerate(made, len(first)):
                row = before.rows[i]
                right = rule and "".join("01"[exact] for exact in before.exact[i].astype(int))
                row |= {"right": right, "facts": before.facts, "made_with": made_with[name]}
                if first and not setting.sampled:
                    row["equals_greedy"] = float(np.mean([*map(operator.eq, texts, alone)]))
                rows.setdefault(key, row | shared)
                if options.file:
                    print(LINE.format(**rows[key]), file=sys.stderr)
            if options.file:
                write_json(list(rows.values()), options.file)
                # A process may map 65,530 regions on Linux, and XLA's CPU backend maps some hundreds a
                # program: a long table would end in a segmentation fault.
                jax.clear_caches()
        if shared_base and not first:
            first = [Source(name, model, next(of for of in suited.values() if of.baseline))]
        found.append([rows[key] for key in suited])
    return [list(itertools.chain(*found))] if shared_base else found


def _made_with(
    options: Options,
    items: Sequence[Problem],
    budget: int | None,
    places: Mapping[str, str],
    models: Mapping[str, store.Model],
) -> dict[str, Row]:
    """By model, what the rows of one file must share."""
    first, *others = models.values()
    families = {other.family for other in others} - {first.family}
    shared = {
        "beside": store.digest_of(next(iter(places.values()))) if families else None,
        "problems": hashlib.sha256(repr(items).encode()).hexdigest(),
        "seed": options.seed,
        "timed": options.timed,
        "wide": options.wide,
        "new_tokens": budget,
        "device": facts.device()["kind"],
        "judge": options.judge and store.digest_of(options.judge),
        "adapter": options.adapter and store.digest_of(options.adapter),
    }
    return {
        name: {"model": store.digest_of(place), "dtype": models[name].config.dtype} | shared
        for name, place in places.items()
    }


def _suited(
    name: str,
    model: store.Model,
    words: Sequence[str],
    tables: Mapping[str, Sequence[Setting]],
) -> dict[Key, Setting]:
    """The rows of a model: its own table or its family's, or the baseline and what words name of
    it; a line says where the model lacks a part that some ask for.
    """
    table = tables.get(name) or tables[model.family]
    settings = [setting for setting in table if setting.baseline or not words]
    for word in words:
        changed = choose(model.family, word)
        named = [of for of in table if of.name == changed.name and not of.baseline]
        settings += [changed] if word.split()[1:] else named
    suited: dict[Key, Setting] = {}
    for setting in settings:
        if not lacking(model, setting.decoder):
            suited.setdefault((name, setting.name, setting.label()), setting)
    for part in sorted({lacking(model, setting.decoder) or "" for setting in settings} - {""}):
        print(f"{name} has no {part}: decoders that ask one are left out", file=sys.stderr)
    return suited


def _groups(
    suited: Mapping[Key, Setting], missing: set[Key], written: bool
) -> list[dict[Key, Setting]]:
    """The settings of each comparison: the baseline, and some whose rows are missing; all of them
    where nothing is written in between.
    """
    others = [key for key in suited if key in missing and not suited[key].baseline]
    size = GROUP if written else len(suited)
    groups = [others[i : i + size] for i in range(0, len(others), size)] or [[]] * len(missing)
    return [
        {key: of for key, of in suited.items() if of.baseline or key in group} for group in groups
    ]


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


def _begun(file: str, made_with: Mapping[str, Row]) -> dict[Key, Row]:
    """The rows of a file. Raises ValueError for those of other models or options."""
    try:
        rows = json.loads(text_of(Path(file)))
        begun = {
            (row["model"], row["decoder"], row["label"]): dict.fromkeys(LATER) | row for row in rows
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
