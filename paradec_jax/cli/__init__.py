"""The command `paradec`: compare decoders, watch one of them write, train models, bring them in and
out.

User errors end in one sentence on standard error and exit code 1.
"""

import itertools
import os
import re
import signal
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

import jax
from jax.errors import JaxRuntimeError
from tyro.extras import SubcommandApp

from paradec_jax.cli import generate
from paradec_jax.cli.compare import compare_command
from paradec_jax.cli.demo import demo_command
from paradec_jax.io import WRONG_INPUT, one_sentence

app = SubcommandApp()
app.command(name="demo")(demo_command)
app.command(name="compare")(compare_command)
app.command(generate.app, name="generate")
QUICK = (["demo"], ["compare"], ["generate"])  # first words of commands that wait for no other
# An option and the word after it where a value is missing.
BARE = r"--((model|data|held-out|out|base|adapter|judge|html|beside|decoder|stop)(= | $)|model --)"


def _use_compilation_cache() -> None:
    """Keeps compiled programs in the user's cache folder, unless JAX has been told of another
    place.

    Small ones too: several together cost a command seconds.
    """
    if getattr(jax.config, "jax_compilation_cache_dir", None) is None:
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        jax.config.update("jax_compilation_cache_dir", str(root / "paradec_jax"))
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def _arguments(argv: Sequence[str]) -> list[str]:
    """Lets --json stand without a path (standard output), `generate` without a decoder, --model
    before sources.
    """
    if argv[:1] == ["generate"]:
        argv = ["generate", *generate.with_decoder(argv[1:])]
    words = []
    for word, after in itertools.zip_longest(argv, argv[1:], fillvalue=""):
        if re.match(BARE, f"{word} {after}"):
            raise ValueError(f"{word.rstrip('=')} needs a value")
        if word != "--model" or argv[0] != "compare":
            words.append(word)
        if word == "--json" and not (after == "-" or after.endswith(".json")):
            words.append("-")
    return words


def _as_typed(text: str, argv: Sequence[str]) -> str:
    """A message whose names of fields are the options as they are typed, those of the command line."""
    for option in re.findall(r"--[\w.-]+", " ".join(argv)):
        name = option[2:].replace("-", "_")
        # A word that is no name elsewhere is one before these.
        after = r"\b" if re.search("[_.]", name) else "(?= (must|needs|is no|of at) )"
        text = re.sub(rf"(?<!\S){name}{after}", option, text)
    return re.sub(
        r"allow=\((.*?),?\)", lambda parts: "--allow " + re.sub("[',]", "", parts[1]), text
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code."""
    if argv is None:  # a command that SIGTERM ends clears away what it has half written
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
        warnings.formatwarning = lambda message, *_: f"paradec: {message}\n"
    _use_compilation_cache()
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv[:1] not in QUICK:
        # Training and the commands of `paradec_jax.convert`, which the others do not wait for.
        from paradec_jax.cli import train
        from paradec_jax.convert.cli import COMMANDS

        app.command(train.app, name="train")
        for name, command in COMMANDS.items():
            app.command(name=name)(command)
    try:
        argv = _arguments(argv)
        return app.cli(
            prog="paradec",
            description="Language models that decode many tokens per network call.",
            args=argv,
        )
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (*WRONG_INPUT, JaxRuntimeError) as error:
        if isinstance(error, JaxRuntimeError) and "RESOURCE_EXHAUSTED" not in str(error):
            raise
        print(f"paradec: {_as_typed(one_sentence(error), argv)}", file=sys.stderr)
        return 1
