"""`paradec compare`: every decoder on the same problems with exact answers, or on texts drawn from nothing."""

import sys
from typing import Annotated, Any, Literal

from tyro.conf import UseAppendAction, arg

from paradec_jax import store
from paradec_jax.cli.compare_texts import compare_families_texts
from paradec_jax.cli.output import JsonPath, check_json, progress, write_json
from paradec_jax.cli.tables import print_pairs, print_table
from paradec_jax.evaluate import compare, word_problems
from paradec_jax.evaluate.compare import TIMED
from paradec_jax.families import family_named
from paradec_jax.generate import lacks_head

PROBLEMS, STEPS = 200, (2, 8)
OF_PROBLEMS = {"problems": PROBLEMS, "steps": STEPS, "split": "test", "timed": TIMED}


def compare_command(
    family: Literal["recurrent_depth", "causal", "masked_diffusion", "block_diffusion"] = "recurrent_depth",
    model: UseAppendAction[Annotated[tuple[str, ...], arg(metavar="DIR|NAME")]] = (),
    problems: int = PROBLEMS,
    steps: tuple[int, int] = STEPS,
    seed: int = 1,
    split: Literal["test", "tune"] = "test",
    timed: int = TIMED,
    judge: Annotated[str | None, arg(metavar="DIR|NAME")] = None,
    real: Annotated[str | None, arg(metavar="FILE")] = None,
    samples: int | None = None,
    length: int | None = None,
    texts: Annotated[str | None, arg(metavar="DIR")] = None,
    json: JsonPath = None,
) -> int:
    """Decodes the same unseen word problems with every decoder and prints one table.

    Exact answers are counted over all problems, decoded in batches; speed is measured on the first of them,
    one at a time, decoders in turns. Each model has a table of its own.

    Models of masked diffusion draw texts from nothing instead, and models of the family causal draw beside them: what
    a judge says of the texts, how varied they are, what they cost. They take judge, real, samples, length and texts,
    and the other families problems, steps, split and timed.

    Args:
      family: model family; its settings are the rows of the table.
      model: a model folder, or the name of a bundled model; may be given several times. By default the bundled
        models of the family.
      problems: number of problems.
      steps: fewest and most steps of a problem's solution, from 2 to 8.
      seed: of the problems and of all draws.
      split: "test" for problems that nothing was chosen on, "tune" for those that settings are chosen on.
      timed: problems of the speed measurement, at least 1.
      judge: model that judges texts, a folder or the name of a bundled one; the family's own by default.
      real: a text whose last tenth is real text that no model here was trained on: it gets a row, and texts are held
        against it.
      samples: texts of a row, 64 by default; 512 or more for figures that are to be reported.
      length: tokens of a text; as many as all models have room for by default.
      texts: folder that the texts of each row are written into, as JSON lines.
      json: print nothing but a list of JSON objects, one a row; with a PATH, write the list there as well as
        printing the table.
    """
    chosen = family_named(family)
    of_texts: dict[str, Any] = {
        "judge": judge,
        "real": real,
        "samples": samples,
        "length": length,
        "texts": texts,
    }
    if chosen.texts is not None:
        given = {"problems": problems, "steps": tuple(steps), "split": split, "timed": timed}
        _refuse([name for name, value in given.items() if value != OF_PROBLEMS[name]], family)
        return compare_families_texts(chosen, model, seed=seed, json=json, **of_texts)
    _refuse([name for name, value in of_texts.items() if value is not None], family)
    if problems < 1:
        raise ValueError(f"--problems must be at least 1, not {problems}")
    if timed < 1:
        raise ValueError(f"--timed must be at least 1, not {timed}")
    check_json(json)
    if not (model or chosen.bundled):
        raise ValueError(
            f"no model of family {family} is bundled yet: give --model, a folder that was trained or converted"
        )
    models = {name: store.load(name) for name in model or chosen.bundled}
    names = dict(zip(models, store.names_of(list(models)), strict=True))
    for name, loaded in models.items():
        if loaded.family != chosen.name:
            raise ValueError(f"{name} is of family {loaded.family}, but --family is {chosen.name}")
    drawn = word_problems(problems, seed=seed, steps=steps, split=split)
    results = {}
    for name, loaded in models.items():
        with progress() as report:
            short = names[name]
            settings = [one for one in chosen.settings if not lacks_head(loaded, one.decoder)]
            if len(settings) < len(chosen.settings):
                print(f"{short} has no residual head: decoders that ask one are left out", file=sys.stderr)
            results[short] = compare(
                loaded, drawn, settings, name=short, seed=seed, timed=timed, report=report
            )
    if json is not None:
        drawing = {"split": split, "seed": seed, "steps": list(steps)}
        write_json(
            [row | drawing | {"facts": result.facts} for result in results.values() for row in result.rows],
            json,
        )
    if json != "-":
        for result in results.values():
            print_table(result, steps, seed, split)
        print_pairs(results)
    return 0


def _refuse(names: list[str], family: str) -> None:
    """Refuses options that mean nothing to a family. Raises ValueError."""
    if names:
        raise ValueError(f"--{names[0]} is no option of family {family}")
