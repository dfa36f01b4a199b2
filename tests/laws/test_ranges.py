"""Every number that a command takes has a range, and what lies outside is refused in one sentence
that names it.
"""

import dataclasses
import re
import shlex
import typing

import pytest

from paradec_jax import cli
from paradec_jax.cli import generate
from paradec_jax.cli.answers import Options
from paradec_jax.cli.options import NAMES, rows_of
from paradec_jax.convert.cli import COMMANDS
from paradec_jax.objectives import OBJECTIVES
from paradec_jax.objectives.options import Cluster, Run

# Thresholds that all or nothing passes may be infinite; some numbers may be negative.
ENDLESS = (
    "exit_threshold accept_threshold threshold head_threshold entropy factor delta spread stop_bias"
)
NEGATIVE = "exit_threshold momentum noise init_scale seed stop_bias"
# of `import`, whose config refuses them once the release is known (tests/convert)
LATER = (
    "block",
    "mask",
)


def makers():
    """What takes numbers of a command, with what calls it and must refuse them, by its name there."""
    yield from of_dataclass("compare", Options())
    yield "generate", generate.Text, lambda **given: generate.Text(**given).check()
    yield from of_dataclass("train", Run(model="m", data="d"))
    for name, command in COMMANDS.items():
        yield name, command, lambda command=command, **given: command(src="none", **given)
    for name, kind in OBJECTIVES.items():
        yield from of_dataclass(name, kind())
    for row in (row for name in NAMES for row in rows_of(name).values()):
        decoder, kind = row.decoder, row.decoder.Knobs
        yield from of_dataclass(row.name, decoder)
        yield row.name, kind, lambda of=decoder.knobs, kind=kind, **given: of(kind(**given))


def of_dataclass(name, options):
    """A dataclass and those among its fields."""
    yield name, type(options), lambda **given: dataclasses.replace(options, **given)
    for field, value in vars(options).items():
        if isinstance(value, Cluster):
            yield name, Cluster, lambda **given: Cluster(**given).join()
        elif dataclasses.is_dataclass(value) and field != "spec":
            yield from of_dataclass(name, value)


def numeric(owner):
    """Options whose annotation has a number, with the words of the annotation."""
    for name, hint in typing.get_type_hints(owner).items():
        words = {*re.findall(r"\w+", str(hint))}
        if words & {"int", "float"} and name not in ("return", "BOUNDS"):
            yield name, words


CASES = {
    f"{command} {owner.__name__}.{name}": (make, name, words)
    for command, owner, make in makers()
    for name, words in numeric(owner)
    if command != "import" or name not in LATER
}


@pytest.mark.parametrize("case", CASES)
def test_an_option_has_a_range(case):
    assert len(CASES) > 150
    make, name, words = CASES[case]
    wrong = [float("nan")] + [float("inf")] * (name not in ENDLESS) + [-1] * (name not in NEGATIVE)
    for value in wrong + [2**70, -(2**70), 2.5, True] * ("float" not in words):
        with pytest.raises(ValueError, match=rf"\b{name}\b"):
            make(**{name: (value, value) if "tuple" in words else value})


SAID = {
    "train sft --learning-rate -1": "--learning-rate must be at least 0, not -1.0",
    "train sft --seed 9223372036854775808": "--seed must be at most 9223372036854775807, not 9223372036854775808",
    "train sft --out ''": "--out needs a value",
    "train sft --held-out=": "--held-out needs a value",
    "train sft --ema 1": "--ema must be at most 0.999999, not 1.0",
    "train sft --cluster.data -1": "--cluster.data must be at least 1, not -1",
    "train jacobi --ar-weight nan": "--ar-weight must be at most 1e+37, not nan",
    "generate jacobi --stop ''": "--stop needs a value",
    "generate jacobi --top-p-rule x": "--top-p-rule must be one of drop, keep,",
    "generate jacobi --block 200 --blocks 200": "--blocks must be at most 2, not 200",
    "train jacobi --block 1": "--block must be at least 2, not 1",
    "train sdtt --rounds 1000000000": "--rounds must be at most 31, not 1000000000",
    "generate jacobi --block 1000000": "--block must be at most 512, not 1000000",
    "generate jacobi --pool -1": "--pool must be at least 0, not -1",
    "generate jacobi --samples 3000000": "--samples must be at most 65536, not 3000000",
    "generate jacobi --max-new-tokens 999": "--max-new-tokens is 999, more than the 512 positions",
    "generate jacobi --temperature inf": "--temperature must be a number of float32, not inf",
    "compare --model": "--model needs a value",
    "check tiny-jacobi --tolerance nan": "--tolerance must be at most 1e+37, not nan",
}


@pytest.mark.parametrize("words", SAID)
def test_a_command_speaks_of_options_as_they_are_typed(words, capsys):
    more = {"train": " --model tiny-jacobi --data none", "generate": " --model tiny-jacobi a"}
    assert cli.main(shlex.split(words + more.get(words.split()[0], ""))) == 1
    assert SAID[words] in capsys.readouterr().err


def test_messages_are_translated_for_the_command_line():
    text = "the data is none, data must be so, 'held_out' of /held_out/x, held_out: allow=('data', 'loss')"
    want = "the data is none, --data must be so, 'held_out' of /held_out/x, --held-out: --allow data loss"
    assert cli._as_typed(text, ["train", "--data", "x", "--held-out=y"]) == want


def test_exhausted_memory_is_one_sentence(monkeypatch, capsys):
    def run(*_, **__):
        raise cli.JaxRuntimeError("RESOURCE_EXHAUSTED: 9 bytes")

    monkeypatch.setattr(cli.app, "cli", run)
    assert cli.main(["demo"]) == 1
    assert capsys.readouterr().err == "paradec: RESOURCE_EXHAUSTED: 9 bytes\n"
