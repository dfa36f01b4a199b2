"""Trains a denoiser of a law that is known, and halves its steps again and again.

`python -m experiments.masked_diffusion.markov_train`. The text is one long run of a Markov chain (`markov.Chain`),
of which all is known exactly. The teacher comes first; then four rounds of self-distillation take it from 32 steps to
2. A run that was stopped, or that its limit of minutes ended, goes on where its last checkpoint stood when the same
command is given again:

    FOLDER/recipe.json  FOLDER/teacher/model/  FOLDER/students/round-0/model/  FOLDER/students/round-1/model/  ...

`markov_study` measures what came out.
"""

import dataclasses
import json
import string
import time
from pathlib import Path

from experiments.common.command import claim, run
from experiments.common.processes import alone
from experiments.masked_diffusion import distill, train
from experiments.masked_diffusion.markov import Chain
from paradec_jax import load
from paradec_jax.data.text import Text, character_tokenizer
from paradec_jax.tokenizer import Tokenizer

HELD_OUT = 512  # texts

TEACHER = train.Recipe(
    name="teacher",
    width=64,
    layers=3,
    length=32,
    rows=128,
    steps=1200,
    warmup=50,
    cooldown=0.5,
    weight_decay=0.01,
)
STUDENTS = distill.Recipe(
    name="students", rounds=4, first_steps=32, updates=400, rows=64, warmup=50, learning_rate=1e-3
)


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Numbers of one run.

    Attributes:
      chain: the law.
      symbols: of the run of the chain that windows are taken from.
      teacher: of the first training. No share of the run is held out: what is judged are texts drawn apart from it.
      students: of all rounds.
    """

    chain: Chain = Chain()  # noqa: RUF009
    symbols: int = 2_000_000
    teacher: train.Recipe = TEACHER
    students: distill.Recipe = STUDENTS

    def __post_init__(self) -> None:
        length = self.chain.length
        if self.teacher.length != length or self.students.length not in (None, length):
            raise ValueError(
                f"teacher and students must read windows of the chain's length {length}, not {self.teacher.length} "
                f"and {self.students.length}"
            )
        if self.symbols < length or self.chain.symbols > len(string.ascii_lowercase):
            raise ValueError(
                f"symbols must be at least the length {length}, of at most 26 kinds, not {self.symbols} of "
                f"{self.chain.symbols}"
            )


def source_of(recipe: Recipe) -> tuple[Text, Tokenizer]:
    """The text, with letters for the symbols and held-out texts of the law's length one after the other."""
    chain = recipe.chain
    walked, held_out = chain.walk(recipe.symbols, [chain.seed, 1]), chain.draw(HELD_OUT, [chain.seed, 2])
    tokenizer = character_tokenizer(string.ascii_lowercase[: chain.symbols])
    return Text((walked,), (held_out.reshape(-1),), f"{chain.digest} {recipe.symbols}"), tokenizer


def recipe_of(folder: Path) -> Recipe:
    """The recipe of a run.

    Raises:
      ValueError: a folder without a run.
    """
    path = folder / "recipe.json"
    if not path.is_file():
        raise ValueError(f"there is no run in {folder}: train with `markov_train` first")
    told = json.loads(path.read_text(encoding="utf-8"))
    law = told["chain"]
    return Recipe(
        Chain(tuple(law["weights"]), law["length"], law["seed"]),
        told["symbols"],
        train.Recipe(**told["teacher"]),
        distill.Recipe(**told["students"]),
    )


def law_of(folder: Path) -> Chain:
    """The law that a run was trained on.

    Raises:
      ValueError: a folder without a run.
    """
    return recipe_of(folder).chain


def main(recipe: Recipe = Recipe(), folder: Path = Path("runs/markov"), minutes: float = 30.0) -> None:
    """Trains the teacher, then all rounds.

    Args:
      recipe: the numbers of the run.
      folder: where everything goes.
      minutes: after so many this call saves and ends; the next one goes on.
    """
    alone()
    until = time.monotonic() + 60 * minutes
    recipe = dataclasses.replace(recipe, teacher=recipe.teacher.settled(), students=recipe.students.settled())
    claim(folder, recipe)
    source, tokenizer = source_of(recipe)
    teacher, students = folder / "teacher", folder / "students"
    if not (teacher / "held_out.json").exists() and not train.go_on(
        recipe.teacher, train.untrained(recipe.teacher, tokenizer), source, teacher, None, minutes
    ):
        return
    model = load(teacher / "model", dtype="float32")
    if not (students / "held_out.json").exists():
        left = max((until - time.monotonic()) / 60, 0.0)
        distill.go_on(recipe.students, model, source, students, None, left)


if __name__ == "__main__":
    run(main)
