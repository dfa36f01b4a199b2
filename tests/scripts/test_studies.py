"""Every study at toy size: its record tells how it was made and has its rows, its picture is drawn,
it goes on.
"""

import dataclasses
import importlib
import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from test_trainings import TRAININGS
from toys import LENGTH

from experiments.block_diffusion.problems import Asked
from experiments.masked_diffusion import markov_train
from experiments.recurrent_depth.rival_settings import (
    PARALLEL,
    SEVERAL,
    TASKS,
    jacobi,
    static,
    wave,
)
from experiments.systems.report import Rates

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow


class Row(NamedTuple):
    """A study: how many rows its record has, what keys each has, and its smallest options.

    TOYS in an option is the folder of toy models. `more` are keys of the record beside its rows,
    `table` and `stem` the names of its rows and of its file. A second call does not use the
    function that `again` names. `before` is a fixture.
    """

    rows: int
    keys: str
    options: dict[str, Any]
    more: str = ""
    patches: dict[str, Any] = {}  # noqa: RUF012
    arguments: dict[str, dict[str, Any]] = {}  # noqa: RUF012
    table: str = "rows"
    stem: str = "rows"
    again: str | None = None
    before: str | None = None


CHAINS = Asked(ground="chains", count=3, blocks=1, block=4, rows=2)
HEADS = {
    "asked": CHAINS,
    "runs": "TOYS",
    "steps_ahead": (1, 2),
    "thresholds": (0.9,),
    "depths": (3,),
}
LEARNING = {
    "updates": 2,
    "rows": 2,
    "pool": 3,
    "trial_rows": 2,
    "candidates": 2,
    "tuning": 3,
    "problems": 4,
}
LEARNING |= {"problem_steps": (2, 2)}
LEARNED = "decoder exact problems network_calls_per_token difference_interval"
TEXTS = {"runs": "TOYS", "text": "TOYS/text.txt", "steps": (2, 4), "length": LENGTH, "rows": 3}
LAWFUL = {
    "folder": "TOYS/markov",
    "samples": 12,
    "draws": 2,
    "temperatures": (0.5,),
    "texts": 3,
    "masks": 2,
}
LAWFUL_TEXTS = {"ground": "chains", "count": 3, "blocks": 2, "rows": 2}
PAIR = {
    "models": ("TOYS/causal", "TOYS/other"),
    "block": 4,
    "problems": 3,
    "steps": (2, 2),
    "budget": 5,
}
DEPTH = {"preset": "test-recurrent", "recurrence": 2, "new_tokens": 4}
WIDTH = {"preset": "test-recurrent", "tokens": (4, 6), "factors": (2,), "capacity": 8}
GRID = {"autoregressive": [static(2, 1), static(16, 1)]}
GRID |= {PARALLEL[0]: [jacobi(4, 4, False, 1)], SEVERAL: [wave(4, 6, 6, 0.8)]}
FEW = {"words": dataclasses.replace(TASKS["words"], grid=lambda queries: GRID, beside=(2,))}
RIVALS = {
    "task": "words",
    "model": "TOYS/recurrent",
    "problems": 2,
    "timed": 1,
    "passes": 1,
    "rows": 2,
}

STUDIES = {
    "block_diffusion.acceptance": Row(
        8,
        "rule head depth share",
        {"model": "TOYS/chains-head/model", "asked": CHAINS, "candidates": 3},
    ),
    "block_diffusion.learn_thresholds": Row(
        4,
        LEARNED,
        {"model": "TOYS/words", "thresholds": 2, "calls": 5, "hand": (0.5,), **LEARNING},
        "learner",
    ),
    "block_diffusion.residual_magnitude": Row(
        4, "hidden logits", {"model": "TOYS/chains/model", **LAWFUL_TEXTS}, "blocks model_sha256"
    ),
    "block_diffusion.study": Row(
        10,
        "label settings blocks positions_per_token flops_per_token head_calls_per_token",
        {"study": ("speculation",), **HEADS},
        stem="speculation-chains",
        again="block_diffusion.lines.compare",
    ),
    "block_diffusion.tuned": Row(
        7,
        "label settings network_calls_per_token",
        {"study": (), **HEADS, "steps_ahead": (1,)},
        "chosen",
        arguments={"Choice": {"tuning": 2, "head_thresholds": (0.5,)}},
        stem="tuned-chains",
    ),
    "jacobi.side_by_side": Row(10, "model exact difference only_here_exact equals_greedy", PAIR),
    "masked_diffusion.latency": Row(
        2,
        "decoder steps batch seconds network_calls speedup",
        {"preset": "test-mdlm", "length": 8, "steps": (2,), "batches": (2,), "passes": 1},
        "crossovers",
        patches={"rates": lambda dtype: Rates({"sum": 1e9}, 1e9, {})},
    ),
    "masked_diffusion.markov_study": Row(
        8,
        "model steps temperature kl kl_interval cross_entropy entropy network_calls estimates_apart",
        {**LAWFUL, "steps": (2, 4), "swept": (2,)},
        "law bounds bars",
        again="masked_diffusion.markov_study.sampled",
        before="markov",
    ),
    "masked_diffusion.markov_variants": Row(
        7,
        "model steps kl over_the_other over_the_other_interval bound over_the_floor aims_at",
        {**LAWFUL, "variants": ("halves", "half-rounds"), "steps": (2,), "each_round": True},
        "perfect",
        again="masked_diffusion.markov_study.sampled",
        before="markov",
    ),
    "masked_diffusion.study": Row(
        9,
        "line label samples judge_perplexity fourgram_entropy",
        {
            **TEXTS,
            "study": ("frontier",),
            "frontier": (2, 4),
            "temperatures": (1.0, 0.5),
            "samples": 5,
        },
        "at_equal_entropy bars",
        stem="frontier",
        again="masked_diffusion.texts.draw",
    ),
    "recurrent_depth.learn_sampler": Row(
        5,
        LEARNED,
        {"model": "TOYS/recurrent", "steps": 5, "ages": 2, **LEARNING},
        "learner random_search chosen",
    ),
    "recurrent_depth.pointers_depth": Row(
        2,
        "recurrence names_right by_distance",
        {"model": "TOYS/pointers", "problems": 3, "queries": 8},
        patches={"RECURRENCES": (2, 3)},
        table="by_recurrence",
    ),
    "recurrent_depth.rivals": Row(
        8,
        "rival label model baseline exact keeps_answers speedup speedup_range each prompt_seconds",
        {**RIVALS, "others": ("TOYS/causal",), "tuning": "TOYS/rivals.json"},
        "best_way best_sequential four_numbers",
        patches={"TASKS": FEW},
        before="tuning",
    ),
    "recurrent_depth.serial_steps": Row(
        5, "decoder depth serial_first in_flight core_positions", DEPTH
    ),
    "recurrent_depth.tune": Row(
        4, "rival label exact keeps_answers", RIVALS, "rule chosen", {"TASKS": FEW}
    ),
    "recurrent_depth.width_depth": Row(6, "what tokens variant", WIDTH, "curves"),
}
ELSEWHERE = {
    *("common.curves", "jacobi.study", "recurrent_depth.study"),  # test_common
    "recurrent_depth.distill_waves",  # test_recurrent_depth
    "masked_diffusion.compare_texts",  # test_compare_texts
    *("launch.local", "lm_eval.execution", "lm_eval.run"),  # tests of their own
    *(
        f"systems.{name}" for name in ("checkouts", "few_rows", "memory", "plan", "report", "slot")
    ),  # tests/systems
    *("real.measure", "real.peer"),  # make real
}


@pytest.fixture(scope="module")
def tuning(toys):
    """What `tune` chose of the rivals."""
    options = {"task": "words", "model": "recurrent", "queries": 64}
    chosen = {rival: settings[-1].label() for rival, settings in GRID.items()}
    (toys / "rivals.json").write_text(json.dumps({"options": options, "chosen": chosen}))


@pytest.fixture(scope="module")
def markov(toys):
    """A teacher of a law that is known, and its students."""
    markov_train.main(
        TRAININGS["masked_diffusion.markov_train"].recipe(markov_train, toys), toys / "markov"
    )


def placed(value: Any, toys: Path) -> Any:
    """An option with the folder of toys in place of TOYS."""
    if isinstance(value, tuple):
        return tuple(placed(one, toys) for one in value)
    return value.replace("TOYS", str(toys)) if isinstance(value, str) else value


def options_of(kind: Any, given: dict[str, Any], toys: Path, folder: Path) -> Any:
    """Options of a study whose results and pictures go to a folder of the test."""
    places = {"out": folder / "results" / "rows.json", "figure": folder / "figures" / "rows.png"}
    places |= {
        "folder": folder / "results",
        "figures": folder / "figures",
        "drawn": folder / "drawn.json",
    }
    kinds = {field.name: str(field.type) for field in dataclasses.fields(kind)}
    options = {name: place for name, place in places.items() if name in kinds}
    options |= {name: placed(value, toys) for name, value in given.items()}
    return kind(**{name: Path(x) if "Path" in kinds[name] else x for name, x in options.items()})


def used_again(*_: Any, **__: Any) -> None:
    raise AssertionError("a row that is done is made again")


@pytest.mark.parametrize("name", STUDIES)
def test_a_study_writes_its_record(name, toys, tmp_path, monkeypatch, request):
    row, module = STUDIES[name], importlib.import_module(f"experiments.{name}")
    if row.before:
        request.getfixturevalue(row.before)
    for patched, value in row.patches.items():
        monkeypatch.setattr(module, patched, value)
    options = options_of(module.Options, row.options, toys, tmp_path)
    more = [getattr(module, kind)(**given) for kind, given in row.arguments.items()]
    module.main(options, *more)
    path = tmp_path / "results" / f"{row.stem}.json"
    record = json.loads(path.read_text())
    assert record.keys() >= {"command", "options", "facts", row.table, *row.more.split()}
    assert len(record[row.table]) == row.rows
    missing = [set(row.keys.split()) - one.keys() for one in record[row.table]]
    assert not any(missing), missing
    pictures = list((tmp_path / "figures").glob("*"))
    assert pictures or not {"figure", "figures"} & vars(options).keys()
    assert all(picture.stat().st_size > 1000 for picture in pictures)
    if row.again:
        monkeypatch.setattr(f"experiments.{row.again}", used_again)
        module.main(options, *more)
        assert json.loads(path.read_text())[row.table] == record[row.table]


def test_every_script_is_run():
    scripts = {
        f"{path.parent.name}.{path.stem}"
        for path in (ROOT / "experiments").glob("*/*.py")
        if '__name__ == "__main__"' in path.read_text(encoding="utf-8")
        and path.parent.name != "tasks"
    }
    assert scripts == {*STUDIES, *TRAININGS, *ELSEWHERE}
