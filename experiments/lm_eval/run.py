"""Scores a model and a decoder on a benchmark file that you bring, by lm-eval. Nothing is
downloaded.

    python -m experiments.lm_eval.run gsm8k test.jsonl --model DIR --examples train.jsonl --shots 5
    python -m experiments.lm_eval.run humaneval HumanEval.jsonl.gz --model DIR --decoder jacobi
    --execute

Needs the extra `eval`. Tasks are the YAML files beside this script; more of lm-eval's are asked
from Python with `tasks_of` and `paradec_jax.evaluate.harness.DecoderLM`.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any, Literal

import tyro

from experiments.common.command import run as run_command
from paradec_jax import store
from paradec_jax.evaluate.tables import TABLES
from paradec_jax.families import choose
from paradec_jax.io import atomic_write_text

HERE = Path(__file__).parent
Task = Literal["gsm8k", "humaneval", "mbpp", "lambada", "math500"]


@dataclasses.dataclass(frozen=True)
class Options:
    """One task, one model, one decoder.

    Attributes:
      task: name of a task.
      file: its items.
      model: what `paradec_jax.load` takes.
      decoder: as of `paradec compare`, "jacobi --block 8"; the last one of the model's family when
        None.
      limit: items at most, the first ones.
      shots: solved examples before each item, from `examples`.
      examples: file of solved examples; a GSM8K train split.
      execute: run the code that the model writes, which HumanEval and MBPP need; it is no sandbox.
      rows: items decoded together.
      seed: of all draws.
      out: file of the scores and of every answer, as JSON.
    """

    task: tyro.conf.Positional[Task]
    file: tyro.conf.Positional[Path]
    model: str
    decoder: str | None = None
    limit: int | None = None
    shots: int = 0
    examples: Path | None = None
    execute: bool = False
    rows: int = 8
    seed: int = 0
    out: Path | None = None

    def __post_init__(self) -> None:
        for path in (self.file, self.examples):
            if path is not None and not path.is_file():
                raise ValueError(f"there is no file {path}")
        if self.shots and self.examples is None:
            raise ValueError(
                f"--shots {self.shots} needs a file of solved examples: --examples FILE"
            )


def task_of(name: str, file: Path, shots: int = 0, examples: Path | None = None) -> dict[str, Any]:
    """A task of lm-eval over local files."""
    from lm_eval.tasks._yaml_loader import load_yaml

    files = {"test": str(file)} | ({} if examples is None else {"train": str(examples)})
    split = {} if examples is None else {"fewshot_split": "train"}
    config = load_yaml(HERE / f"{name}.yaml", resolve_func=True)
    return config | split | {"dataset_kwargs": {"data_files": files}, "num_fewshot": shots}


def main(options: tyro.conf.OmitArgPrefixes[Options]) -> None:
    """Prints the scores of a task."""
    import lm_eval

    from paradec_jax.evaluate.harness import DecoderLM

    model = store.load(options.model)
    chosen = TABLES[model.family][-1]
    if options.decoder is not None:
        chosen = choose(model.family, options.decoder)
    lm = DecoderLM(model, chosen.decoder, chosen.knobs, rows=options.rows, seed=options.seed)
    found = lm_eval.simple_evaluate(
        model=lm,
        tasks=[task_of(options.task, options.file, options.shots, options.examples)],
        limit=options.limit,
        log_samples=options.out is not None,
        confirm_run_unsafe_code=options.execute,
    )
    assert found is not None
    for name, value in next(iter(found["results"].values())).items():
        if isinstance(value, float):
            print(f"{name}: {value:.4f}")
    if options.out is not None:
        told = {name: found[name] for name in ("results", "samples")}
        atomic_write_text(options.out, json.dumps(told, indent=1, default=str) + "\n")


if __name__ == "__main__":
    run_command(main)
