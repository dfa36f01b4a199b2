"""`paradec compare`: every decoder on the same problems with exact answers."""

from typing import Annotated, Literal

from tyro.conf import UseAppendAction, arg

from paradec_jax import store
from paradec_jax.cli.output import JsonPath, check_json, progress, write_json
from paradec_jax.cli.tables import print_pairs, print_table
from paradec_jax.evaluate import compare, word_problems
from paradec_jax.evaluate.compare import TIMED
from paradec_jax.families import family_named


def compare_command(
    family: Literal["recurrent_depth", "causal", "jacobi"] = "recurrent_depth",
    model: UseAppendAction[Annotated[tuple[str, ...], arg(metavar="DIR|NAME")]] = (),
    problems: int = 200,
    steps: tuple[int, int] = (2, 8),
    seed: int = 1,
    split: Literal["test", "tune"] = "test",
    timed: int = TIMED,
    json: JsonPath = None,
) -> int:
    """Decodes the same unseen word problems with every decoder and prints one table.

    Exact answers are counted over all problems, decoded in batches; speed is measured on the first of them,
    one at a time, decoders in turns. Each model has a table of its own.

    Args:
      family: model family; its settings are the rows of the table ("jacobi" is a former name of "causal").
      model: a model folder, or the name of a bundled model; may be given several times. By default the bundled
        models of the family.
      problems: number of problems.
      steps: fewest and most steps of a problem's solution, from 2 to 8.
      seed: of the problems and of all draws.
      split: "test" for problems that nothing was chosen on, "tune" for those that settings are chosen on.
      timed: problems of the speed measurement, at least 1.
      json: print nothing but a list of JSON objects, one a row; with a PATH, write the list there as well as
        printing the table.
    """
    if problems < 1:
        raise ValueError(f"--problems must be at least 1, not {problems}")
    if timed < 1:
        raise ValueError(f"--timed must be at least 1, not {timed}")
    check_json(json)
    chosen = family_named(family)
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
            results[short] = compare(
                loaded, drawn, chosen.settings, name=short, seed=seed, timed=timed, report=report
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
