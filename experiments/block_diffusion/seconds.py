"""Seconds of block diffusion beside decoding one token after the other, at several batch sizes.

`python -m experiments.block_diffusion.seconds MODEL`. MODEL, a backbone and its head, and a causal model decode the
same unseen word problems, all decoders in turns: one token a step and at a threshold, with stores and prompts fused
and not, speculation with the head and with none. Speed-ups are over the causal model at the same batch size.
"""

import dataclasses
from pathlib import Path
from typing import Any

import tyro

from experiments.common.command import run as run_command
from experiments.common.record import write_record
from experiments.tasks import word_problems
from paradec_jax import (
    AutoRegressive,
    BlockDenoising,
    Model,
    Residual,
    ResidualSpeculative,
    facts,
    load,
    store,
)
from paradec_jax.decode.machine.setting import Setting
from paradec_jax.evaluate.compare import Prompts, case_of, prompts_of, with_parameters
from paradec_jax.evaluate.intervals import ends, speedup
from paradec_jax.generate import lacks_head
from paradec_jax.timing import Case, measure


@dataclasses.dataclass(frozen=True)
class Options:
    """What to measure.

    Attributes:
      model: folder, or name of a bundled model, of block diffusion; without a head its rows are left out.
      beside: the same of a causal model with the same tokens.
      batches: batch sizes.
      problems: problems, a multiple of every batch size.
      steps: fewest and most steps of a problem.
      threshold: of the dynamic rule.
      candidates: K, states that speculation verifies.
      seed: of problems.
      passes: timings of each.
      out: where the JSON goes.
    """

    model: tyro.conf.Positional[str]
    beside: str = "tiny-causal"
    batches: tuple[int, ...] = (1, 4, 16)
    problems: int = 16
    steps: tuple[int, int] = (2, 4)
    threshold: float = 0.9
    candidates: int = 3
    seed: int = 1
    passes: int = 5
    out: Path = Path("experiments/block_diffusion/results/seconds.json")

    def __post_init__(self) -> None:
        if min(self.batches, default=0) < 1 or any(self.problems % size for size in self.batches):
            raise ValueError(f"batches {self.batches} must divide the {self.problems} problems")


def settings_of(options: Options) -> list[Setting]:
    """Decoders of block diffusion."""
    found: list[Setting] = []
    for fused in (True, False):
        own: dict[str, Any] = {"fuse_store": fused, "fuse_prompt": fused}
        tau: dict[str, Any] = {"threshold": options.threshold}
        found.append(Setting("block", BlockDenoising(rule="static", **own)))
        found.append(Setting("block", BlockDenoising(**own), BlockDenoising.Knobs(**tau)))
        for head in ("zero", None):
            spec = ResidualSpeculative(head=head, candidates=options.candidates, ride=fused, **own)
            found.append(Setting("residual_speculative", dataclasses.replace(spec, rule="static")))
            found.append(Setting("residual_speculative", spec, spec.Knobs(**tau)))
            direct = Residual(head=head, rule="static", **own)
            found.append(Setting("residual", direct))
    return found


def prompts_of_both(model: Model, other: Model, options: Options) -> Prompts:
    """The problems.

    Raises:
      ValueError: models with other tokens.
    """
    problems = word_problems(options.problems, seed=options.seed, steps=options.steps)
    own, of_other = (prompts_of(one, problems, options.seed, None) for one in (model, other))
    same = own.tokens.tolist() == of_other.tokens.tolist() and own.stop == of_other.stop
    if not same or own.budget != of_other.budget:
        raise ValueError(f"{options.beside} reads other tokens than {options.model}, or has room for others")
    return own


def cases_of(model: Model, other: Model, prompts: Prompts, options: Options) -> list[tuple[Setting, Case]]:
    """All decoders, each with its parameters, the causal model's first."""
    alone = Setting("autoregressive", AutoRegressive())
    first = case_of(alone, alone.decoder, other, prompts.size)
    found = [(alone, dataclasses.replace(first, params=first.decoder.prepare(other.params)))]
    params = model.network.prepare(model.params)
    for setting in settings_of(options):
        if not lacks_head(model, setting.decoder):
            case = case_of(setting, setting.decoder, model, prompts.size)
            found.append((setting, with_parameters(dataclasses.replace(case, params=params), model, params)))
    return found


def main(options: tyro.conf.OmitArgPrefixes[Options]) -> None:
    """Prints and writes the table."""
    model, other = (load(place, dtype="float32") for place in (options.model, options.beside))
    for one, place, family in (
        (model, options.model, "block_diffusion"),
        (other, options.beside, "causal"),
    ):
        if one.family != family:
            raise ValueError(f"{place} is of family {one.family}, not {family}")
    prompts = prompts_of_both(model, other, options)
    named = cases_of(model, other, prompts, options)
    rows: list[dict[str, Any]] = []
    for size in options.batches:
        requests = [prompts.request(range(at, at + size)) for at in range(0, options.problems, size)]
        speeds = measure([case for _, case in named], None, requests, passes=options.passes)
        for (setting, _), speed in zip(named, speeds, strict=True):
            gain, interval = speedup(speed.generated, speed.each, speeds[0].generated, speeds[0].each)
            row: dict[str, Any] = {
                "decoder": setting.name,
                "label": setting.label(),
                "batch": size,
                "problems": options.problems,
                "tokens": speed.tokens,
                "seconds": speed.seconds,
                "quickest_seconds": min(speed.passes),
                "slowest_seconds": max(speed.passes),
                "tokens_per_second": speed.tokens_per_second,
                "speedup": gain,
                "speedup_interval": ends(interval),
                **{f"{name}_per_token": count / speed.tokens for name, count in speed.counts.items()},
            }
            rows.append(row | {"settings": setting.settings()})
            print(
                f"batch {size:2d}  {setting.name:20s} {row['label']:70s} {row['tokens_per_second']:7.0f} tokens/s  "
                f"{gain:.2f}x of {options.beside}",
                flush=True,
            )
    shown = dataclasses.asdict(options) | {
        f"{name}_sha256": store.fingerprint(place)
        for name, place in (("model", options.model), ("beside", options.beside))
    }
    write_record(options.out, shown, {"rows": rows}, dtypes=facts.dtypes(model.params))


if __name__ == "__main__":
    run_command(main)
