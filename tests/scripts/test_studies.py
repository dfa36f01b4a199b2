"""Every study at toy size: its record tells how it was made and has its rows, its picture is drawn,
it goes on.
"""

import dataclasses
import importlib
import json
from pathlib import Path

import pytest
import tyro
from toys import POINTERS

from experiments.families import projection
from experiments.masked_diffusion import markov_train
from experiments.masked_diffusion.markov import Chain
from experiments.recurrent_depth import pointers
from experiments.recurrent_depth.rival_settings import (
    PARALLEL,
    SEVERAL,
    jacobi,
    static,
    wave,
)
from experiments.systems.machine import Rates
from experiments.tasks.pointers import Stage
from paradec_jax import load
from paradec_jax.losses.self_distillation import DistillationRules
from paradec_jax.objectives.sdtt import Sdtt

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow
CHAINS = "--ground chains --count 3 --blocks 1 --block 4 --rows 2"
HEADS = f"{CHAINS} --runs TOYS --thresholds 0.9 --depths 3 --folder OUT/results"
LEARNING = (
    "--updates 2 --rows 2 --pool 3 --trial-rows 2 --candidates 2 --tuning 3 --problems 4 "
    "--problem-steps 2 2"
)
LAWFUL = (
    "--folder TOYS/markov --figures OUT/figures --samples 12 --draws 2 --temperatures 0.5 "
    "--texts 3 --masks 2"
)
RIVALS = "--model TOYS/pointers --problems 2 --timed 1 --passes 1 --rows 2 --queries 8"
TABLE = "--problems 2 --models tiny-causal tiny-sdar --runs OUT/runs --folder OUT/results"
# Of each study the number of its rows, what keys they or the record have, and its smallest command;
# what is written before the last one is a command that comes first. TOYS is the folder of toy
# models, OUT that of the test; results go to OUT/results/rows.json but where a folder is given.
STUDIES = {
    "block_diffusion.residual_magnitude": (
        4,
        "hidden logits blocks model_sha256",
        "TOYS/chains/model --ground chains --count 3 --blocks 2 --rows 2",
    ),
    "block_diffusion.study": (
        10,
        "label settings positions_per_token flops_per_token head_calls_per_token",
        f"speculation {HEADS} --steps-ahead 1 2",
    ),
    "families.price": (
        2,
        "family line row price interval",
        "--laws mixed --samples 64 --batch 64 --rows autoregressive self_verified "
        "--figure OUT/figures/rows.png",
    ),
    "families.table": (
        3,
        "method words equal_to minutes aup parameters wide flops_per_token absent",
        f"{TABLE} --tune ; {TABLE}",
    ),
    "jacobi.side_by_side": (
        10,
        "model exact difference only_here_exact equals_greedy",
        "TOYS/causal TOYS/other --block 4 --problems 3 --steps 2 2 --budget 5",
    ),
    "masked_diffusion.latency": (
        2,
        "decoder steps batch seconds network_calls speedup crossovers",
        "--preset test-mdlm --length 8 --steps 2 --batches 2 --passes 1 "
        "--figure OUT/figures/rows.png",
    ),
    "masked_diffusion.markov_study": (
        7,
        "model kl over_the_other over_the_perfect over_the_floor aims_at law perfect recipes",
        f"{LAWFUL} --steps 2 --variants halves half-rounds",
    ),
    "masked_diffusion.study": (
        9,
        "line label samples judge_perplexity fourgram_entropy at_equal_entropy bars",
        "frontier --runs TOYS --text TOYS/text.txt --steps 2 4 --length 12 --rows 3 --samples 5 "
        "--frontier 2 4 --temperatures 1.0 0.5 --drawn OUT/drawn.json --folder OUT/results",
    ),
    "recurrent_depth.learn_sampler": (
        5,
        "learner random_search chosen learned_less difference_interval",
        f"--model TOYS/recurrent --steps 5 --ages 2 {LEARNING}",
    ),
    "recurrent_depth.pointers_depth": (
        2,
        "recurrence names_right by_distance",
        "--model TOYS/pointers --problems 3 --queries 8 --figure OUT/figures/rows.png",
    ),
    "recurrent_depth.rivals": (
        8,
        "rival keeps_answers speedup_range prompt_seconds best_way best_sequential four_numbers",
        f"{RIVALS} --tune --out OUT/tuning.json ; {RIVALS} --tuning OUT/tuning.json",
    ),
    "recurrent_depth.serial_steps": (
        5,
        "decoder depth serial_first in_flight core_positions",
        "--preset test-recurrent --recurrence 2 --new-tokens 4",
    ),
    "recurrent_depth.width_depth": (
        6,
        "tokens variant total parallelism",
        "--preset test-recurrent --tokens 4 6 --factors 2",
    ),
}
FILES = {"block_diffusion.study": "speculation-chains", "masked_diffusion.study": "frontier"}
FILES |= {"families.table": "table"}
AGAIN = {  # what a second call does not use
    "block_diffusion.study": "block_diffusion.lines.compare",
    "masked_diffusion.markov_study": "masked_diffusion.markov_study.sampled",
    "masked_diffusion.study": "masked_diffusion.texts.draw",
}
GRID = {"autoregressive": [static(2), static(16)]}
GRID |= {PARALLEL[0]: [jacobi(4, 4, False)], SEVERAL: [wave(4, 6, 6, 0.8)]}
METHODS = """
tiny-causal | one by one | | autoregressive
tiny-causal | Jacobi | one by one | jacobi --block {4,8,16}
tiny-causal | drafts | one by one | drafted
tiny-sdar | one a step | | block --rule static
"""
PATCHES = {
    "families.table": ("METHODS", METHODS),
    "masked_diffusion.latency": ("rates", lambda dtype: Rates({"sum": 1e9}, 1e9, {})),
    "recurrent_depth.pointers_depth": ("RECURRENCES", (2, 3)),
    "recurrent_depth.rivals": ("grid", lambda queries: GRID),
}
ELSEWHERE = (  # tests of their own
    "jacobi.study recurrent_depth.study recurrent_depth.distill_waves recurrent_depth.pointers "
    "masked_diffusion.markov_train families.projection launch.local lm_eval.execution lm_eval.run systems.checkouts "
    "systems.few_rows systems.kernels systems.memory systems.plan systems.report systems.slot "
    "real.drafts real.measure real.peer masked_diffusion.compare_texts"
)


STUDENTS = Sdtt(rounds=2, rules=DistillationRules(first_steps=8))
LAW = markov_train.Recipe(Chain((0.7, 0.2, 0.1), 8, 1), 500, 16, 1, 3, STUDENTS, 2)


@pytest.fixture(scope="module")
def markov(toys):
    """A teacher of a law that is known, and its students, after a call that was stopped."""
    folder = toys / "markov"
    markov_train.main(LAW, folder, minutes=0.0)
    assert not (folder / "teacher" / "model").exists()
    markov_train.main(LAW, folder)
    with pytest.raises(SystemExit, match="was begun with other width"):
        markov_train.main(dataclasses.replace(LAW, width=8), folder)


def test_counts_are_projected():
    """Positions between those that were timed and beyond, by the quickest flags; rows of other calls
    are left out.
    """
    timed = [
        {"shape": "s", "positions": n, "milliseconds": {"kernels": m, "plain": 2 * m}}
        for n, m in ((8, 3.0), (1, 2.0))
    ]
    names = "family head_calls_per_token network_calls_per_token tokens_per_network_call positions_per_token"
    table = [
        dict(zip(names.split(), row, strict=True))
        for row in (
            ("causal", 0, 1.0, 1.0, 1.0),
            ("recurrent_depth", 0, 1.0, 1.0, 1.0),
            ("causal", 0, 0.25, 4.0, 1.125),  # 4.5 positions a call
            ("block_diffusion", 1.0, 0.5, 2.0, 2.0),
            ("block_diffusion", 0, 0.5, 2.0, 8.0),
        )
    ]
    rows = projection.projected(table, timed)
    assert [row["tokens_per_second"] for row in rows] == pytest.approx([500, 1600, 2000 / 3])
    assert [row["speedup"] for row in rows] == pytest.approx([1, 3.2, 4 / 3])


def test_pointers_are_trained(tmp_path):
    stages = (Stage(0, 4, 1, queries=2, rows=2), Stage(1, 8, 2, queries=3, rows=1))
    short = {"curriculum": stages, "updates": 2, "warmup": 1, "cooldown": 1}
    pointers.main(dataclasses.replace(POINTERS, **short), tmp_path)
    assert load(tmp_path / "model").config == POINTERS.shape


def used_again(*_, **__):
    raise AssertionError("a row that is done is made again")


@pytest.mark.parametrize("name", STUDIES)
def test_a_study_writes_its_record(name, toys, tmp_path, monkeypatch, request):
    (count, keys, words), module = STUDIES[name], importlib.import_module(f"experiments.{name}")
    if "markov" in name:
        request.getfixturevalue("markov")
    if name in PATCHES:
        monkeypatch.setattr(module, *PATCHES[name])
    path = tmp_path / "results" / f"{FILES.get(name, 'rows')}.json"
    if "results" not in words:
        words += f" --out {path}"

    def run():
        for command in words.replace("TOYS", str(toys)).replace("OUT", str(tmp_path)).split(" ; "):
            tyro.cli(module.main, args=command.split(), config=(tyro.conf.CascadeSubcommandArgs,))
        return json.loads(path.read_text())

    record = run()
    rows = record.get("rows") or record["by_recurrence"]
    assert record.keys() >= {"command", "options", "facts"} and len(rows) == count
    missing = set(keys.split()) - record.keys()
    assert all(missing <= row.keys() for row in rows), missing
    pictures = list((tmp_path / "figures").glob("*"))
    assert pictures or "figures" not in words
    assert all(picture.stat().st_size > 1000 for picture in pictures)
    if name in AGAIN:
        monkeypatch.setattr(f"experiments.{AGAIN[name]}", used_again)
        assert run()["rows"] == rows


def test_every_script_is_run():
    scripts = {
        f"{path.parent.name}.{path.stem}"
        for path in (ROOT / "experiments").glob("*/*.py")
        if '__name__ == "__main__"' in path.read_text(encoding="utf-8")
        and path.parent.name != "tasks"
    }
    assert scripts == {*STUDIES, *ELSEWHERE.split()}
