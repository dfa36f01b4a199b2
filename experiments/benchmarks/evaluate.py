"""Scores a benchmark file with any model folder and any decoder.

`python -m experiments.benchmarks.evaluate ...`, for instance

    gsm8k test.jsonl --examples train.jsonl --model DIR --out gsm8k.jsonl
    humaneval HumanEval.jsonl.gz --model DIR --out humaneval.jsonl --execute
    humaneval HumanEval.jsonl.gz --model DIR --out chat.jsonl --chat --decoder jacobi

Every item becomes a JSON line of OUT as soon as its batch is done; the same command goes on where it stopped.
Code is run only with --execute, which guards against accidents and nothing more (see
`paradec_jax/evaluate/execution.py`); samples that other judges read lie beside OUT either way. With --execute
added later, what was decoded before is judged without being decoded again. With --chat an item is a message
in the model's chat template, and what of the answer is judged says
`paradec_jax/evaluate/benchmarks/instruct.py`.
"""

import contextlib
import dataclasses
import hashlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console
from rich.table import Table
from tyro.conf import FlagCreatePairsOff, Positional, arg

from experiments.benchmarks.decoding import Decoding
from experiments.replicas import ReleasedWavefront
from paradec_jax import __version__, chat, facts, store
from paradec_jax.cli.output import console_of
from paradec_jax.decode.machine.setting import Setting
from paradec_jax.disk.bundled import locate
from paradec_jax.evaluate import execution, wilson
from paradec_jax.evaluate.benchmarks import BENCHMARKS, Benchmark, Item, Source
from paradec_jax.evaluate.benchmarks.instruct import INSTRUCT
from paradec_jax.evaluate.continuations import continuations, prompt_lengths
from paradec_jax.evaluate.options import choose
from paradec_jax.evaluate.parts import Parts, results_of
from paradec_jax.evaluate.results import Results, write_lines
from paradec_jax.families import FAMILIES

Flag = FlagCreatePairsOff[bool]
USUAL = {
    "recurrent_depth": "wavefront",
    "causal": "jacobi",
    "block_diffusion": "block",
}  # the decoder of a family unless told otherwise
RELEASED = {"recurrent_depth": {"released": ReleasedWavefront()}}  # replicas, by family


@dataclasses.dataclass(frozen=True)
class Options:
    """What to decode, how, and where results go.

    Attributes:
      task: the benchmark.
      path: its file.
      out: file of results; an existing one of the same settings is continued.
      model: a model folder or the name of a bundled model.
      decoder: how to decode: autoregressive, adaptive, speculative, wavefront (unless told otherwise) or released
        (the wavefront of the released program) for recurrent-depth models; autoregressive, jacobi (unless told
        otherwise), multiblock, prompt_lookup or lookahead for causal ones; block (unless told otherwise), residual,
        residual_speculative or residual_veto for those of block diffusion.
      chat: ask in the model's chat template, without solved examples.
      examples: file whose first rows are the solved examples (gsm8k: the train split).
      shots: solved examples; the benchmark's usual number if left out.
      limit: items at most, the first ones of the file.
      rows: prompts decoded together.
      max_new_tokens: tokens at most; the benchmark's usual number if left out.
      seed: of all draws.
      skip_long: leave out prompts that do not fit the model.
      execute: run the code that the model wrote.
      seconds: processor time that each of its programs gets; by the clock it is three times as much.
      dtype: of weights and activations.
      process: which of several processes this is, from 0.
      processes: how many share the items, each started with the same command but for its number: item i is for
        process i mod their number. Another number may go on, with the same limit and skip_long, and none waits for
        another; the last to end merges all.
      decoding: settings of the decoder.
    """

    task: Positional[Literal["gsm8k", "math500", "humaneval", "mbpp"]]
    path: Positional[Path]
    out: Annotated[Path, arg(metavar="FILE")]
    model: Annotated[str, arg(metavar="DIR|NAME")] = "tiny-recurrent"
    decoder: Annotated[str | None, arg(metavar="NAME")] = None
    chat: Flag = False
    examples: Path | None = None
    shots: int | None = None
    limit: int | None = None
    rows: int = 8
    max_new_tokens: int | None = None
    seed: int = 0
    skip_long: Flag = False
    execute: Flag = False
    seconds: int = execution.ResourceLimits().processor
    dtype: Literal["stored", "float32", "bfloat16"] = "stored"
    process: int = 0
    processes: int = 1
    decoding: Decoding = Decoding()  # noqa: RUF009


def evaluate(options: Options, console: Console) -> None:
    """Decodes what is not yet in the file, judges it, and prints the table."""
    task = BENCHMARKS[options.task]
    if options.limit is not None and options.limit < 1:
        raise ValueError(f"--limit must be at least 1, not {options.limit}")
    if options.execute and task.program is None:
        raise ValueError(f"--execute runs code, and the answers of {options.task} are not code")
    if options.chat and (options.shots or options.examples):
        raise ValueError("--chat asks without solved examples: leave --shots and --examples out")
    shots = (0 if options.chat else task.shots) if options.shots is None else options.shots
    source = task.read(options.path, shots=shots, examples=options.examples)
    model = store.load(options.model, dtype=None if options.dtype == "stored" else options.dtype)
    setting = decoding_of(model, options)
    usual = INSTRUCT[options.task].max_new_tokens if options.chat else task.max_new_tokens
    budget = usual if options.max_new_tokens is None else options.max_new_tokens
    wanted = source.items[: options.limit]
    items, width = fitting(
        model, as_messages(model, options.task, wanted) if options.chat else wanted, budget, options.skip_long
    )
    left_out = len(wanted) - len(items)
    judge = judge_of(task, options, {item.id: item for item in wanted})
    made = facts.facts() | {"dtypes": facts.dtypes(model.params)}
    told = settings(options, model, source, items[0], setting, budget)
    asked = {"limit": options.limit, "skip_long": options.skip_long or None}
    numbers: dict[str, Any] = {"process": options.process, "processes": options.processes, "asked": asked}
    with contextlib.closing(results_of(options.out, told, made, **numbers)) as results:
        if not decode(model, setting, options, budget, width, items, results, judge, console):
            return
    lines = [results.lines[item.id] for item in items]
    print_table(console, options, task, setting, lines, left_out)
    if task.program is not None:
        samples = options.out.with_suffix(".samples.jsonl")
        judged = INSTRUCT[options.task].judged if options.chat else str
        write_lines(samples, [{"task_id": line["id"], "completion": judged(line["text"])} for line in lines])
        unjudged = "" if options.execute else "Nothing was run: add --execute to judge the code. "
        console.print(f"{unjudged}Samples for other judges: {samples}")


def decode(
    model: Any,
    setting: Setting,
    options: Options,
    budget: int,
    width: int,
    items: Sequence[Item],
    results: Results | Parts,
    judge: "Judge",
    console: Console,
) -> bool:
    """Decodes and judges the items of this process; says whether those of all are there, in one file then."""
    mine = results.mine(items)
    todo = [item for item in mine if item.id not in results.lines]
    if todo:
        batches = continuations(
            model,
            [item.prompt for item in todo],
            setting.decoder,
            setting.knobs,
            max_new_tokens=budget,
            stop=todo[0].stop,
            seed=options.seed,
            rows=options.rows,
            width=width,
        )
        waiting = iter(todo)
        for batch in batches:
            results.add([line_of(next(waiting), done, judge, options.rows) for done in batch])
            console.print(f"{sum(item.id in results.lines for item in mine)} of {len(mine)} items")
    judge_later(mine, results, judge)
    judged = options.execute or BENCHMARKS[options.task].program is None
    if results.merge(items, lambda line: line["score"] is not None or not judged):
        return True
    console.print(
        f"Process {options.process} of {options.processes} has done its items; the one that ends last merges all."
    )
    return False


def decoding_of(model: Any, options: Options) -> Setting:
    """The decoder and its knobs.

    Raises:
      ValueError: a decoder of another family, or an option that it does not have.
    """
    name = USUAL[model.family] if options.decoder is None else options.decoder
    decoders = {**FAMILIES[model.family].decoders, **RELEASED.get(model.family, {})}
    if name not in decoders:
        raise ValueError(
            f"--decoder {name} does not suit {options.model} of family {model.family}; it takes one of "
            f"{', '.join(decoders)}"
        )
    given = {field: v for field, v in dataclasses.asdict(options.decoding).items() if v is not None}
    if "recurrence" in given and model.family != "recurrent_depth":
        raise ValueError(f"--recurrence is no option of {options.model}, whose layers are passed once")
    return Setting(name, *choose(name, decoders[name], options=given))


def as_messages(model: Any, task: str, items: Sequence[Item]) -> list[Item]:
    """The items as an assistant is asked: one user message in the model's chat template, ended by its stop token.

    Raises:
      ValueError: a model without a template, or a template that refuses the message.
    """
    if model.chat_template is None:
        raise ValueError(
            "--chat needs a model with a chat template: put a chat_template.jinja into its folder"
        )
    found = []
    for item in items:
        message = {"role": "user", "content": INSTRUCT[task].message(item)}
        found.append(dataclasses.replace(item, prompt=chat.conversation(model, [message]), stop=()))
    return found


def fitting(model: Any, items: Sequence[Item], budget: int, skip: bool) -> tuple[list[Item], int]:
    """The items whose prompts leave room for the budget, and the tokens of the longest of them.

    Raises:
      ValueError: prompts that are too long and may not be skipped, or none that fits.
    """
    most = model.network.max_length
    lengths = prompt_lengths(model, [item.prompt for item in items])
    fits = [length + budget <= most for length in lengths]
    kept = [item for item, fit in zip(items, fits, strict=True) if fit]
    if len(kept) < len(items) and not (skip and kept):
        remedy = "give a smaller --max-new-tokens or fewer --shots"
        raise ValueError(
            f"{len(items) - len(kept)} of {len(items)} prompts do not fit: with --max-new-tokens {budget} the "
            f"model's {most} positions leave {max(most - budget, 0)} for a prompt, and the longest has "
            f"{max(lengths)} tokens; {f'--skip-long leaves them out, or {remedy}' if kept else remedy}"
        )
    return kept, max(length for length, fit in zip(lengths, fits, strict=True) if fit)


def settings(
    options: Options, model: Any, source: Source, first: Item, setting: Setting, budget: int
) -> dict[str, Any]:
    """All that decides a continuation, for the header of the file; `first` is an item as it is asked."""
    folder = locate(options.model)
    asked = {"chat_sha256": hashlib.sha256(first.prompt.encode()).hexdigest()} if options.chat else {}
    return asked | {
        "task": options.task,
        "file_sha256": digest(options.path),
        "shots": source.shots,
        "examples": source.examples,
        "examples_sha256": digest(options.examples) if options.examples and source.shots else None,
        "model": Path(folder).name,
        "model_sha256": [store.fingerprint(folder), digest(Path(folder) / "tokenizer.json")],
        "dtype": model.config.dtype,
        "decoder": setting.name,
        "decoder_settings": setting.settings(),
        "max_new_tokens": budget,
        "stop": list(first.stop),
        "seed": options.seed,
        "paradec_jax": __version__,
    }


def digest(path: Path) -> str:
    """SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


Judge = Callable[[Item, str], dict[str, Any] | None]


def judge_of(task: Benchmark, options: Options, originals: dict[str, Item]) -> Judge:
    """What turns an item and its continuation into a score, or into None where code is not to be run.

    Args:
      task, options: the benchmark and the command.
      originals: items by id as the benchmark reads them, whether or not they are asked as messages.
    """
    judged = INSTRUCT[options.task].judged if options.chat else str
    if options.seconds < 1:
        raise ValueError(f"--seconds must be at least 1, not {options.seconds}")
    limits = execution.ResourceLimits(processor=options.seconds, wall=3.0 * options.seconds)
    if options.execute:  # better now than after hours of decoding
        trial = execution.execute(execution.Sample("", ""), allow=True, limits=limits)
        if not trial.passed:
            raise ValueError(
                f"--execute: not even an empty program runs here ({trial.reason}) {trial.stderr}"
            )

    def judge(item: Item, text: str) -> dict[str, Any] | None:
        item, text = originals[item.id], judged(text)
        if task.score is not None:
            return dataclasses.asdict(task.score(item, text))
        if not options.execute or task.program is None:
            return None
        outcome = execution.execute(task.program(item, text), allow=True, limits=limits)
        return {
            **dataclasses.asdict(outcome),
            "seconds_allowed": options.seconds,
            "network": not execution.has_network_namespace(),
        }

    return judge


def line_of(item: Item, done: Any, judge: Judge, rows: int) -> dict[str, Any]:
    """One line of the file."""
    return {
        "id": item.id,
        "prompt_tokens": done.prompt_tokens,
        "generated_tokens": len(done.tokens),
        "network_calls": done.network_calls,
        "recurrences": done.recurrences,
        "stop_reason": done.reason,
        "text": done.text,
        "score": judge(item, done.text),
        "seconds": done.seconds,
        "rows": rows,
    }


def judge_later(items: Sequence[Item], results: Results | Parts, judge: Judge) -> None:
    """Scores lines that an earlier run without --execute has left without a score."""
    changed = []
    for item in items:
        line = results.lines[item.id]
        if line["score"] is None and (score := judge(item, line["text"])) is not None:
            changed.append(line | {"score": score})
    if changed:
        results.change(changed)


def print_table(
    console: Console,
    options: Options,
    task: Benchmark,
    setting: Setting,
    lines: Sequence[dict[str, Any]],
    left_out: int,
) -> None:
    """Counts with their intervals, tokens a network call, seconds."""
    tokens, calls, recurrences = (
        sum(line[name] for line in lines) for name in ("generated_tokens", "network_calls", "recurrences")
    )
    table = Table(title=f"{options.task}: {Path(options.model).name}, {setting.name} {setting.label()}")
    for title in ("measure", "right", "n", "share", "95%"):
        table.add_column(title, justify="left" if title == "measure" else "right")
    for title in ("tokens", "tokens/call", "recurrences/token", "seconds"):
        table.add_column(title, justify="right")
    seconds = f"{sum(line['seconds'] for line in lines):.1f}"
    work = f"{tokens}", f"{tokens / calls:.2f}", f"{recurrences / max(tokens, 1):.2f}", seconds
    judged = [line["score"] for line in lines if line["score"] is not None]
    for i, measure in enumerate(task.measures):
        shown = ("", "", "", "") if i else work
        if not judged:
            table.add_row(measure, "not run", f"{len(lines)}", "", "", *shown)
            continue
        right = sum(score[measure] for score in judged)
        low, high = wilson(right, len(judged))
        share = f"{100 * right / len(judged):.1f}%"
        interval = f"{100 * low:.1f}-{100 * high:.1f}"
        table.add_row(measure, f"{right}", f"{len(judged)}", share, interval, *shown)
    console.print(table)
    reasons = [line["stop_reason"] for line in lines]
    ends = ", ".join(f"{reasons.count(reason)} by {reason}" for reason in sorted(set(reasons)))
    console.print(f"Ended: {ends}. Network calls include those that read the prompts; seconds, compilation.")
    if left_out:
        console.print(f"{left_out} items with longer prompts were left out: the share is of the others.")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; user errors are one sentence on standard error and exit code 1."""
    options = tyro.cli(tyro.conf.OmitArgPrefixes[Options], args=argv, prog="evaluate")
    console = console_of(140)
    try:
        evaluate(options, console)
    except KeyboardInterrupt:
        return 130
    except (ValueError, OSError) as error:
        print(f"evaluate: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
