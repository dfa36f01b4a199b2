"""What a trained denoiser, its students and the perfect denoiser write, against the law: how far,
how varied.

`python -m experiments.masked_diffusion.markov_study`, after `markov_train`. All measures are in
nats, those of samples a symbol::

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

Each row is kept in FOLDER/measured when it is done, so that a study that was stopped goes on.
"""

import dataclasses
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from experiments.common.command import run as run_command
from experiments.common.plots import draw_panels
from experiments.common.record import write_record
from experiments.masked_diffusion.markov import Chain, ChainDenoiser
from experiments.masked_diffusion.markov_train import recipe_of
from experiments.masked_diffusion.sample_law import log_law, log_law_between
from paradec_jax import facts, load, make_request, run, store
from paradec_jax.config import TokenSpec
from paradec_jax.decode import Masked
from paradec_jax.decode.machine.request import keys_of, seed_words
from paradec_jax.decode.rules import partition
from paradec_jax.evaluate.bound import bounds
from paradec_jax.evaluate.intervals import Z95
from paradec_jax.evaluate.likelihood import Span
from paradec_jax.objectives.sdtt import Sdtt

PERFECT, TEACHER = "perfect", "teacher"
AT_A_TIME = 500  # samples that are drawn together


@dataclasses.dataclass(frozen=True)
class Options:
    """What to measure.

    Attributes:
      folder: of the run.
      samples: of a row.
      draws: partitions of a sample, by which q is estimated.
      steps: N of the teacher and of the perfect denoiser.
      swept: those N at which students are measured, and both others at lower temperatures too.
      temperatures: the lower ones.
      texts: by which bounds are taken.
      masks: of each of them.
      seed: of all draws.
      out: where the JSON goes.
      figure: where the picture goes.
    """

    folder: Path = Path("runs/markov")
    samples: int = 1000
    draws: int = 4
    steps: tuple[int, ...] = (2, 4, 8, 16)
    swept: tuple[int, ...] = (2, 4)
    temperatures: tuple[float, ...] = (0.9, 0.8, 0.7, 0.6, 0.5)
    texts: int = 512
    masks: int = 32
    seed: int = 0
    out: Path = Path("experiments/masked_diffusion/results/markov.json")
    figure: Path = Path("experiments/masked_diffusion/figures/markov.png")

    def __post_init__(self) -> None:
        if min(self.samples, self.texts, self.masks) < 2 or self.draws < 1:
            raise ValueError(
                f"samples, texts and masks must be at least 2 and draws 1, not {self.samples}, {self.texts}, "
                f"{self.masks} and {self.draws}"
            )
        if not set(self.swept) <= set(self.steps) or min(self.steps, default=0) < 1:
            raise ValueError(
                f"steps must be at least 1 and swept some of them, not {self.steps} and {self.swept}"
            )
        if not all(0 < temperature < 1 for temperature in self.temperatures):
            raise ValueError(f"temperatures must lie between 0 and 1, not {self.temperatures}")


@dataclasses.dataclass(frozen=True, eq=False)
class Writer:
    """A model that writes texts; `sha256` names its weights."""

    name: str
    network: Any
    params: Any
    sha256: str


@dataclasses.dataclass(frozen=True, eq=False)
class Measured:
    """Samples of a model: of each the cost under the law, and what log q lies between, in nats a
    symbol.
    """

    cross: np.ndarray
    low: np.ndarray
    high: np.ndarray
    calls: np.ndarray

    @property
    def surprise(self) -> np.ndarray:
        """-log q of each, the middle of both ends."""
        return -(self.low + self.high) / 2

    @property
    def between(self) -> float:
        """The way between both ends, on average."""
        return float(np.mean(self.high - self.low))


Key = tuple[str, int, float]  # model, steps, temperature


def writers_of(folder: Path, chain: Chain) -> list[Writer]:
    """The perfect denoiser, the teacher, and the students, each called by the steps that it aims
    at.
    """
    students = recipe_of(folder).students
    found = [Writer(PERFECT, ChainDenoiser(chain), None, chain.digest)]
    found.append(writer_of(TEACHER, folder / "teacher" / "model"))
    for which in range(students.rounds):
        place = folder / "students" / f"round-{which}" / "model"
        found.append(writer_of(f"student-{aim_of(students, which):g}", place))
    return found


def writer_of(name: str, place: Path, dtype: str = "float32") -> Writer:
    """A model folder's."""
    model = load(place, dtype=dtype)
    return Writer(name, model.network, model.params, store.fingerprint(place))


def aim_of(students: Sdtt, which: int) -> float:
    """The steps that the student of a round, counted from 0, aims at."""
    return students.rules.first_steps / students.rules.jump ** (which + 1)


def plan(writers: Sequence[Writer], options: Options) -> Iterator[tuple[Writer, int, float]]:
    """The rows: model, steps, temperature."""
    for writer in writers:
        student = writer.name not in (PERFECT, TEACHER)
        for steps in options.swept if student else options.steps:
            yield writer, steps, 1.0
        if not student:
            for steps, temperature in itertools.product(options.swept, options.temperatures):
                yield writer, steps, temperature


def sampled(
    writer: Writer, chain: Chain, steps: int, temperature: float, options: Options
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Texts [n, L], the partition that each was written by [n, L], and network calls [n]."""
    length, count = chain.length, min(AT_A_TIME, options.samples)
    spec = TokenSpec(mask=chain.symbols, alignment="own")
    decoder = Masked().bind(writer.network, length, spec)
    params, knobs = (
        decoder.prepare(writer.params),
        decoder.Knobs(steps=steps, temperature=temperature),
    )
    found = []
    for start in range(0, options.samples, count):
        keys = keys_of(seed_words(options.seed), np.arange(start, start + count, dtype=np.int32))
        request = make_request(np.zeros((count, 0), np.int32), max_new_tokens=length, keys=keys)
        decoded = run(decoder, params, request, knobs)
        groups = _groups(keys, length, np.int32(steps))
        found.append((decoded.tokens[:, :length], groups, decoded.network_calls))
    tokens, groups, calls = (
        np.concatenate([np.asarray(part) for part in parts])[: options.samples]
        for parts in zip(*found, strict=True)
    )
    return tokens, groups, calls


def _of_keys(keys: Any, length: int, steps: Any) -> Any:
    positions = jnp.broadcast_to(jnp.arange(length), (len(keys), length))
    return partition.linear(partition.words(keys, positions), steps)


_groups = jax.jit(_of_keys, static_argnums=1)


def measure(
    writer: Writer, chain: Chain, steps: int, temperature: float, options: Options
) -> Measured:
    """Draws a row and measures it, or reads what was measured before."""
    name = f"{writer.name}-{steps}-{temperature:g}-{options.samples}-{options.draws}-{options.seed}"
    path = options.folder / "measured" / f"{name}-{chain.digest[:8]}-{writer.sha256[:8]}.npz"
    if path.exists():
        with np.load(path) as kept:
            return Measured(**kept)
    texts, groups, calls = sampled(writer, chain, steps, temperature, options)
    if writer.name == PERFECT:
        low = high = log_law(chain, texts, steps, temperature)
    else:
        low, high = log_law_between(
            chain,
            writer.network,
            writer.params,
            texts,
            groups,
            steps,
            temperature,
            draws=options.draws,
            seed=options.seed,
        )
    nats = {"cross": -chain.log_probability(texts), "low": low, "high": high}
    found = {name: value / chain.length for name, value in nats.items()} | {"calls": calls}
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path.with_suffix(".part.npz"), **found)
    os.replace(path.with_suffix(".part.npz"), path)
    return Measured(**found)


def interval(values: np.ndarray, opened: float = 0.0) -> tuple[float, list[float]]:
    """Mean and its 95% interval, wider by half of `opened` on both sides."""
    middle = float(np.mean(values))
    spread = Z95 * float(np.std(values, ddof=1)) / len(values) ** 0.5 + max(opened, 0.0) / 2
    return middle, [middle - spread, middle + spread]


def row_of(key: Key, found: Measured) -> dict[str, Any]:
    """A row of the table; figures in nats a symbol."""
    cross, cross_interval = interval(found.cross)
    entropy, entropy_interval = interval(found.surprise, found.between)
    kl, kl_interval = interval(found.cross - found.surprise, found.between)
    return {
        "model": key[0],
        "steps": key[1],
        "temperature": key[2],
        "samples": len(found.cross),
        "network_calls": float(np.mean(found.calls)),
        "cross_entropy": cross,
        "cross_entropy_interval": cross_interval,
        "entropy": entropy,
        "entropy_interval": entropy_interval,
        "kl": kl,
        "kl_interval": kl_interval,
        "estimates_apart": found.between,
    }


def apart(first: Measured, second: Measured) -> tuple[float, list[float]]:
    """KL of the first less that of the second, sample by sample."""
    difference = (first.cross - first.surprise) - (second.cross - second.surprise)
    return interval(difference, first.between + second.between)


def at_equal_entropy(one: Measured, sweep: Sequence[Measured]) -> tuple[float, list[float]] | None:
    """KL of a model less that of another one at the temperature at which it is as varied; None
    beyond its sweep.

    Between two temperatures a and b the other's cross-entropy is a line over its entropy, `c(h) =
    c_a + s (h - h_a)`. At equal entropy a difference of KL is one of cross-entropy, and with w the
    place between a and b it is the mean of `u - (1 - w) u_a - w u_b`, where u is a sample's cost
    under the law less s times its surprise.
    """
    entropy = float(one.surprise.mean())
    line = sorted(sweep, key=lambda point: point.surprise.mean())
    for a, b in itertools.pairwise(line):
        low, high = float(a.surprise.mean()), float(b.surprise.mean())
        if not low <= entropy <= high or low == high:
            continue
        slope, w = (
            float(b.cross.mean() - a.cross.mean()) / (high - low),
            (entropy - low) / (high - low),
        )
        u, u_a, u_b = (point.cross - slope * point.surprise for point in (one, a, b))
        opened = one.between + (1 - w) * a.between + w * b.between
        return interval(u - (1 - w) * u_a - w * u_b, abs(slope) * opened)
    return None


def bounds_of(writers: Sequence[Writer], chain: Chain, options: Options) -> list[dict[str, Any]]:
    """What texts of the law cost under each model, in nats a text, and how much more than under the
    perfect one.
    """
    spans = [Span(tuple(text)) for text in chain.draw(options.texts, [options.seed, 3]).tolist()]
    costs = {
        writer.name: np.asarray(
            [
                bound.nats
                for bound in bounds(
                    writer.network,
                    writer.params,
                    spans,
                    chain.symbols,
                    draws=options.masks,
                    batch=256,
                    seed=options.seed,
                )
            ]
        )
        for writer in writers
    }
    found = []
    for name, nats in costs.items():
        bound, bound_interval = interval(nats)
        gap, gap_interval = interval(nats - costs[PERFECT])
        row = {
            "model": name,
            "floor": chain.floor,
            "bound": bound,
            "bound_interval": bound_interval,
        }
        found.append(row | {"over_the_floor": gap, "over_the_floor_interval": gap_interval})
    return found


def bars_of(
    rows: Mapping[Key, Measured], costs: Sequence[Mapping[str, Any]], last: str, options: Options
) -> list[dict[str, Any]]:
    """What was wanted, what came out, and whether it is met: the figure itself, and its whole
    interval.
    """
    found = []

    def add(
        name: str, most: float, value: tuple[float, Sequence[float]] | None, size: bool = False
    ) -> None:
        bar: dict[str, Any] = {
            "bar": name,
            "at_most": most,
            "value": None,
            "met": False,
            "surely": False,
        }
        if value is not None:
            middle, ends = value
            far = [abs(x) if size else x for x in (middle, *ends)]
            bar |= {"value": middle, "interval": list(ends), "met": far[0] <= most}
            bar["surely"] = max(far[1:]) <= most
        found.append(bar)

    teacher = next(row for row in costs if row["model"] == TEACHER)
    gap = teacher["over_the_floor"], teacher["over_the_floor_interval"]
    add("teacher's bound less the floor, nats a text", 0.3, gap)
    for steps in options.steps:
        if steps >= 4:
            difference = apart(rows[TEACHER, steps, 1.0], rows[PERFECT, steps, 1.0])
            add(
                f"teacher's KL less the perfect denoiser's, N = {steps}",
                0.02,
                difference,
                size=True,
            )
    for steps in options.swept:
        student = rows[last, steps, 1.0]
        add(
            f"{last}'s KL less the teacher's, N = {steps}",
            0.0,
            apart(student, rows[TEACHER, steps, 1.0]),
        )
        for other in (PERFECT, TEACHER):
            sweep = [
                rows[other, steps, temperature] for temperature in (1.0, *options.temperatures)
            ]
            named = f"{last}'s KL less that of the tempered {other} at equal entropy, N = {steps}"
            add(named, 0.02, at_equal_entropy(student, sweep))
    return found


def plot(rows: Sequence[Mapping[str, Any]], options: Options) -> None:
    """KL over entropy, a panel for each N: both sweeps, and the students round after round."""
    panels = {}
    for steps in options.swept:
        lines: dict[str, list[tuple[float, float, Sequence[float]]]] = {}
        for row in rows:
            if row["steps"] != steps:
                continue
            swept = row["model"] in (PERFECT, TEACHER)
            name = f"{row['model']}, temperatures" if swept else "students, rounds"
            lines.setdefault(name, []).append((row["entropy"], row["kl"], row["kl_interval"]))
        panels[f"KL to the law, nats a symbol, N = {steps}"] = lines
    draw_panels(panels, options.figure, x="entropy, nats a symbol", log_x=False)


def main(options: tyro.conf.OmitArgPrefixes[Options]) -> None:
    """Measures, prints, writes and draws the rows."""
    chain = recipe_of(options.folder).chain
    writers = writers_of(options.folder, chain)
    measured: dict[Key, Measured] = {}
    for writer, steps, temperature in plan(writers, options):
        key = writer.name, steps, temperature
        measured[key] = measure(writer, chain, steps, temperature, options)
        row = row_of(key, measured[key])
        print(
            f"{writer.name:11s} N {steps:3d}  T {temperature:g}  KL {row['kl']:.4f} "
            f"[{row['kl_interval'][0]:.4f}, {row['kl_interval'][1]:.4f}]  entropy {row['entropy']:.4f}",
            flush=True,
        )
    rows = [row_of(key, found) for key, found in measured.items()]
    costs = bounds_of(writers, chain, options)
    bars = bars_of(measured, costs, writers[-1].name, options)
    for bar in bars:
        value = "outside the sweep" if bar["value"] is None else f"{bar['value']:.4f}"
        print(
            f"{'met ' if bar['met'] else 'open'}  {bar['bar']}: {value}, at most {bar['at_most']:g} wanted"
        )
    law = {
        "weights": chain.weights,
        "length": chain.length,
        "seed": chain.seed,
        "floor": chain.floor,
    }
    models = {writer.name: writer.sha256 for writer in writers}
    result = {"law": law, "models_sha256": models, "rows": rows, "bounds": costs, "bars": bars}
    dtypes = facts.dtypes([writer.params for writer in writers])
    write_record(options.out, options, result, dtypes=dtypes)
    plot(rows, options)


if __name__ == "__main__":
    run_command(main)
