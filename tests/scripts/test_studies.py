"""Every study at toy size: its record tells how it was made and has its rows, its picture is drawn, it goes on."""

import dataclasses
import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from toys import LENGTH

from experiments.block_diffusion.problems import Asked
from experiments.masked_diffusion import distill, markov_train, train
from experiments.masked_diffusion.markov import Chain
from experiments.recurrent_depth.rival_settings import PARALLEL, SEVERAL, TASKS, jacobi, static, wave

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow


@dataclasses.dataclass(frozen=True)
class Row:
    """One study.

    Attributes:
      rows: number of rows of its record.
      columns: keys that every row has.
      options: the smallest ones; TOYS in a text is the folder of toy models.
      record: keys of the record beside `rows`.
      patches: names of the module, and what takes their place here.
      arguments: further arguments of `main`, by the name of their class.
      stem: name of the record's file, where the study chooses it.
      again: a function of experiments that a second call does not use, where the study keeps its rows.
      before: fixture with what the study reads besides.
    """

    rows: int
    columns: str
    options: dict[str, Any]
    record: str = ""
    patches: Callable[[Any], dict[str, Any]] = lambda module: {}
    arguments: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    stem: str = "rows"
    again: str | None = None
    before: str | None = None


ANSWERS = "label settings problems exact network_calls_per_token"
CHAINS = Asked(ground="chains", count=3, blocks=1, block=4, rows=2)
HEADS = {"asked": CHAINS, "runs": "TOYS", "steps_ahead": (1,), "thresholds": (0.9,), "depths": (3,)}
LEARNING = {"updates": 2, "rows": 2, "pool": 3, "trial_rows": 2, "candidates": 2, "tuning": 3, "problems": 4}
LEARNED = "learner random_search"
TEXTS = {"runs": "TOYS", "text": "TOYS/text.txt", "steps": (2, 4), "length": LENGTH, "rows": 3}
LAWFUL = {"folder": "TOYS/markov", "samples": 12, "draws": 2, "temperatures": (0.5,), "texts": 3, "masks": 2}
QUERIES = 8
GRID = {
    "autoregressive": [static(2, 1), static(16, 1)],
    PARALLEL[0]: [jacobi(4, 4, False, 1)],
    SEVERAL: [wave(4, 6, 6, 0.8)],
}
RIVALS = {"task": "words", "model": "TOYS/recurrent", "problems": 2, "timed": 1, "passes": 1, "rows": 2}


def few_tasks(module: Any) -> dict[str, Any]:
    """The rivals' tasks with three rivals."""
    return {"TASKS": {"words": dataclasses.replace(TASKS["words"], grid=lambda queries: GRID, beside=(2,))}}


STUDIES = {
    "block_diffusion.acceptance": Row(
        8,
        "rule head draft share given",
        {"model": "TOYS/chains-head/model", "asked": CHAINS, "candidates": 3},
    ),
    "block_diffusion.learn_thresholds": Row(
        3,
        "decoder exact problems network_calls_per_token difference_interval",
        {"model": "TOYS/words", "thresholds": 2, "calls": 5, "hand": (0.5,), "problem_steps": (2, 2)}
        | LEARNING,
        LEARNED,
    ),
    "block_diffusion.lossless": Row(
        10,
        "equal problems fewer_calls more_calls_than_base",
        {"model": "TOYS/chains-head/model", "ground": "chains", "count": 3, "candidates": (2,)}
        | {"temperatures": (0.7,), "batches": (2,)},
        again="block_diffusion.lossless.decode",
    ),
    "block_diffusion.residual_magnitude": Row(
        4,
        "hidden logits",
        {"model": "TOYS/chains/model", "ground": "chains", "count": 3, "blocks": 2, "rows": 2},
        "blocks model_sha256",
    ),
    "block_diffusion.study": Row(
        6,
        "label settings blocks positions_per_token flops_per_token head_calls_per_token",
        {"study": ("speculation",), **HEADS},
        stem="speculation-chains",
        again="block_diffusion.lines.compare",
    ),
    "block_diffusion.tuned": Row(
        5,
        "label settings network_calls_per_token",
        {"study": (), **HEADS},
        "chosen",
        arguments={"Choice": {"tuning": 2, "head_thresholds": (0.5,)}},
        stem="tuned-chains",
    ),
    "block_diffusion.uncorrected": Row(
        2,
        "recipe step mean positions",
        {"model": "TOYS/chains/model", "recipes": ("chains-counts",), "batches": 1, "batch_tokens": 128},
        "model_sha256",
    ),
    "jacobi.lossless": Row(
        4,
        "model batch settings equal problems tokens more_calls_than_greedy",
        {"models": ("TOYS/causal",), "problems": 3, "steps": (2, 2), "budget": 5, "batches": (2, 1)},
        patches=lambda module: {"covering": lambda of=module.covering: of()[:2]},
        again="jacobi.lossless.decode",
    ),
    "jacobi.side_by_side": Row(
        4,
        "model exact difference only_here_exact equals_greedy",
        {
            "models": ("TOYS/causal", "TOYS/other"),
            "block": 4,
            "problems": 3,
            "steps": (2, 2),
            "budget": 5,
            "rows": 3,
        },
        patches=lambda module: {"compared": lambda block, of=module.compared: of(block)[2:3]},
    ),
    "masked_diffusion.continued": Row(
        7,
        "line steps perplexity interval",
        {**TEXTS, "prompts": 3, "prompt": 5, "copies": 2, "rows": 4},
        again="masked_diffusion.continued.continued",
    ),
    "masked_diffusion.latency": Row(
        2,
        "decoder steps batch tokens network_calls limit_seconds speedup speedup_at_limits",
        {
            "preset": "test-mdlm",
            "length": 8,
            "steps": (2,),
            "batches": (2,),
            "rates": (1e9, 1e9),
            "passes": 1,
        },
        "crossovers",
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
        15,
        "line steps samples judge_perplexity fourgram_entropy label",
        {**TEXTS, "study": ("frontier",), "frontier": (2, 4), "temperatures": (1.0, 0.5), "samples": 5},
        "at_equal_entropy bars",
        stem="frontier",
        again="masked_diffusion.texts.draw",
    ),
    "recurrent_depth.learn_sampler": Row(
        5,
        "decoder exact problems network_calls_per_token recurrences_per_token difference_interval",
        {"model": "TOYS/recurrent", "steps": 5, "ages": 2, "problem_steps": (2, 2)} | LEARNING,
        LEARNED + " chosen learned_less_random_search",
    ),
    "recurrent_depth.pointers_speed": Row(
        2,
        ANSWERS,
        {
            "model": "TOYS/pointers",
            "problems": 3,
            "queries": QUERIES,
            "timed": 1,
            "passes": 2,
            "nearest": 9,
            "widths": (32,),
        },
        "by_recurrence costs",
        patches=lambda module: {
            "RECURRENCES": (2, 3),
            "SETTINGS": {"few": lambda whole: [module.static(3, baseline=True), module.chosen(4, whole)]},
        },
    ),
    "recurrent_depth.rivals": Row(
        5,
        "rival label model baseline exact keeps_answers speedup speedup_range each prompt_seconds",
        {**RIVALS, "others": ("TOYS/causal",), "tuning": "TOYS/rivals.json"},
        "best_way best_sequential four_numbers",
        patches=few_tasks,
        before="tuning",
    ),
    "recurrent_depth.serial_steps": Row(
        5,
        "decoder depth serial_first serial_all in_flight core_positions",
        {"preset": "test-recurrent", "recurrence": 2, "new_tokens": 4},
    ),
    "recurrent_depth.tune": Row(
        4, "rival label exact keeps_answers", RIVALS, "rule settings_tried chosen", patches=few_tasks
    ),
    "recurrent_depth.width_depth": Row(
        10,
        "what tokens variant",
        {
            "preset": "test-recurrent",
            "tokens": (4, 6),
            "factors": (2,),
            "largest": 8,
            "passes": 2,
            "capacity": 8,
        },
        "curves",
    ),
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
    own = {"preset": "test-mdlm", "layers": 1, "length": 8, "rows": 2, "steps": 1, "warmup": 1}
    teacher = train.Recipe(name="teacher", matmul_precision="highest", **own)
    students = distill.Recipe(
        name="students", rounds=2, first_steps=8, updates=2, rows=2, warmup=1, matmul_precision="highest"
    )
    recipe = markov_train.Recipe(Chain((0.7, 0.2, 0.1), 8, 1), 500, teacher, students)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(markov_train, "HELD_OUT", 4)
        markov_train.main(recipe, toys / "markov")


def placed(value: Any, toys: Path) -> Any:
    """An option with the folder of toys in place of TOYS."""
    if isinstance(value, tuple):
        return tuple(placed(one, toys) for one in value)
    return value.replace("TOYS", str(toys)) if isinstance(value, str) else value


def options_of(kind: Any, given: dict[str, Any], toys: Path, folder: Path) -> Any:
    """Options of a study, whose results and pictures go to a folder of the test."""
    places = {"out": folder / "results" / "rows.json", "figure": folder / "figures" / "rows.png"}
    places |= {"folder": folder / "results", "figures": folder / "figures", "drawn": folder / "drawn.json"}
    fields = {field.name: field.type for field in dataclasses.fields(kind)}
    options = {name: place for name, place in places.items() if name in fields}
    options |= {name: placed(value, toys) for name, value in given.items()}
    return kind(**{name: Path(x) if "Path" in str(fields[name]) else x for name, x in options.items()})


def used_again(*_: Any, **__: Any) -> None:
    raise AssertionError("a row that is done is made again")


@pytest.mark.parametrize("name", STUDIES)
def test_a_study_writes_its_record(name, toys, tmp_path, monkeypatch, request):
    row, module = STUDIES[name], importlib.import_module(f"experiments.{name}")
    if row.before:
        request.getfixturevalue(row.before)
    for patched, value in row.patches(module).items():
        monkeypatch.setattr(module, patched, value)
    options = options_of(module.Options, row.options, toys, tmp_path)
    more = [getattr(module, kind)(**given) for kind, given in row.arguments.items()]
    module.main(options, *more)
    path = tmp_path / "results" / f"{row.stem}.json"
    record = json.loads(path.read_text())
    assert record.keys() >= {"command", "options", "facts", "rows", *row.record.split()}
    assert len(record["rows"]) == row.rows
    missing = [set(row.columns.split()) - one.keys() for one in record["rows"]]
    assert not any(missing), missing
    assert all(picture.stat().st_size > 1000 for picture in (tmp_path / "figures").glob("*"))
    assert not {"figure", "figures"} & vars(options).keys() or any((tmp_path / "figures").iterdir())
    if row.again:
        monkeypatch.setattr(f"experiments.{row.again}", used_again)
        module.main(options, *more)
        assert json.loads(path.read_text())["rows"] == record["rows"]
