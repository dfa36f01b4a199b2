"""What a wavefront adds over token parallelism, by width: `python -m experiments.recurrent_depth.rivals_width`.

Four sides in networks of one shape family with random weights, whose texts mean nothing: each writes as many tokens
as an answer of the pointers has after its first, and gives every token the recurrences that answers need. What is
timed is a program; how often it runs is a matter of a schedule:

- autoregressive: a call a token, as decoding goes;
- a wave that opens one position a step, and a wave as wide as the answer whose headway opens all at once: paced, so a
  position is final after a step more than it needs, as a trained model's is, which has to see that its state stands
  still. Both run from end to end;
- Jacobi decoding, a window as wide as the answer: random weights accept next to nothing, so its number of calls is
  not measured here. A call is, and it is taken as often as the trained model calls, by the tokens a call that `rivals
  pointers` measured (or `tokens_per_call`). So this side is a product of two measurements.

Seconds leave out the prompt. Ranges are bootstraps over passes, of which a single one has none.
"""

import dataclasses
import json
import statistics
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tyro

from experiments.common import plots
from experiments.common.command import run
from experiments.common.record import write_record
from experiments.decoders.paced import paced_wavefront, same_token
from experiments.recurrent_depth.rival_settings import ONE, PARALLEL, SEVERAL, TASKS, place
from experiments.recurrent_depth.rival_times import Group, Times, in_turns
from paradec_jax import facts, load
from paradec_jax.config import RecurrentDepthConfig
from paradec_jax.decode import Jacobi, Request, Static, make_request
from paradec_jax.evaluate import intervals
from paradec_jax.families import init_params
from paradec_jax.models import RecurrentDepthNetwork
from paradec_jax.store import names_of
from paradec_jax.timing import Case

JACOBI_STEPS = 8  # calls of Jacobi decoding that are timed, at most


@dataclasses.dataclass(frozen=True)
class Options:
    """What to time.

    Attributes:
      model: whose shape it is but for the width; heads are 32 wide, feed-forward layers twice the width.
      widths: of the networks.
      recurrence: r that a token needs.
      inner: r' of the wave with headway.
      one: r' of the wave that opens one position a step.
      context: prompt tokens.
      answer: tokens after the one that the prompt predicts.
      rivals: the table that `rivals pointers` wrote, for tokens a call of Jacobi decoding.
      tokens_per_call: that figure, in place of the table's.
      passes: timings of each side.
      out: where the JSON goes.
      figure: where the picture goes.
    """

    model: str = TASKS["pointers"].model
    widths: tuple[int, ...] = (64, 128, 256, 512)
    recurrence: int = 12
    inner: int = 4
    one: int = 2
    context: int = 137
    answer: int = 65
    rivals: Path = Path(place("rivals", "pointers", TASKS["pointers"].model))
    tokens_per_call: float | None = None
    passes: int = 7
    out: Path = Path("experiments/recurrent_depth/results/rivals-width.json")
    figure: Path = Path("experiments/recurrent_depth/figures/rivals-width.png")

    def __post_init__(self) -> None:
        for name, least in (("recurrence", 1), ("inner", 1), ("one", 1), ("answer", 3), ("passes", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, not {getattr(self, name)}")
        if any(width < 32 or width % 32 for width in self.widths):
            raise ValueError(f"widths must be multiples of 32, not {self.widths}")


@dataclasses.dataclass(frozen=True)
class Side:
    """A decoder that is timed.

    Attributes:
      name: in table and picture.
      case: bound, with its knobs.
      tokens: new tokens that are asked for.
      calls: those of a whole answer, where they are not the ones that are timed.
    """

    name: str
    case: Case
    tokens: int
    calls: float | None = None


def tokens_per_call(options: Options) -> tuple[float, str]:
    """Tokens a call of Jacobi decoding on the trained model after the prompt, and where the figure is from.

    Raises:
      ValueError: no table, or no row of Jacobi decoding in it that was timed at this depth and keeps the answers.
    """
    if options.tokens_per_call is not None:
        return options.tokens_per_call, "given"
    if not options.rivals.is_file():
        raise ValueError(
            f"{options.rivals} is missing: run python -m experiments.recurrent_depth.rivals pointers, "
            "or give --tokens-per-call"
        )
    rows = [
        row
        for row in json.loads(options.rivals.read_text())["rows"]
        if row["rival"] in PARALLEL
        and row["keeps_answers"]
        and row["settings"]["recurrence"] == options.recurrence
    ]
    if not rows:
        raise ValueError(f"{options.rivals} has no Jacobi decoding at r = {options.recurrence}")
    best = max(rows, key=lambda row: row["tokens_per_second"])
    later = sum(best["generated"]) - len(best["generated"])
    return later / best["timed_calls"], f"{options.rivals.name}: {best['rival']}, {best['label']}"


def paced(inner: int, recurrence: int, window: int | None, size: Any) -> Case:
    """A wave whose positions are final a step after they have what they need; as wide as that fills when None."""
    steps = -(-recurrence // inner) + 1
    width, headway = (steps, 1) if window is None else (window, window)
    buckets = None if window is None else (1 + window // 2,) * (window > 2)
    wave, knobs = paced_wavefront(
        steps * inner, inner, width, headway=headway, buckets=buckets, prefill_recurrence=1
    )
    network, length = size
    return Case(wave.bind(same_token(network), length), knobs)


def sides_of(network: RecurrentDepthNetwork, options: Options, rate: float) -> list[Side]:
    """The four, sequential decoding first."""
    answer, depth = options.answer, options.recurrence
    size = (network, options.context + 1 + answer)
    static = Static(recurrence=depth, prefill_recurrence=1, greedy=True).bind(*size)
    jacobi = Jacobi(block=answer, running=True, recurrence=depth, prefill_recurrence=1, greedy=True).bind(
        *size
    )
    return [
        Side(f"autoregressive, r = {depth}", Case(static), 1 + answer),
        Side(f"Jacobi, r = {depth}", Case(jacobi), 1 + min(JACOBI_STEPS, answer), answer / rate),
        Side(ONE, paced(options.one, depth, None, size), 1 + answer),
        Side(SEVERAL, paced(options.inner, depth, answer, size), 1 + answer),
    ]


def request_of(network: RecurrentDepthNetwork, tokens: int, options: Options) -> Request:
    """A random prompt and no token that ends it."""
    prompt = np.random.default_rng(0).integers(0, network.vocab_size, (1, options.context))
    return make_request(prompt, max_new_tokens=tokens, seed=0)


def seconds_of(side: Side, times: Times) -> list[float]:
    """Seconds of an answer in each pass."""
    return [seconds * (side.calls or times.calls) / times.calls for seconds in times.steps]


def rows_of(width: int, base: RecurrentDepthConfig, options: Options, rate: float) -> list[dict[str, Any]]:
    """The four sides of one width."""
    config = dataclasses.replace(base, width=width, heads=width // 32, feed_forward=2 * width)
    network = RecurrentDepthNetwork(config)
    params = network.prepare(init_params(config, jax.random.key(0)))
    sides = sides_of(network, options, rate)
    groups = [Group([side.case], params, [request_of(network, side.tokens, options)]) for side in sides]
    times = [of[0] for of in in_turns(groups, options.passes)]
    seconds = [seconds_of(side, one) for side, one in zip(sides, times, strict=True)]
    rows = []
    for side, one, mine in zip(sides, times, seconds, strict=True):
        row: dict[str, Any] = {"width": width, "parameters": sum(x.size for x in jax.tree.leaves(params))}
        row |= {"side": side.name, "calls": side.calls or one.calls, "timed_calls": one.calls}
        row |= {"milliseconds": 1e3 * statistics.median(mine), "passes": mine}
        for name, base_seconds in (("over_autoregressive", seconds[0]), ("over_jacobi", seconds[1])):
            ratio, interval = intervals.quicker(mine, base_seconds)
            row |= {name: ratio, f"{name}_range": intervals.ends(interval)}
        rows.append(row)
    return rows


def main(options: tyro.conf.OmitArgPrefixes[Options]) -> None:
    """Prints, writes and draws the four sides at every width."""
    model = load(options.model)
    if not isinstance(model.config, RecurrentDepthConfig):
        raise SystemExit(f"{options.model} must be a recurrent-depth model")
    rate, source = tokens_per_call(options)
    print(f"Jacobi decoding: {rate:.2f} tokens a call after the prompt ({source})")
    rows = []
    for width in options.widths:
        for row in (found := rows_of(width, model.config, options, rate)):
            over = intervals.times(row["over_autoregressive"], row["over_autoregressive_range"])
            print(
                f"width {width}, {row['side']}: {row['milliseconds']:.2f} ms an answer in {row['calls']:.1f} calls, "
                f"{over}, {row['over_jacobi']:.2f}x Jacobi",
                flush=True,
            )
        rows += found
    told = dataclasses.asdict(options) | {"model": names_of([options.model])[0]}
    told |= {name: getattr(options, name).name for name in ("rivals", "out", "figure")}
    result = {"jacobi_tokens_per_call": rate, "jacobi_tokens_per_call_from": source, "rows": rows}
    write_record(options.out, told, result, dtypes=facts.dtypes(model.params))
    lines: dict[str, Any] = {}
    for name in dict.fromkeys(row["side"] for row in rows):
        mine = [row for row in rows if row["side"] == name]
        lines[name] = [
            (row["width"], row["over_autoregressive"], row["over_autoregressive_range"]) for row in mine
        ]
    plots.draw_lines(
        lines, options.figure, x="width of the network", y=f"speed over r = {options.recurrence}, one by one"
    )
    print(f"written: {options.out} and {options.figure}")


if __name__ == "__main__":
    run(main)
