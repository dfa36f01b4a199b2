"""Every family's decoders on the bundled models, in turns, at several batch sizes."""

import dataclasses
import functools
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from paradec_jax import store
from paradec_jax.decode import Request
from paradec_jax.decode.machine.rows import NETWORK_CALLS
from paradec_jax.decode.machine.setting import Setting
from paradec_jax.evaluate import word_problems
from paradec_jax.evaluate.compare import case_of, prompts_of, with_parameters
from paradec_jax.evaluate.intervals import times
from paradec_jax.families import FAMILIES
from paradec_jax.generate import lacks_head
from paradec_jax.report.claims import CLAIMS
from paradec_jax.report.judging import wanted
from paradec_jax.report.parts import Part, Result, Table, Task
from paradec_jax.report.sizes import Sizes
from paradec_jax.report.timing import Speed, compile_all, measure, speedup
from paradec_jax.store import Model

FIRST = 4.0  # share of a model at the smallest batch, which most claims are about, beside that at another


@dataclasses.dataclass(frozen=True, eq=False)
class Unit:
    """A model at a batch size, the decoders to be timed on it, the baseline first, and its problems.

    Attributes:
      prompts: (model, how many) -> problems, and tokens that an answer may take; None where they tell of it.
    """

    model: str
    batch: int
    calls: int
    rivals: Sequence[Setting]
    prompts: Callable[[Model, int], tuple[Sequence[Any], int | None]]


def rivals_of(family: str, model: str, batch: int) -> list[Setting]:
    """Rows of a family's table: the baseline, those that claims are about, and the others if time suffices."""
    claimed = wanted(CLAIMS, "compare", model, batch)

    def place(setting: Setting) -> int:
        named = any(row.fits(setting.name, setting.settings()) for row in claimed)
        return 0 if setting.baseline else 1 if named else 2

    return sorted(FAMILIES[family].settings, key=place)


def word_prompts(sizes: Sizes, model: Model, count: int) -> tuple[Sequence[Any], None]:
    """Unseen word problems, with room for the longest reference solution."""
    del model
    return word_problems(count, seed=sizes.seed, steps=sizes.steps_of_problems), None


def requests_of(model: Model, unit: Unit, seed: int) -> tuple[list[Request], int]:
    """Problems in calls of one shape, and the positions that they need."""
    problems, budget = unit.prompts(model, unit.batch * unit.calls)
    prompts = prompts_of(model, problems, seed, budget)
    rows = np.arange(len(problems)).reshape(unit.calls, unit.batch)
    return [prompts.request(at) for at in rows.tolist()], prompts.size


def told(rival: Setting) -> str:
    """A rival in one line."""
    return f"{rival.name} {rival.label()}".strip()


def measure_unit(unit: Unit, task: Task) -> list[dict[str, Any]]:
    """The rows of one model at one batch size; decoders that time does not suffice for are left out."""
    what = f"{unit.model}, batch {unit.batch}"
    if not task.has(0.0, what):
        return []
    try:
        model = store.load(unit.model)
    except store.StoreError as error:
        task.leave(what, str(error))
        return []
    requests, size = requests_of(model, unit, task.sizes.seed)
    rivals = [rival for rival in unit.rivals if not lacks_head(model, rival.decoder)]
    params = model.network.prepare(model.params)
    cases = [with_parameters(case_of(rival, rival.decoder, model, size), model, params) for rival in rivals]
    task.saw(params)
    jobs = {
        told(rival): functools.partial(compile_all, [(case, requests[0])], params)
        for rival, case in zip(rivals, cases, strict=True)
    }
    places = {told(rival): i for i, rival in enumerate(rivals)}
    compiled = [places[name] for name in task.ready(jobs, what)]
    if 0 not in compiled:
        task.leave(what, f"its baseline, {told(rivals[0])}, could not be compiled")
        return []
    started, passes = time.monotonic(), 0

    def enough() -> bool:
        """Whether another pass would end too late; two are made in any case."""
        nonlocal passes
        passes += 1
        task.progress(f"{what}: passes", passes, task.sizes.passes)
        return passes >= 2 and task.left() < (time.monotonic() - started) / passes

    with task.survives(what):
        chosen = [cases[i] for i in compiled]
        speeds = measure(chosen, params, requests, passes=task.sizes.passes, enough=enough)
        task.passed(len(speeds[0].each), what)
        found = zip(compiled, speeds, strict=True)
        return [row_of(unit, model.family, rivals[i], speed, speeds[0]) for i, speed in found]
    return []


def row_of(unit: Unit, family: str, rival: Setting, speed: Speed, base: Speed) -> dict[str, Any]:
    """What was found of one decoder."""
    generated = list(speed.generated)
    calls = sum(int(np.asarray(decoded.counts[NETWORK_CALLS]).sum()) for decoded in speed.decoded)
    same = [a.completions() == b.completions() for a, b in zip(speed.decoded, base.decoded, strict=True)]
    each = [list(seconds) for seconds in speed.each]
    row = {
        "family": family,
        "model": unit.model,
        "batch": unit.batch,
        "decoder": rival.name,
        "label": rival.label(),
        "settings": rival.settings(),
        "baseline": rival.baseline,
        "generated": generated,
        "each": each,
        "tokens_per_second": speed.tokens_per_second,
        "tokens_per_call": sum(generated) / calls,
        "recurrences_per_token": speed.counts["recurrences"] / sum(generated)
        if "recurrences" in speed.counts
        else None,
        "equal_calls": sum(same),
    }
    ratio, interval = speedup(generated, each, base.generated, base.each)
    return row | {"speedup": ratio, "speedup_range": list(interval)}


def measure_all(task: Task) -> Result:
    """All models that answer at the smallest batch first, since most claims are about it."""
    units = [
        Unit(
            model,
            batch,
            calls,
            rivals_of(family.name, model, batch),
            functools.partial(word_prompts, task.sizes),
        )
        for batch, calls in task.sizes.problems
        for family in FAMILIES.values()
        if family.texts is None
        for model in family.bundled
    ]
    rows: list[dict[str, Any]] = []
    weights = [FIRST if unit.batch == units[0].batch else 1.0 for unit in units]
    for unit, own in task.each(units, weights):
        rows += measure_unit(unit, own)
    return {"rows": rows}


def tables(result: Result) -> list[Table]:
    """A table for each model and batch size."""
    found: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for row in result["rows"]:
        found.setdefault((row["model"], row["batch"]), []).append(row)
    return [_table(model, batch, rows) for (model, batch), rows in found.items()]


def _table(model: str, batch: int, rows: Sequence[Mapping[str, Any]]) -> Table:
    recurrent = rows[0]["recurrences_per_token"] is not None
    lines = []
    for row in rows:
        line = [row["decoder"], row["label"], f"{row['tokens_per_second']:.0f}"]
        line += ["1 (baseline)" if row["baseline"] else times(row["speedup"], row["speedup_range"])]
        line += [f"{row['tokens_per_call']:.2f}"]
        line += [f"{row['recurrences_per_token']:.2f}"] if recurrent else []
        lines.append([*line, f"{row['equal_calls']}/{len(row['generated'])}"])
    columns = ["decoder", "settings", "tokens/s", "speed-up [95%]", "tokens a call"]
    columns += ["recurrences a token"] if recurrent else []
    passes, calls = len(rows[0]["each"]), len(rows[0]["generated"])
    asked = (
        f"{calls} unseen problems one by one"
        if batch == 1
        else f"{calls} calls of {batch} unseen problems each"
    )
    return Table(
        f"{model}, batch {batch}",
        [*columns, "calls with the baseline's text"],
        lines,
        f"{asked}, {passes} passes in turns, prompts included; the range is a bootstrap over calls and passes.",
    )


def picture(plt: Any, result: Result) -> Any:
    """Speed-ups of every decoder, a panel a model, a colour a batch size."""
    models = list(dict.fromkeys(row["model"] for row in result["rows"]))
    if not models:
        return None
    figure, axes = plt.subplots(
        len(models), 1, figsize=(9, 3.6 * len(models)), squeeze=False, layout="constrained"
    )
    for panel, model in zip(axes[:, 0], models, strict=True):
        mine = [row for row in result["rows"] if row["model"] == model]
        names = list(dict.fromkeys(f"{row['decoder']} {row['label']}" for row in mine))
        for color, batch in enumerate(dict.fromkeys(row["batch"] for row in mine)):
            rows = [row for row in mine if row["batch"] == batch]
            at = [names.index(f"{row['decoder']} {row['label']}") + 0.2 * color for row in rows]
            ratio = np.array([row["speedup"] for row in rows])
            low, high = np.array([row["speedup_range"] for row in rows]).T
            errors = [np.maximum(ratio - low, 0), np.maximum(high - ratio, 0)]
            panel.errorbar(ratio, at, xerr=errors, fmt="o", markersize=4, capsize=2, label=f"batch {batch}")
        panel.set_yticks(range(len(names)), [textwrap.fill(name, 56) for name in names], fontsize=7)
        panel.invert_yaxis()
        panel.axvline(1, color="0.5", linestyle="--", linewidth=1)
        panel.set_title(model, fontsize=10)
        panel.set_xlabel("speed over the baseline")
        panel.legend(fontsize=7)
    return figure


COMPARE = Part("compare", "Decoders on the bundled models", 9.0, measure_all, tables, picture)
