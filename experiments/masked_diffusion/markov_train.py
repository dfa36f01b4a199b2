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
from typing import Any

import jax

from experiments.common import precision
from experiments.common.command import claim, run
from experiments.common.processes import alone
from experiments.masked_diffusion import distill
from experiments.masked_diffusion.markov import Chain
from paradec_jax import Model, load, save
from paradec_jax.data.text import Text, character_spec, character_tokenizer
from paradec_jax.families import PRESETS, init_params
from paradec_jax.losses import BoundRules
from paradec_jax.noise import Times
from paradec_jax.recipes.masked import Masked
from paradec_jax.recipes.run import Run, train
from paradec_jax.tokenizer import Tokenizer

HELD_OUT = 512  # texts

STUDENTS = distill.Recipe(
    name="students", rounds=4, first_steps=32, updates=400, rows=64, warmup=50, learning_rate=1e-3
)


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Numbers of one run.

    Attributes:
      chain: the law.
      symbols: of the run of the chain that windows are taken from.
      preset: model shape of the teacher, with its `width` and `layers`.
      rows: windows of a batch of the teacher's.
      updates: updates of the teacher.
      students: of all rounds.
    """

    chain: Chain = Chain()  # noqa: RUF009
    symbols: int = 2_000_000
    preset: str = "tiny-mdlm"
    width: int = 64
    layers: int = 3
    rows: int = 128
    updates: int = 1200
    students: distill.Recipe = STUDENTS

    def __post_init__(self) -> None:
        length = self.chain.length
        if self.students.length not in (None, length):
            raise ValueError(
                f"students must read windows of the chain's length {length}, not {self.students.length}"
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
    chain = Chain(tuple(law["weights"]), law["length"], law["seed"])
    return Recipe(**told | {"chain": chain, "students": distill.Recipe(**told["students"])})


def law_of(folder: Path) -> Chain:
    """The law that a run was trained on.

    Raises:
      ValueError: a folder without a run.
    """
    return recipe_of(folder).chain


def taught(recipe: Recipe, source: Text, tokenizer: Tokenizer, folder: Path, minutes: float) -> None:
    """Trains the teacher by `paradec train masked`, on lines of the run, which follow each other.

    Raises:
      Stopped: the minutes are over before the training is.
    """
    sizes: dict[str, Any] = {
        "width": recipe.width,
        "layers": recipe.layers,
        "max_length": recipe.chain.length,
    }
    config = dataclasses.replace(PRESETS[recipe.preset], vocab_size=tokenizer.vocab_size, **sizes)
    params = init_params(config, jax.random.fold_in(jax.random.key(0), 0))
    save(folder / "start", Model(config, params, character_spec(tokenizer, "own"), tokenizer), overwrite=True)
    text = tokenizer.decode(source.train[0])
    lines = (text[at : at + 1000] for at in range(0, len(text), 1000))
    (folder / "data.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    options = Run(
        model=str(folder / "start"),
        data=str(folder / "data.jsonl"),
        out=folder,
        minutes=minutes,
        updates=recipe.updates,
        batch_tokens=recipe.rows * recipe.chain.length,
        optimizer="muon",
        learning_rate=8e-3,
        adam_learning_rate=3e-3,
        weight_decay=0.01,
        warmup=0.042,
        ema=0.998,
        products=precision.natural(),
    )
    train(Masked(rules=BoundRules(times=Times(floor=0.02))), options)


def main(recipe: Recipe = Recipe(), folder: Path = Path("runs/markov"), minutes: float = 30.0) -> None:
    """Trains the teacher, then all rounds.

    Args:
      recipe: the numbers of the run.
      folder: where everything goes.
      minutes: after so many this call saves and ends; the next one goes on.
    """
    alone()
    until = time.monotonic() + 60 * minutes
    recipe = dataclasses.replace(recipe, students=recipe.students.settled())
    claim(folder, recipe)
    source, tokenizer = source_of(recipe)
    teacher, students = folder / "teacher", folder / "students"
    if not (teacher / "model").exists():
        taught(recipe, source, tokenizer, teacher, minutes)
    model = load(teacher / "model", dtype="float32")
    if not (students / "held_out.json").exists():
        left = max((until - time.monotonic()) / 60, 0.0)
        distill.go_on(recipe.students, model, source, students, None, left)


if __name__ == "__main__":
    run(main)
