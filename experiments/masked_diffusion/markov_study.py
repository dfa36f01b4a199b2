"""What a trained denoiser, its students and the perfect denoiser write, against the law: how far,
how varied.

    python -m experiments.masked_diffusion.markov_study                     # after `markov_train`
    python -m experiments.masked_diffusion.markov_study --variants all --steps 2 4

All measures are in nats, those of samples a symbol::

    cross-entropy   mean of -log p(x) over samples x of a model in N steps, p the law
    entropy         mean of -log q(x), q the law of what the model writes in N steps
    KL(q || p)      cross-entropy - entropy: of whole texts, over their length

q is exact for the perfect denoiser. For other networks it lies between two estimates, which are
close to one another (`sample_law`); a figure is the middle, and its 95% interval reaches from the
end of the lower one's to that of the upper one's. Sample i is drawn with the same key by every
model, so that differences are taken sample by sample.

The bound of a model is held against the perfect denoiser's on the same texts and masks, whose mean
is the law's own -log p (but for the last thousandth of the noise, which neither sees): the
difference is the bound less the floor.

Students of other variants (`markov_train`) are trained where they are missing: the last one of each
is measured at equal seeds, and of round lengths all. With them stands a network in bfloat16 beside
its float32 one. What was trained and measured stays in FOLDER/variants and FOLDER/measured, so that
a study that was stopped goes on.
"""

import dataclasses
import functools
import itertools
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from experiments.common.command import alone
from experiments.common.command import run as run_command
from experiments.common.known import KnownLaw
from experiments.common.plots import draw_panels
from experiments.common.record import write_record
from experiments.masked_diffusion.markov import Chain
from experiments.masked_diffusion.markov_train import (
    NAMES,
    OWN,
    REFERENCE,
    STUDIES,
    distilled,
    recipe_of,
)
from experiments.masked_diffusion.sample_law import (
    Measured,
    apart,
    at_equal_entropy,
    interval,
    log_law,
    log_law_between,
)
from paradec_jax import facts, load, make_request, run, store
from paradec_jax.config import TokenSpec
from paradec_jax.decode import Masked
from paradec_jax.decode.machine.request import keys_of, seed_words
from paradec_jax.decode.rules import partition
from paradec_jax.evaluate.bound import bounds
from paradec_jax.evaluate.likelihood import Span
from paradec_jax.objectives.sdtt import Sdtt

PERFECT, TEACHER = "perfect", "teacher"
AT_A_TIME = 500  # samples that are drawn together
Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Options:
    """What to train and to measure.

    Attributes:
      folder: of the run.
      variants: "halves", the run's students; with "half-rounds" others, which are held against it;
        "all" for every one.
      samples: of a row.
      draws: partitions of a sample, by which q is estimated.
      steps: N.
      temperatures: the lower ones, of the perfect denoiser.
      texts: by which bounds are taken.
      masks: of each of them.
      seed: of all draws.
      minutes: after so many a training saves and the call ends; the next one goes on.
      out: where the JSON goes.
      figures: the folder of the pictures.
    """

    folder: Path = Path("runs/markov")
    variants: tuple[str, ...] = (OWN,)
    samples: int = 1000
    draws: int = 4
    steps: tuple[int, ...] = (2, 4, 8, 16)
    temperatures: tuple[float, ...] = (0.9, 0.8, 0.7, 0.6, 0.5)
    texts: int = 512
    masks: int = 32
    seed: int = 0
    minutes: float = 60.0
    out: Path = Path("experiments/masked_diffusion/results/markov.json")
    figures: Path = Path("experiments/masked_diffusion/figures")

    def __post_init__(self) -> None:
        if unknown := set(self.variants) - {*NAMES, "all"}:
            raise ValueError(f"variants must be of {', '.join(NAMES)} or all, not {unknown}")
        if min(self.samples, self.texts, self.masks) < 2 or min(self.draws, *self.steps) < 1:
            raise ValueError("samples, texts and masks must be at least 2, draws and steps 1")

    @property
    def names(self) -> tuple[str, ...]:
        """The variants, with the one that others are held against."""
        if "all" in self.variants:
            return NAMES
        others = set(self.variants) - {OWN, REFERENCE}
        return tuple(dict.fromkeys((*self.variants, *((REFERENCE,) if others else ()))))


@dataclasses.dataclass(frozen=True, eq=False)
class Writer:
    """A model that writes texts; `sha256` names its weights."""

    name: str
    network: Any
    params: Any
    sha256: str


@dataclasses.dataclass(frozen=True, eq=False)
class Student:
    """A model to measure.

    Attributes:
      variant: its name.
      which: its round, counted from 1; 0 is the teacher.
      aim: the steps that it was made for; None of the teacher.
      writer: its weights.
      other: name of the writer that it is compared with.
    """

    variant: str
    which: int
    aim: float | None
    writer: Writer
    other: str


def writer_of(name: str, place: Path, dtype: str = "float32") -> Writer:
    """The model of a folder."""
    model = load(place, dtype=dtype)
    return Writer(name, model.network, model.params, store.fingerprint(place))


def students_of(runs: Mapping[str, tuple[Sdtt, Path]], folder: Path) -> Iterator[Student]:
    """The teacher, the last student of each variant, all of round lengths, and two in bfloat16."""
    teacher = folder / TEACHER / "model"
    yield Student(TEACHER, 0, None, writer_of(TEACHER, teacher), PERFECT)
    reference = f"{REFERENCE}-{runs[REFERENCE][0].rounds}" if REFERENCE in runs else TEACHER
    for name, (students, place) in runs.items():
        for which in range(1, students.rounds + 1):
            last, aim = which == students.rounds, aim_of(students, which)
            model, title = place / f"round-{which - 1}" / "model", f"{name}-{which}"
            if last or name in STUDIES["round_lengths"]:
                other = reference if last else TEACHER
                yield Student(name, which, aim, writer_of(title, model), other)
            if last and name == REFERENCE:
                half = writer_of(f"{title}-bfloat16", model, "bfloat16")
                yield Student(f"{name}, bfloat16", which, aim, half, reference)
                half = writer_of(f"{TEACHER}-bfloat16", teacher, "bfloat16")
                yield Student(f"{TEACHER}, bfloat16", 0, None, half, TEACHER)


def aim_of(students: Sdtt, which: int) -> float:
    """The steps that the student of a round, counted from 1, aims at."""
    return students.rules.first_steps / students.rules.jump**which


def sampled(
    writer: Writer, chain: Chain, steps: int, temperature: float, options: Options
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Texts [n, L], the partition that each was written by [n, L], and network calls [n]."""
    length, count = chain.length, min(AT_A_TIME, options.samples)
    spec = TokenSpec(mask=chain.symbols, alignment="own")
    decoder = Masked().bind(writer.network, length, spec)
    knobs = decoder.Knobs(steps=steps, temperature=temperature)
    params = decoder.prepare(writer.params)
    parts = []
    for start in range(0, options.samples, count):
        keys = keys_of(seed_words(options.seed), np.arange(start, start + count, dtype=np.int32))
        request = make_request(np.zeros((count, 0), np.int32), max_new_tokens=length, keys=keys)
        decoded = run(decoder, params, request, knobs)
        groups = _groups(keys, length, np.int32(steps))
        parts.append((decoded.tokens[:, :length], groups, decoded.network_calls))
    tokens, groups, calls = (
        np.concatenate([np.asarray(part) for part in column])[: options.samples]
        for column in zip(*parts, strict=True)
    )
    return tokens, groups, calls


@functools.partial(jax.jit, static_argnums=1)
def _groups(keys: Any, length: int, steps: Any) -> Any:
    positions = jnp.broadcast_to(jnp.arange(length), (len(keys), length))
    return partition.linear(partition.words(keys, positions), steps)


def measure(
    writer: Writer, chain: Chain, steps: int, temperature: float, options: Options
) -> Measured:
    """Draws a row and measures it, or reads what was measured before."""
    name = f"{writer.name}-{steps}-{temperature:g}-{options.samples}-{options.draws}-{options.seed}"
    path = options.folder / "measured" / f"{name}-{chain.digest[:8]}-{writer.sha256[:8]}.npz"
    if path.exists():
        with np.load(path) as before:
            return Measured(**before)
    texts, groups, calls = sampled(writer, chain, steps, temperature, options)
    if writer.name == PERFECT:
        low = high = log_law(chain, texts, steps, temperature)
    else:
        model, drawn = (writer.network, writer.params), {"draws": options.draws}
        drawn["seed"] = options.seed
        low, high = log_law_between(chain, *model, texts, groups, steps, temperature, **drawn)
    nats = {"cross": -chain.log_probability(texts), "low": low, "high": high}
    values = {name: value / chain.length for name, value in nats.items()} | {"calls": calls}
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path.with_suffix(".part.npz"), **values)
    os.replace(path.with_suffix(".part.npz"), path)
    return Measured(**values)


def row_of(name: str, steps: int, temperature: float, of: Measured) -> Row:
    """A row of the table; figures in nats a symbol."""
    measures = {
        "cross_entropy": interval(of.cross),
        "entropy": interval(of.surprise, of.between),
        "kl": interval(of.cross - of.surprise, of.between),
    }
    row = {"model": name, "steps": steps, "temperature": temperature, "samples": len(of.cross)}
    row |= {"network_calls": float(np.mean(of.calls)), "estimates_apart": of.between}
    return row | with_intervals(measures)


def with_intervals(measures: Mapping[str, tuple[float, list[float]] | None]) -> Row:
    """Values and intervals as fields of a row, None where there are none."""
    row: Row = {}
    for name, measured in measures.items():
        value, ends = (None, [None, None]) if measured is None else measured
        row |= {name: value, f"{name}_interval": ends}
    return row


def bounds_of(writers: Sequence[Writer], chain: Chain, options: Options) -> dict[str, Row]:
    """What texts of the law cost under each model, in nats a text, and how much more than under the
    perfect one, which is the first.
    """
    spans = [Span(tuple(text)) for text in chain.draw(options.texts, [options.seed, 3]).tolist()]
    drawn: Any = {"draws": options.masks, "batch": 256, "seed": options.seed}
    costs = {}
    for writer in writers:
        of = bounds(writer.network, writer.params, spans, chain.symbols, **drawn)
        costs[writer.name] = np.asarray([bound.nats for bound in of])
    rows = {}
    for name, nats in costs.items():
        gap = interval(nats - costs[PERFECT])
        rows[name] = with_intervals({"bound": interval(nats), "over_the_floor": gap})
    return rows


def shown(row: Row) -> str:
    """A row in a line."""
    perfect = row["over_the_perfect"]
    tempered = "beyond the sweep" if perfect is None else f"{perfect:+.4f}"
    low, high = row["kl_interval"]
    return (
        f"{row['model']:24s} N {row['steps']:2d}  KL {row['kl']:.4f} [{low:.4f}, {high:.4f}]  "
        f"entropy {row['entropy']:.4f}  over {row['other']} {row['over_the_other']:+.4f}  over the "
        f"tempered perfect {tempered}  bound over the floor {row['over_the_floor']:.3f}"
    )


def plot(rows: Sequence[Row], perfect: Sequence[Row], options: Options) -> None:
    """A picture a study of variants, or one of the run's students: KL over entropy, a panel for
    each
    N below 8, and the tempered perfect denoiser in each.
    """
    studies = STUDIES if len(options.names) > 1 else {"": (OWN, TEACHER)}
    for study, names in studies.items():
        some = [row for row in rows if row["variant"] in names]
        panels = {}
        for steps in [steps for steps in options.steps if steps < 8]:
            lines: dict[str, list[tuple[float, float, Sequence[float]]]] = {}
            for row in (*perfect, *some):
                last = study in ("", "round_lengths") or row.get("other") != TEACHER
                if row["steps"] == steps and last:
                    point = row["entropy"], row["kl"], row["kl_interval"]
                    name = row.get("variant", "perfect, temperatures")
                    lines.setdefault(name, []).append(point)
            panels[f"KL to the law, nats a symbol, N = {steps}"] = lines
        path = options.figures / f"{'-'.join(filter(None, ('markov', study)))}.png"
        if len({row["variant"] for row in some}) > 1:
            draw_panels(panels, path, x="entropy, nats a symbol", log_x=False)


def main(options: tyro.conf.OmitArgPrefixes[Options]) -> None:
    """Trains what is missing, measures, prints, writes and draws the rows."""
    alone()
    until, recipe = time.monotonic() + 60 * options.minutes, recipe_of(options.folder)
    chain, runs = recipe.chain, {}
    for name in options.names:
        if (done := distilled(name, options.folder, until)) is None:
            return  # the minutes are over
        runs[name] = done
    perfect, sweeps, tempered = Writer(PERFECT, KnownLaw(chain), None, chain.digest), {}, []
    measured: dict[tuple[str, int], Measured] = {}
    for steps in options.steps:
        temperatures = (1.0, *options.temperatures)
        sweeps[steps] = [measure(perfect, chain, steps, t, options) for t in temperatures]
        measured[PERFECT, steps] = sweeps[steps][0]
        for temperature, sample in zip(temperatures, sweeps[steps], strict=True):
            tempered.append(row_of(PERFECT, steps, temperature, sample))
    students = list(students_of(runs, options.folder))
    costs = bounds_of([perfect, *(one.writer for one in students)], chain, options)
    for one, steps in itertools.product(students, options.steps):
        measured[one.writer.name, steps] = measure(one.writer, chain, steps, 1.0, options)
        print(f"measured {one.writer.name}, N {steps}", flush=True)
    rows: list[Row] = []
    for one, steps in itertools.product(students, options.steps):
        name, mine = one.writer.name, measured[one.writer.name, steps]
        differences = {
            "over_the_other": apart(mine, measured[one.other, steps]),
            "over_the_perfect": at_equal_entropy(mine, sweeps[steps]),
        }
        row: Row = {"variant": one.variant, "round": one.which, "aims_at": one.aim}
        row |= row_of(name, steps, 1.0, mine) | with_intervals(differences)
        rows.append(row | {"other": one.other} | costs[name])
        print(shown(rows[-1]))
    result = {
        "law": {**dataclasses.asdict(chain), "floor": chain.floor},
        "recipes": {name: dataclasses.asdict(students) for name, (students, _) in runs.items()},
        "models_sha256": {one.writer.name: one.writer.sha256 for one in students},
        "perfect": tempered,
        "rows": rows,
    }
    dtypes = facts.dtypes([one.writer.params for one in students])
    write_record(options.out, options, result, dtypes=dtypes)
    plot(rows, tempered, options)


if __name__ == "__main__":
    run_command(main)
