"""How deep drafts of speculative residual decoding are right: with a trained head, and with none.

    python -m experiments.block_diffusion.acceptance runs/tiny-head/model
    python -m experiments.block_diffusion.acceptance runs/chains-head/model --ground chains --count
    2000

A line of the table is a depth d: how many calls had a d-th draft, and in how many of them it and
those before it were what the base decoder does. Ranges are over problems. Beside it stands the
share of calls in which the draft before it was right too (`given`), which tells how quickly a
head's sums go astray.
"""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import tyro

from experiments.block_diffusion.problems import Asked, Problems
from experiments.common.command import run as run_command
from experiments.common.plots import draw_panels, if_possible
from experiments.common.record import write_record
from paradec_jax import Model, ResidualSpeculative, facts, load, store, trace
from paradec_jax.decode.block.head import ZERO
from paradec_jax.decode.machine.rows import NETWORK_CALLS
from paradec_jax.decode.machine.setting import Setting
from paradec_jax.evaluate.cases import case_of, prompts_of
from paradec_jax.evaluate.intervals import ends, ratio


@dataclasses.dataclass(frozen=True)
class Options:
    """What to measure.

    Attributes:
      model: folder of a backbone and its head.
      asked: which problems.
      candidates: K, states that a call verifies.
      thresholds: of the dynamic rule, a table each; the static rule has one in any case.
      dtype: of weights and activations, "stored", "float32" or "bfloat16".
      out: where the JSON goes; the picture goes to `figures` beside its folder.
    """

    model: tyro.conf.Positional[str]
    asked: tyro.conf.OmitArgPrefixes[Asked] = Asked()  # noqa: RUF009
    candidates: int = 5
    thresholds: tuple[float, ...] = (0.9,)
    dtype: str = "float32"
    out: Path = Path("experiments/block_diffusion/results/acceptance.json")


def record(state: Any, info: Any) -> dict[str, Any]:
    """What is kept of a step."""
    return {
        "exists": info.drafts.exists,
        "accepted": info.accepted,
        "calls": state.rows.counts[NETWORK_CALLS],
    }


def counted(steps: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Calls of each row with a d-th draft, and those in which it was right, both [B, K - 1].

    Args:
      steps: of `record`, stacked on a leading axis, of a decoder whose prompt's call is the first.
    """
    exists, accepted, calls = (np.asarray(steps[name]) for name in ("exists", "accepted", "calls"))
    # a row that has stopped calls nothing
    ran = np.diff(calls, axis=0, prepend=np.ones_like(calls[:1])) > 0
    drafts = exists[:, :, 1:] & ran[..., None]
    right = drafts & (accepted[..., None] > np.arange(drafts.shape[2]))
    return drafts.sum(axis=0), right.sum(axis=0)


def measured(
    model: Model, problems: Problems, setting: Setting, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """What `counted` finds of every problem, both [N, K - 1]."""
    prompts = prompts_of(model, problems.prompts, seed, problems.budget)
    case, block = case_of(setting, model, prompts.size), model.network.block
    most = (prompts.budget // block + 2) * (block + 1)
    count, found = len(problems.prompts), []
    rows = min(problems.rows, count)
    for first in range(0, count, rows):
        some = list(range(first, min(first + rows, count)))
        request = prompts.request(some + some[-1:] * (rows - len(some)))  # of one program
        _, steps = trace(case.decoder, case.params, request, case.knobs, n=most, record=record)
        found.append([of[: len(some)] for of in counted(steps)])
    drafts, right = (np.concatenate(of) for of in zip(*found, strict=True))
    return drafts, right


def rows_of(drafts: np.ndarray, right: np.ndarray) -> list[dict[str, Any]]:
    """A row for each depth that any call had."""
    found = []
    for d in range(drafts.shape[1]):
        tried, total = drafts[:, d], int(right[:, d].sum())
        if not tried.sum():
            break
        row: dict[str, Any] = {
            "depth": d + 1,
            "drafts": int(tried.sum()),
            "right": total,
            "share": total / int(tried.sum()),
        }
        row["share_interval"] = ends(ratio(right[:, d], tried))
        before = tried if d == 0 else right[:, d - 1]
        row["given"] = total / int(before.sum()) if before.sum() else None
        found.append(row)
    return found


def main(options: tyro.conf.OmitArgPrefixes[Options]) -> None:
    """Writes, draws and prints the tables."""
    model = load(options.model, dtype=None if options.dtype == "stored" else options.dtype)
    if model.family != "block_diffusion" or model.head is None:
        raise SystemExit(f"{options.model} has no residual head beside a model of block diffusion")
    problems, table = options.asked.read(model), []
    panels: dict[str, dict[str, Any]] = {}
    for rule, threshold in (("static", None), *(("dynamic", tau) for tau in options.thresholds)):
        for head in (ZERO, None):
            decoder = ResidualSpeculative(head=head, candidates=options.candidates, rule=rule)
            knobs = decoder.Knobs(temperature=problems.temperature, threshold=threshold)
            setting = Setting("residual_speculative", decoder, knobs)
            told_head = "none" if head == ZERO else "trained"
            named = {"rule": rule, "threshold": threshold, "head": told_head}
            found = rows_of(*measured(model, problems, setting, options.asked.seed))
            table += [named | row for row in found]
            title = f"{rule}{'' if threshold is None else f' {threshold:g}'}: drafts that are right"
            points = [(row["depth"], row["share"], row["share_interval"]) for row in found]
            panels.setdefault(title, {})[told_head] = points
    told = dataclasses.asdict(options.asked) | {
        "model": store.names_of([options.model])[0],
        "model_sha256": store.fingerprint(options.model),
        "candidates": options.candidates,
    }
    write_record(options.out, told, {"rows": table}, dtypes=facts.dtypes(model.params))
    path = options.out.parent.parent / "figures" / f"{options.out.stem}.png"
    if_possible(draw_panels, panels, path, x="depth", log_x=False)
    for row in table:
        given = (
            ""
            if row["given"] is None
            else f"  {100 * row['given']:.1f}% where the one before it was"
        )
        bound = "" if row["threshold"] is None else f" {row['threshold']:g}"
        print(
            f"{row['rule']}{bound}, head {row['head']}: draft {row['depth']} right in {100 * row['share']:.1f}% of "
            f"{row['drafts']} calls{given}"
        )


if __name__ == "__main__":
    run_command(main)
