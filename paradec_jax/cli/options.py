"""The options of a decoder: made from its fields and its knobs, so that no command lists them."""

import dataclasses
import functools
import operator
import shlex
import types
from collections.abc import Iterator
from typing import Annotated, Any, TypedDict, Union, get_args, get_origin

import docstring_parser
import tyro
from jaxtyping import AbstractArray
from tyro.conf import arg

from paradec_jax.decode.machine.network import CachedNetwork
from paradec_jax.evaluate.setting import Setting
from paradec_jax.families import FAMILIES, family_named

NAMES = tuple(dict.fromkeys(setting.name for family in FAMILIES.values() for setting in family.settings))


def rows_of(name: str | None) -> dict[str, Setting]:
    """By family, the last row of its table, or the last row of that name where it has one."""
    rows = {}
    for family in FAMILIES.values():
        named = [setting for setting in family.settings if name in (None, setting.name)]
        if named:
            rows[family.name] = named[-1]
    return rows


def summary(name: str) -> str:
    """What the decoder of that name does, and the families of models that it suits."""
    kinds: dict[str, Any] = {family: type(row.decoder) for family, row in rows_of(name).items()}
    return "\n\n".join(f"{_parsed(kind).short_description} ({family})" for family, kind in kinds.items())


def options_of(name: str | None) -> Any:
    """A dictionary type with the options of a decoder, of which a command line gives some.

    Args:
      name: of the decoder; None for the options that the last rows of all families share.
    """
    kinds: dict[str, Any] = {}
    helps: dict[str, str] = {}
    defaults: dict[str, dict[str, str]] = {}
    rows = rows_of(name)
    for family, row in rows.items():
        for choice, kind, text, value in _choices(row):
            kinds[choice], helps[choice] = kind, text
            defaults.setdefault(choice, {})[family] = f"{value}"
    fields = {}
    for choice, values in defaults.items():
        if name is None and len(values) < len(rows):
            continue  # not shared by all families
        different = ", ".join(f"{value} for {family}" for family, value in values.items())
        hint = next(iter(values.values())) if len(set(values.values())) == 1 else different
        about = arg(help=helps[choice], help_behavior_hint=f"(default: {hint})")
        fields[choice] = Annotated[kinds[choice], about]
    return TypedDict(f"{name}_options", fields, total=False)  # type: ignore


def decoder_of(option: str, text: str) -> tuple[str, dict[str, Any]]:
    """Name and options of a decoder that an option names as on the command line, "jacobi --block 8".

    Raises:
      ValueError: a text that begins with no decoder's name.
    """
    name, *words = shlex.split(text) or [""]
    if (name := name.replace("-", "_")) not in NAMES:
        raise ValueError(f"--{option} must begin with one of {', '.join(NAMES)}, not {name!r}")
    return name, tyro.cli(options_of(name), args=words, prog=f"--{option} {name}")


def choose(family: str, name: str | None, options: dict[str, Any]) -> Setting:
    """The decoder of that name and its knobs: its last row of the family's table, changed by options.

    Raises:
      ValueError: a decoder of another family, or an option that this decoder does not have.
    """
    rows = rows_of(name)
    if family not in rows:
        known = ", ".join(dict.fromkeys(setting.name for setting in family_named(family).settings))
        raise ValueError(f"{name} does not suit a model of family {family}; it takes one of {known}")
    return rows[family].changed(options)


def _choices(row: Setting) -> Iterator[tuple[str, Any, str, Any]]:
    """Name, type, documentation and value of each choice of a row: fields of the decoder, then its knobs."""
    for owner in (row.decoder, row.values):
        documented = _documented(type(owner))
        for field in dataclasses.fields(owner):
            if field.name in row.settings():
                value = getattr(owner, field.name)
                yield field.name, _spelled(field.type), documented.get(field.name, ""), value


def _spelled(kind: Any) -> Any:
    """A field's type without arrays and networks, which no command line can spell."""
    if get_origin(kind) not in (Union, types.UnionType):
        return kind
    arrays = [one for one in get_args(kind) if isinstance(one, type) and issubclass(one, AbstractArray)]
    plain = [one for one in get_args(kind) if one is not CachedNetwork and one not in arrays]
    return functools.reduce(operator.or_, plain)


def _documented(owner: type) -> dict[str, str]:
    """What a class and those before it say of their attributes."""
    entries: dict[str, str] = {}
    for base in reversed(owner.__mro__):
        entries |= {
            entry.arg_name: " ".join((entry.description or "").split()) for entry in _parsed(base).params
        }
    return entries


@functools.cache
def _parsed(owner: type) -> Any:
    return docstring_parser.parse(owner.__doc__ or "")
