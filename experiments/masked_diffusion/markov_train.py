"""Trains a denoiser of a law that is known, and halves its steps again and again.

`python -m experiments.masked_diffusion.markov_train`. The text is one long run of a Markov chain
(`markov.Chain`), of which all is known exactly. The teacher comes first; then four rounds of
self-distillation take it from 32 steps to 2. A run that was stopped, or that its limit of minutes
ended, goes on where its last checkpoint stood when the same command is given again:

    FOLDER/recipe.json  FOLDER/teacher/model/  FOLDER/students/round-0/model/
    FOLDER/students/round-1/model/  ...

`markov_study` trains the variants that it is asked for, and measures what came out. A variant is
called as on the other ground (`recipes/sdtt.sh`) and differs from the run's students, `halves`, in
the same way. All begin at the same teacher and end at the same aim. But for the studied length of
rounds all have as many updates as `half-rounds`, half of those of `halves`; where a round jumps
farther there are fewer rounds, each of more updates:

    half-rounds 32 -> 16 -> 8 -> 4 -> 2      fourths 32 -> 8 -> 2      eighths 16 -> 2
"""

import dataclasses
import json
import string
import time
from pathlib import Path
from typing import Any

from experiments.common.command import alone, claim, run
from experiments.masked_diffusion.markov import Chain
from experiments.tasks import start
from paradec_jax import store
from paradec_jax.io import atomic_write_text
from paradec_jax.losses import BoundRules
from paradec_jax.losses.self_distillation import DistillationRules
from paradec_jax.noise import Times
from paradec_jax.objectives.job import Stopped
from paradec_jax.objectives.masked import Masked
from paradec_jax.objectives.options import Run
from paradec_jax.objectives.run import train
from paradec_jax.objectives.sdtt import Sdtt

TEACHER: dict[str, Any] = {
    "optimizer": "muon",
    "learning_rate": 8e-3,
    "adam_learning_rate": 3e-3,
    "weight_decay": 0.01,
    "warmup": 0.04,
    "ema": 0.998,
}
STUDENTS: dict[str, Any] = {
    "learning_rate": 1e-3,
    "warmup": 0.03,
    "cooldown": 0.0,
    "ema": 0.99,
    "seed": 10,
}

OWN, REFERENCE = "halves", "half-rounds"
STUDIES = {
    "round_lengths": (OWN, REFERENCE, "short-rounds"),
    "divergences": (REFERENCE, "forward-kl", "tvd", "tvd-released", "mse", "chi-square"),
    "jumps": (REFERENCE, "fourths", "eighths"),
    "resets": (REFERENCE, "optimizer-reset", "ema-teacher", "ema-teacher-reset"),
    "targets": (REFERENCE, "grid-released"),
}
NAMES = tuple(dict.fromkeys(name for names in STUDIES.values() for name in names))
# What differs from a run's own students: share of a round's updates (else a half), jump over
# theirs, rules, rounds.
LENGTHS = {OWN: 1.0, "short-rounds": 0.25}
JUMPS = {"fourths": 2, "eighths": 4}
RULES: dict[str, dict[str, Any]] = {
    **{
        name: {"divergence": name.replace("-", "_")}
        for name in ("forward-kl", "tvd", "mse", "chi-square")
    },
    "tvd-released": {"divergence": "tvd", "released": True},
    "grid-released": {"grid": "released"},
}
ROUNDS: dict[str, dict[str, Any]] = {
    "optimizer-reset": {"reset_optimizer": True},
    "ema-teacher": {"weights": "ema", "reset_ema": True},
    "ema-teacher-reset": {"weights": "ema", "reset_ema": True, "reset_optimizer": True},
}


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Numbers of one run.

    Attributes:
      chain: the law.
      symbols: length of the text that windows are taken from. What is judged are texts drawn apart
        from it.
      width, layers: sizes of the denoiser.
      updates: number of updates of the teacher.
      students: all rounds of self-distillation.
      round_updates: number of updates of each round.
    """

    chain: Chain = Chain()  # noqa: RUF009
    symbols: int = 2_000_000
    width: int = 64
    layers: int = 3
    updates: int = 1200
    students: Sdtt = Sdtt(rounds=4, rules=DistillationRules(first_steps=32))  # noqa: RUF009
    round_updates: int = 400

    def __post_init__(self) -> None:
        if self.symbols < self.chain.length or self.chain.symbols > len(string.ascii_lowercase):
            raise ValueError(
                f"symbols must be at least the length {self.chain.length}, of at most 26 kinds, not {self.symbols} "
                f"of {self.chain.symbols}"
            )


def recipe_of(folder: Path) -> Recipe:
    """The recipe of a run.

    Raises:
      ValueError: a folder without a run.
    """
    path = folder / "recipe.json"
    if not path.is_file():
        raise ValueError(f"there is no run in {folder}: train with `markov_train` first")
    given = json.loads(path.read_text(encoding="utf-8"))
    law, students = given.pop("chain"), given.pop("students")
    rules = students.pop("rules")
    rules |= {"times": Times(**rules["times"])}
    students = Sdtt(**students, rules=DistillationRules(**rules))
    return Recipe(
        Chain(tuple(law["weights"]), law["length"], law["seed"]), students=students, **given
    )


def trained(
    objective: Any, folder: Path, run: Path, until: float, rows: int, **options: Any
) -> bool:
    """Trains FOLDER/model on the text of a run where it is not there; whether it is, or the time is
    over.
    """
    if not (folder / "model").exists():
        left = max((until - time.monotonic()) / 60, 0.0)
        tokens, text = rows * recipe_of(run).chain.length, str(run / "text.jsonl")
        try:
            train(
                objective, Run(data=text, batch_tokens=tokens, minutes=left, out=folder, **options)
            )
        except Stopped:
            return False
    return True


def variant(name: str, recipe: Recipe) -> tuple[Sdtt, int]:
    """What the name of a variant means beside the students of a recipe: students, and updates of a
    round.
    """
    students = recipe.students
    updates = students.rounds * max(int(recipe.round_updates * LENGTHS.get(name, 0.5)), 1)
    jump, rounds = students.rules.jump * JUMPS.get(name, 1), students.rounds
    if name in JUMPS:
        most, aim = students.rules.first_steps, students.aim
        rounds = max((n for n in range(1, rounds + 1) if aim * jump**n <= most), default=1)
    changes = {"jump": jump, "first_steps": students.aim * jump**rounds, **RULES.get(name, {})}
    rules = dataclasses.replace(students.rules, **changes)
    more = ROUNDS.get(name, {})
    return dataclasses.replace(students, rounds=rounds, rules=rules, **more), updates // rounds


def distilled(name: str, run: Path, until: float) -> tuple[Sdtt, Path] | None:
    """Trains a variant of a run where that is not done: its students and their folder; None where
    the time is over.

    Raises:
      ValueError: a run whose teacher is not done.
    """
    model = run / "teacher" / "model"
    if not model.exists():
        raise ValueError(f"{run / 'teacher'} is not done: go on with `markov_train`")
    students, updates = variant(name, recipe_of(run))
    folder = run / ("students" if name == OWN else f"variants/{name}")
    options = {"model": str(model), "updates": updates, **STUDENTS}
    done = trained(students, folder, run, until, 64, **options)
    return (students, folder) if done else None


def main(
    recipe: Recipe = Recipe(), folder: Path = Path("runs/markov"), minutes: float = 30.0
) -> None:
    """Trains the teacher, then all rounds.

    Args:
      recipe: the numbers of the run.
      folder: where everything goes.
      minutes: after so many this call saves and ends; the next one goes on.
    """
    alone()
    until, chain, text = time.monotonic() + 60 * minutes, recipe.chain, folder / "text.jsonl"
    claim(folder, recipe)
    if not text.exists():
        walked = chain.walk(recipe.symbols, [chain.seed, 1])
        letters = "".join(string.ascii_lowercase[symbol] for symbol in walked)
        atomic_write_text(text, json.dumps({"text": letters}) + "\n")
    sizes: dict[str, Any] = {
        "width": recipe.width,
        "layers": recipe.layers,
        "max_length": chain.length,
    }
    first = start.Options("tiny-mdlm", folder / "start", text, **sizes)
    store.save(first.folder, start.begun(first), overwrite=True)
    teacher = Masked(rules=BoundRules(times=Times(floor=0.02)))
    options = {"model": str(first.folder), "updates": recipe.updates, **TEACHER}
    if trained(teacher, folder / "teacher", folder, until, 128, **options):
        distilled(OWN, folder, until)


if __name__ == "__main__":
    run(main)
