"""Where depth is needed: decoders on chains of pointers.

`python -m experiments.recurrent_depth.pointers_speed`. Three questions about the model of `pointers.py`. How
many names of an answer are right after r recurrences, by how many look-ups they are away? How fast is a
wavefront beside sequential decoding of equal accuracy, where a token needs many recurrences? Both sides read
the prompt alike. And since the time of a step over many positions is a matter of the network's width and the
device: what would the same steps cost in wider networks, whose weights are random? Settings are chosen on the
tuning split and reported on the test split (`--split`).
"""

import dataclasses
import functools
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import matplotlib
import numpy as np
import tyro

from experiments.common.command import run
from experiments.common.record import write_record
from experiments.recurrent_depth.rival_times import Group, in_turns
from experiments.tasks import exact_lists, pointer_problems
from experiments.tasks.pointers import PointerProblem, PointerTask
from paradec_jax import Adaptive, Jacobi, Static, Wavefront, facts, load
from paradec_jax.config import RecurrentDepthConfig
from paradec_jax.data.problems import encode_prompts
from paradec_jax.decode import Request, SelfSpeculative, make_request
from paradec_jax.decode import run as run_decoder
from paradec_jax.decode.machine.setting import Setting
from paradec_jax.evaluate import compare
from paradec_jax.evaluate.intervals import ends, quicker, times
from paradec_jax.families import EVERY_STEP, init_params
from paradec_jax.models import RecurrentDepthNetwork
from paradec_jax.store import Model, names_of
from paradec_jax.timing import Case

FOLDER = Path("experiments/recurrent_depth")
TIMED = 2  # prompts of the third question
RECURRENCES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 16, 24, 32)


@dataclasses.dataclass(frozen=True)
class Options:
    """What to measure.

    Attributes:
      model: a model folder or the name of a bundled one.
      problems: unseen problems.
      queries: names that a problem asks about.
      nearest: fewest look-ups from a query to the end of its chain, in the comparison of decoders; queries of the
        first question are any.
      seed: of problems and initial states.
      split: of the problems, "tune" to choose settings and "test" to report them.
      timed: problems of the speed measurement, at batch 1; 0 leaves speed out.
      passes: timings of each setting.
      widths: of the networks of the third question; none leaves it out.
      settings: "wide" for the search, "few" for what came out of it.
      out: where the JSON goes; by default a name of the model and the split.
      figure: where the picture of the first question goes; when None beside the results, but of problems to tune on
        there is none.
    """

    model: str = "tiny-pointers"
    problems: int = 500
    queries: int = 16
    nearest: int = 8
    seed: int = 1
    split: str = "test"
    timed: int = 8
    passes: int = 5
    widths: tuple[int, ...] = (64, 128, 256, 512)
    settings: str = "few"
    out: Path | None = None
    figure: Path | None = None

    def __post_init__(self) -> None:
        if self.settings not in SETTINGS:
            raise ValueError(f"settings must be one of {', '.join(SETTINGS)}, not {self.settings!r}")

    @property
    def stem(self) -> str:
        """What files are called that are not named: after the model, and after a split other than the test's."""
        name = "pointers" if self.model == Options.model else names_of([self.model])[0].replace("/", "-")
        return name if self.split == "test" else f"{name}-{self.split}"

    @property
    def place(self) -> Path:
        """Where the table goes."""
        return self.out or FOLDER / "results" / f"{self.stem}.json"

    @property
    def drawn(self) -> Path | None:
        """Where the picture goes, None for none."""
        default = FOLDER / "figures" / f"{self.stem}.png"
        return self.figure or (default if self.split == "test" else None)

    def told(self) -> dict[str, Any]:
        """As JSON values."""
        named = {"model": names_of([self.model])[0], "out": self.place, "figure": self.drawn}
        return dataclasses.asdict(self) | named


def static(recurrence: int, *, baseline: bool = False) -> Setting:
    """One token after another, each at the same recurrence, after a prompt that was read once."""
    decoder = Static(recurrence=recurrence, prefill_recurrence=1)
    return Setting("autoregressive", decoder, baseline=baseline)


def adaptive(exit: float, recurrence: int = 32) -> Setting:
    """One token after another, each until its state stands still."""
    decoder = Adaptive(max_recurrence=recurrence, prefill_recurrence=1)
    return Setting("adaptive", decoder, Adaptive.Knobs(exit_threshold=exit))


def wave(inner: int, width: int, headway: int, exit: float, buckets: tuple[int, ...] = ()) -> Setting:
    """The clean wavefront."""
    decoder = Wavefront(
        inner_recurrence=inner, window=width, headway=headway, buckets=buckets, prefill_recurrence=1
    )
    return Setting("wavefront", decoder, Wavefront.Knobs(exit_threshold=exit, momentum=0.0))


def chosen(inner: int, whole: int) -> Setting:
    """What the tuning problems chose for a wave that holds a whole answer."""
    return wave(inner, whole, whole, 0.8, (1 + whole // 2,))


def speculative(draft: int) -> Setting:
    """Four tokens drafted at few recurrences, verified at twelve."""
    decoder = SelfSpeculative(recurrence=12, draft_recurrence=draft, lookahead=4, prefill_recurrence=1)
    return Setting("speculative", decoder)


def jacobi(block: int, running: bool, depth: int = 12) -> Setting:
    """Every position of a block, or of a window that moves on, at the depth that answers need."""
    decoder = Jacobi(block=block, running=running, recurrence=depth, prefill_recurrence=1)
    return Setting("jacobi", decoder)


def wide(whole: int) -> list[Setting]:
    """What is tried on the tuning split. A wave of `whole` holds an answer."""
    return [
        static(16, baseline=True),
        *(static(r) for r in (11, 12, 13, 14)),
        *(adaptive(exit) for exit in (0.1, 0.2, 0.4, 0.8)),
        *(speculative(draft) for draft in (8, 9, 10, 11)),
        *(jacobi(n, running) for n in (1 + whole // 4, 1 + whole // 2, whole) for running in (False, True)),
        *(wave(inner, whole, whole, exit) for inner in (1, 2, 3, 4, 6, 13) for exit in (0.2, 0.4, 0.8)),
        *(chosen(inner, whole) for inner in (3, 4, 6)),
        wave(4, 1 + whole // 2, 1 + whole // 2, 0.4),
        *(wave(inner, width, 1, 0.4) for inner, width in ((1, 15), (2, 8), (3, 6), (4, 5))),
    ]


def few(whole: int) -> list[Setting]:
    """What came out of it."""
    return [
        static(16, baseline=True),
        *(static(r) for r in (8, 11, 12, 13)),
        *(adaptive(exit) for exit in (0.4, 0.8)),
        speculative(11),
        jacobi(whole, running=False),
        jacobi(1 + whole // 2, running=True),
        *(chosen(inner, whole) for inner in (1, 3, 4, 6)),
        wave(1, 15, 1, 0.4),
        wave(2, 8, 1, 0.4),
    ]


SETTINGS = {"wide": wide, "few": few}


def by_distance(model: Model, problems: Sequence[PointerProblem], seed: int) -> list[dict[str, Any]]:
    """Share of right names after each number of recurrences, for each number of look-ups."""
    assert model.tokenizer is not None
    prompts = [item.prompt for item in problems]
    tokens, lengths = encode_prompts(model.tokenizer, prompts, spec=model.token_spec)
    wanted = np.asarray(model.tokenizer.encode_batch([item.solution for item in problems]))[:, 1:]
    distance = np.asarray([item.distance for item in problems])
    keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(jax.random.key(seed), np.arange(len(problems)))
    # Answers have a known length here, and a row that says too little is wrong in what it does not say.
    count = wanted.shape[1] + 1
    request = make_request(tokens, lengths, max_new_tokens=count, stop=(), keys=keys)
    rows, params = [], model.network.prepare(model.params)
    for r in RECURRENCES:
        decoder = static(r).decoder.bind(model.network, tokens.shape[1] + count, model.token_spec)
        found = np.asarray(run_decoder(decoder, params, request).completions())[:, 1:]
        right = found == wanted
        shares = [
            float(right[distance == d].mean()) if (distance == d).any() else None
            for d in range(distance.max() + 1)
        ]
        rows.append(
            {"recurrence": r, "names_right": float(right.mean()), "lists_right": float(right.all(1).mean())}
            | {"by_distance": shares}
        )
    return rows


def sampler_rows(
    model: Model, name: str, problems: Sequence[PointerProblem], options: Options
) -> list[dict[str, Any]]:
    """Whole answers, speed and work of every decoder."""
    found = compare(
        model,
        [item.prompt for item in problems],
        SETTINGS[options.settings](1 + options.queries),
        name=name,
        seed=options.seed,
        budget=2 + len(problems[0].distance),  # " =", a name for each query, and the stop token
        score=exact_lists(problems),
        timed=options.timed,
        passes=options.passes,
    )
    return [
        {"label": f"{row['decoder']}, {label}", **row}
        for row, label in zip(found.rows, found.labels, strict=True)
    ]


def step_costs(
    model: Model, problems: Sequence[PointerProblem], steps: float, options: Options
) -> list[dict[str, Any]]:
    """Seconds of an answer at other widths, in the steps that the trained model takes; both sides in turns.

    An answer has T tokens after the one that the prompt predicts. Static decoding takes T steps at r = 12; the wave
    takes n of T positions at r' = 4. The range of their ratio is a bootstrap over passes.
    """
    assert model.tokenizer is not None and isinstance(model.config, RecurrentDepthConfig)
    tokens, lengths = encode_prompts(
        model.tokenizer, [item.prompt for item in problems[:TIMED]], spec=model.token_spec
    )
    answer = 1 + len(problems[0].distance)

    def requests(new: int) -> list[Request]:
        return [
            make_request(
                tokens[[i]],
                lengths[[i]],
                max_new_tokens=new,
                stop=(),
                keys=jax.random.split(jax.random.key(i), 1),
            )
            for i in range(len(tokens))
        ]

    # A wave of random weights commits a token a step, so as many tokens as there are steps to time.
    sides = [
        (static(12), 1 + answer, answer),
        (wave(4, answer, answer, EVERY_STEP), 1 + round(steps), steps),
    ]
    rows = []
    for width in options.widths:
        config = dataclasses.replace(model.config, width=width, heads=width // 32, feed_forward=2 * width)
        network = RecurrentDepthNetwork(config)
        size = tokens.shape[1] + 1 + answer
        params = network.prepare(init_params(config, jax.random.key(options.seed)))
        groups = [
            Group(
                [Case(setting.decoder.bind(network, size, model.token_spec), setting.knobs)],
                params,
                requests(new),
            )
            for setting, new, _ in sides
        ]
        found = [of[0] for of in in_turns(groups, options.passes)]
        one, other = (
            [count * spent / side.calls for spent in side.steps]
            for side, (_, _, count) in zip(found, sides, strict=True)
        )
        value, interval = quicker(other, one)
        row: dict[str, Any] = {"width": width, "static_12_microseconds": 1e6 * statistics.median(one)}
        row |= {"wave_microseconds": 1e6 * statistics.median(other), "wave_steps": steps}
        row |= {"static_12_passes": one, "wave_passes": other}
        rows.append(
            row | {"speedup_without_prompts": value, "speedup_without_prompts_interval": ends(interval)}
        )
    return rows


def picture(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Share of right names over look-ups and recurrences."""
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6.5, 3.6), layout="constrained")
    grid = np.asarray([row["by_distance"] for row in rows], float).T
    image = axes.imshow(grid, origin="lower", aspect="auto", vmin=0, vmax=1)
    axes.set_xticks(range(len(rows)), [row["recurrence"] for row in rows])
    axes.set_yticks(range(len(grid)))
    axes.set_xlabel("recurrences a token")
    axes.set_ylabel("look-ups to the end of the chain")
    figure.colorbar(image, label="share of right names")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(options: tyro.conf.OmitArgPrefixes[Options]) -> None:
    """Prints and writes both tables, and draws the first."""
    model = load(options.model)
    if model.family != "recurrent_depth" or model.tokenizer is None:
        raise SystemExit(f"{options.model} must be a recurrent-depth model with a tokenizer")
    task = PointerTask(queries=options.queries)
    drawn = functools.partial(
        pointer_problems, options.problems, seed=options.seed, split=options.split, task=task
    )
    depth = by_distance(model, drawn(), options.seed)
    for row in depth:
        print(
            f"r {row['recurrence']:2d}: {row['names_right']:.1%} of names, {row['lists_right']:.1%} of lists right"
        )
    if options.drawn is not None:
        picture(depth, options.drawn)
    rows = sampler_rows(model, names_of([options.model])[0], drawn(nearest=options.nearest), options)
    for row in rows:
        speed = ""
        if options.timed:
            speed = (
                f"  {row['tokens_per_second']:,.0f} tokens/s, {times(row['speedup'], row['speedup_interval'])}"
                f" (without prompts {row['decode_speedup']:.2f}x)"
            )
        print(
            f"{row['label']}: {row['exact']}/{row['problems']}  {row['network_calls_per_token']:.2f} calls,"
            f" {row['recurrences_per_token']:.2f} recurrences a token{speed}"
        )
    costs = []
    if options.widths:
        # The prompt's call is no step of the wave.
        wanted = chosen(4, 1 + options.queries).settings()
        calls = next(row["network_calls_per_token"] for row in rows if row["settings"] == wanted)
        problems = drawn(nearest=options.nearest)
        costs = step_costs(model, problems, calls * (2 + len(problems[0].distance)) - 1, options)
    for row in costs:
        print(
            f"width {row['width']}: {row['static_12_microseconds']:,.0f} us an answer at r = 12, "
            f"{row['wave_microseconds']:,.0f} us as a wave, "
            f"{times(row['speedup_without_prompts'], row['speedup_without_prompts_interval'])}"
        )
    result = {"by_recurrence": depth, "rows": rows, "costs": costs}
    write_record(options.place, options.told(), result, dtypes=facts.dtypes(model.params))


if __name__ == "__main__":
    run(main)
