"""The command `paradec`: compare decoders on problems with exact answers, or watch one of them write.

User errors end in one sentence on standard error and exit code 1.
"""

import contextlib
import dataclasses
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import numpy as np
from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text
from tyro.conf import FlagCreatePairsOff, Positional, UseAppendAction, arg
from tyro.extras import SubcommandApp

from paradec_jax import store
from paradec_jax.config import PRESETS, RecurrentDepthConfig
from paradec_jax.data.word_problems import PROMPT
from paradec_jax.decode import Jacobi, stream
from paradec_jax.evaluate import SETTINGS, compare, word_problems
from paradec_jax.evaluate.bench import bench, fixed_wavefront, limits, static
from paradec_jax.evaluate.options import choose
from paradec_jax.evaluate.tables import print_bench, print_pairs, print_table
from paradec_jax.generate import Generation, Prepared, StopStrings, generate, prepare
from paradec_jax.models import init_params, network_of

DEFAULT_MODEL = "tiny-recurrent"
# The models that `compare` puts side by side; the first is the one that the others are paired with.
BUNDLED = {"recurrent_depth": ("tiny-recurrent",), "jacobi": ("tiny-causal", "tiny-jacobi")}

Flag = FlagCreatePairsOff[bool]
app = SubcommandApp()


@app.command(name="compare")
def compare_command(
    family: Literal["recurrent_depth", "jacobi"] = "recurrent_depth",
    model: UseAppendAction[Annotated[tuple[str, ...], arg(metavar="DIR|NAME")]] = (),
    problems: int = 200,
    steps: tuple[int, int] = (2, 8),
    seed: int = 1,
    json: Annotated[str | None, arg(metavar="[PATH]")] = None,
) -> int:
    """Decodes the same unseen word problems with every decoder and prints one table.

    Exact answers are counted over all problems, decoded in batches; speed is measured on the first of them,
    one at a time, decoders in turns. Each model has a table of its own.

    Args:
      family: model family; its settings are the rows of the table.
      model: a model folder, or the name of a bundled model; may be given several times. By default the bundled
        models of the family.
      problems: number of problems.
      steps: fewest and most steps of a problem's solution, from 2 to 8.
      seed: of the problems and of all draws.
      json: print nothing but a list of JSON objects, one a row; with a PATH, write the list there as well as
        printing the table.
    """
    if problems < 1:
        raise ValueError(f"--problems must be at least 1, not {problems}")
    _check_json(json)
    models = {name: store.load(name) for name in model or BUNDLED[family]}
    for name, loaded in models.items():
        if loaded.family != family:
            raise ValueError(f"{name} is of family {loaded.family}, but --family is {family}")
    drawn = word_problems(problems, seed=seed, steps=steps)
    results = {}
    for name, loaded in models.items():
        with _progress() as report:
            short = Path(name).name
            results[short] = compare(loaded, drawn, SETTINGS[family], name=short, seed=seed, report=report)
    if json is not None:
        _write_json([row for result in results.values() for row in result.rows], json)
    if json != "-":
        for result in results.values():
            print_table(result, steps, seed)
        print_pairs(results)
    return 0


@app.command(name="generate")
def generate_command(
    prompt: Positional[Annotated[str, arg(metavar="PROMPT")]],
    decoder: Literal[
        "autoregressive",
        "adaptive",
        "speculative",
        "wavefront",
        "jacobi",
        "multiblock",
        "prompt_lookup",
        "lookahead",
    ]
    | None = None,
    model: Annotated[str, arg(metavar="DIR|NAME")] = DEFAULT_MODEL,
    question: Flag = False,
    stream: Flag = False,
    max_new_tokens: int = 200,
    temperature: float = 0.0,
    top_p: float = 1.0,
    samples: int = 1,
    stop: UseAppendAction[tuple[str, ...]] = (),
    seed: int = 0,
    recurrence: int | None = None,
    inner_recurrence: int | None = None,
    width: int | None = None,
    exit_threshold: float | None = None,
    block: int | None = None,
    blocks: int | None = None,
    running: bool | None = None,
    pool: int | None = None,
    rows: int | None = None,
    spawn: float | None = None,
    acceptance: Literal["coupled", "rejection"] | None = None,
    delay: float = 0.02,
) -> int:
    """Continues a text.

    The prompt is used as it is. The bundled model has learned one form of text,
    "Question: ...", a line break, "Answer:", a line break; --question puts PROMPT into it.

    Args:
      prompt: the text, or - to read it from standard input.
      decoder: how to decode, by default as the last row of the family's table in `paradec compare`. Settings
        are those of the decoder's last row there, changed by the options below.
      model: a model folder, or the name of a bundled model.
      question: put the prompt into the form of the word problems.
      stream: show committed tokens as they come and, on a terminal and in another colour, the candidates that
        move in the wavefront.
      max_new_tokens: tokens at most.
      temperature: 0 takes the most probable token.
      top_p: probability mass kept when sampling.
      samples: continuations to draw.
      stop: text that ends the continuation; may be given several times.
      seed: of all draws.
      recurrence: recurrences a token (autoregressive, speculative) or at most (adaptive).
      inner_recurrence: recurrences of a step (wavefront).
      width: positions of the wave at most (wavefront).
      exit_threshold: relative change of a state below which it has converged (wavefront, adaptive).
      block: tokens of a block (jacobi, multiblock).
      blocks: blocks in flight at most (multiblock).
      running: whether the window keeps its full width (jacobi).
      pool: earlier iterates that are searched for candidates (jacobi, multiblock).
      rows: rows verified in a call (jacobi, multiblock).
      spawn: agreement of the newest block that spawns the next one (multiblock).
      acceptance: how drafts are judged when sampling; rejection needs --rows 1 and no pool (jacobi, multiblock).
      delay: seconds between two pictures of --stream on a terminal.
    """
    if prompt == "-":
        prompt = sys.stdin.read()
    if question:
        prompt = PROMPT.format(question=prompt.strip())
    if stream and samples != 1:
        raise ValueError(f"--stream shows one continuation, but --samples is {samples}")
    loaded = store.load(model)
    options = {
        "recurrence": recurrence,
        "inner_recurrence": inner_recurrence,
        "width": width,
        "exit_threshold": exit_threshold,
        "block": block,
        "blocks": blocks,
        "running": running,
        "pool": pool,
        "rows": rows,
        "spawn": spawn,
        "acceptance": acceptance,
        "temperature": temperature,
        "top_p": top_p,
    }
    chosen, knobs = _choose(loaded.family, decoder, {k: v for k, v in options.items() if v is not None})
    arguments: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "seed": seed,
        "samples": samples,
        "stop_strings": stop,
    }
    if stream:
        result = _stream(loaded, prepare(loaded, [prompt], chosen, **arguments), knobs, prompt, delay)
    else:
        result = generate(loaded, [prompt], chosen, knobs=knobs, **arguments)
        for i, text in enumerate(result.text):
            if samples > 1:
                print(f"--- sample {i}", file=sys.stderr)
            print(text)
    _print_counts(result)
    return 0


@app.command(name="bench")
def bench_command(
    preset: str = "tiny-recurrent",
    recurrence: int | None = None,
    inner_recurrence: tuple[int, ...] = (1, 2, 4),
    block: tuple[int, ...] = (16, 64),
    batch: tuple[int, ...] = (1,),
    context: int = 64,
    tokens: int = 64,
    dtype: Literal["preset", "float32", "bfloat16"] = "preset",
    passes: int = 5,
    seed: int = 0,
    json: Annotated[str | None, arg(metavar="[PATH]")] = None,
) -> int:
    """Times decoding with random weights and says how close it comes to the device's limits.

    For each batch size: static decoding, then, for a recurrent model, a wavefront that gives every token at least
    as many recurrences and commits one token a step whatever the weights are, and for a causal model Jacobi
    decoding, which with random weights commits one or two tokens a step.

    Args:
      preset: shape of the model.
      recurrence: recurrences a token; the preset's default if left out.
      inner_recurrence: recurrences of a wavefront's step, one row each.
      block: tokens of a Jacobi window, one row each (causal models).
      batch: batch sizes.
      context: prompt tokens of each row.
      tokens: tokens to generate in each row.
      dtype: of weights and activations.
      passes: timings, of which the median counts.
      seed: of weights and prompts.
      json: print nothing but a list of JSON objects; with a PATH, write the list there as well as printing
        the table.
    """
    if preset not in PRESETS:
        raise ValueError(f"--preset must be one of {', '.join(PRESETS)}, not {preset}")
    for name, values in (
        ("batch", batch),
        ("inner-recurrence", inner_recurrence),
        ("block", block),
        ("passes", (passes,)),
    ):
        if min(values, default=0) < 1:
            raise ValueError(f"--{name} must be at least 1, not {values}")
    _check_json(json)
    config = PRESETS[preset]
    if dtype != "preset":
        config = dataclasses.replace(config, dtype=dtype, param_dtype=dtype)
    if context + tokens > config.max_length:
        raise ValueError(
            f"--context {context} and --tokens {tokens} are more than the {config.max_length} positions of {preset}"
        )
    decoders: list[tuple[str, str, Any]]
    if isinstance(config, RecurrentDepthConfig):
        count = config.mean_recurrence if recurrence is None else recurrence
        decoders = [("autoregressive", f"r {count}", static(count))]
        decoders += [("wavefront", f"inner r {n}", fixed_wavefront(count, n)) for n in inner_recurrence]
    elif recurrence is not None:
        raise ValueError(f"--recurrence {recurrence} is for recurrent models, but {preset} is a causal one")
    else:
        decoders = [("autoregressive", "", static(None))]
        decoders += [("jacobi", f"block {n}", Jacobi(block=n, running=True, greedy=True)) for n in block]
    network = network_of(config)
    rows = []
    with _progress() as report:
        device, params = limits(config.dtype), init_params(config, jax.random.key(seed))
        cases = [(size, *named) for size in batch for named in decoders]
        for done, (size, name, label, decoder) in enumerate(cases):
            report("benchmarks", done, len(cases))
            options = {"batch": size, "context": context, "tokens": tokens, "passes": passes, "seed": seed}
            row = bench(network, params, decoder, **options, device=device)
            rows.append(
                {"preset": preset, "family": config.family} | row | {"decoder": name, "settings": label}
            )
        report("benchmarks", len(cases), len(cases))
    if json is not None:
        _write_json(rows, json)
    if json != "-":
        print_bench(rows)
    return 0


def _choose(family: str, name: str | None, options: dict[str, Any]) -> tuple[Any, Any]:
    """The decoder of that name and its knobs: its last row of the family's table, changed by options.

    Raises:
      ValueError: a decoder of another family, or an option that this decoder does not have.
    """
    table = SETTINGS[family]
    name = table[-1].name if name is None else name
    settings = [setting for setting in table if setting.name == name]
    if not settings:
        known = ", ".join(dict.fromkeys(setting.name for setting in table))
        raise ValueError(
            f"--decoder {name} does not suit a model of family {family}; it takes one of {known}"
        )
    return choose(name, settings[-1].decoder, settings[-1].knobs, options)


def _stream(model: store.Model, prepared: Prepared, knobs: Any, prompt: str, delay: float) -> Generation:
    """Shows a row while it grows: pictures on a terminal, plain text as it is committed elsewhere."""
    console = Console(highlight=False)
    watch = prepared.watch
    if watch is None:
        watch = StopStrings(prepared.tokenizer, prepared.spec, (), 1)
    state = None
    shown = 0
    states = stream(prepared.decoder, model.params, prepared.request, knobs, interrupt=watch)
    live = (
        Live(console=console, auto_refresh=False, vertical_overflow="visible")
        if console.is_terminal
        else None
    )
    with live or contextlib.nullcontext():
        for state in states:
            done = bool(np.asarray(prepared.decoder.done(state))[0])
            text = watch.visible(0, done=done)
            if live is None:
                print(text[shown:], end="", flush=True)
                shown = len(text)
            else:
                moving = "" if done else _candidates(prepared, state)
                live.update(Text.assemble((prompt, "dim"), text, (moving, "cyan")), refresh=True)
                time.sleep(0 if done else delay)
        result = prepared.collect(prepared.decoder.finish(state))
        if live is not None:
            live.update(Text.assemble((prompt, "dim"), result.text[0]), refresh=True)
    if live is None:
        print(result.text[0][shown:])
    return result


def _candidates(prepared: Prepared, state: Any) -> str:
    """Text of the guesses behind the first row's committed tokens, or nothing for decoders without any."""
    progress = state.progress
    start, end = int(progress.prompt_lengths[0]), int(progress.length[0])
    if hasattr(state, "candidates"):  # of a wave
        guesses = np.asarray(state.candidates)[0, 1 : int(state.active[0])].tolist()
    elif hasattr(state, "horizon"):  # of a window
        guesses = np.asarray(state.draft)[0, : int(state.horizon[0]) - end].tolist()
    else:
        return ""
    committed = np.asarray(progress.tokens)[0, start:end].tolist()
    decode = prepared.tokenizer.decode
    return decode(committed + guesses, skip_special=True)[len(decode(committed, skip_special=True)) :]


def _print_counts(result: Generation) -> None:
    tokens = sum(len(row) for row in result.tokens)
    calls, recurrences = int(result.network_calls.sum()), int(result.recurrences.sum())
    print(
        f"{tokens} tokens in {calls} network calls: {tokens / calls:.2f} tokens a call, "
        f"{recurrences / tokens:.2f} recurrences a token",
        file=sys.stderr,
    )


@contextlib.contextmanager
def _progress() -> Iterator[Any]:
    """Bars on standard error, one a stage."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        tasks: dict[str, Any] = {}

        def report(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = progress.add_task(stage, total=total)
            progress.update(tasks[stage], completed=done)

        yield report


def _check_json(path: str | None) -> None:
    if path not in (None, "-") and not Path(path).absolute().parent.is_dir():
        raise ValueError(f"--json cannot write {path}: there is no folder {Path(path).absolute().parent}")


def _write_json(rows: Sequence[dict[str, Any]], path: str) -> None:
    text = json.dumps(rows, indent=2, allow_nan=False) + "\n"
    if path == "-":
        sys.stdout.write(text)
    else:
        Path(path).write_text(text, encoding="utf-8")


def _use_compilation_cache() -> None:
    """Keeps compiled programs in the user's cache folder, unless JAX has been told of another place."""
    if getattr(jax.config, "jax_compilation_cache_dir", None) is None:
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        jax.config.update("jax_compilation_cache_dir", str(root / "paradec_jax"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


def _arguments(argv: Sequence[str]) -> list[str]:
    """Lets --json stand without a path, which then is standard output."""
    found = []
    for i, word in enumerate(argv):
        found.append(word)
        if word == "--json" and (i + 1 == len(argv) or argv[i + 1].startswith("--")):
            found.append("-")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code."""
    _use_compilation_cache()
    argv = _arguments(sys.argv[1:] if argv is None else argv)
    try:
        return app.cli(
            prog="paradec", description="Language models that decode many tokens per network call.", args=argv
        )
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ValueError, OSError) as error:
        print(f"paradec: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
