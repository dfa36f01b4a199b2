"""The options of a decoder: made from its fields and its knobs, so that no command lists them."""

import dataclasses
import functools
import operator
import types
from collections.abc import Iterator
from typing import Annotated, Any, TypedDict, Union, get_args, get_origin

import docstring_parser
from jaxtyping import AbstractArray
from tyro.conf import arg

from paradec_jax.decode.machine import CachedNetwork, Setting
from paradec_jax.families import FAMILIES

NAMES = tuple(dict.fromkeys(name for family in FAMILIES.values() for name in family.decoders))


def rows_of(name: str | None) -> dict[str, Setting]:
    """By family, the decoder of that name with its own defaults, where the family has it; see
    `Family.named`.
    """
    return {family.name: row for family in FAMILIES.values() if (row := family.named(name))}


def summary(name: str) -> str:
    """What the decoder of that name does, and the families of models that it suits."""
    rows = rows_of(name).items()
    return "\n\n".join(
        f"{_parsed(row.decoder.__class__).short_description} ({family})" for family, row in rows
    )


def options_of(name: str | None) -> Any:
    """A dictionary type with the options of a decoder, of which a command line gives some.

    Args:
      name: name of the decoder; None for the options that the default decoders of all families
        share.
    """
    choices: dict[str, tuple[Any, str, dict[str, str]]] = {}
    rows = rows_of(name)
    for family, row in rows.items():
        for choice, kind, text, value in _choices(row):
            choices.setdefault(choice, (kind, text, {}))[2][family] = f"{value}"
    fields = {}
    for choice, (kind, text, values) in choices.items():
        if name is None and len(values) < len(rows):
            continue  # not shared by all families
        different = ", ".join(f"{value} for {family}" for family, value in values.items())
        hint = next(iter(values.values())) if len(set(values.values())) == 1 else different
        fields[choice] = Annotated[kind, arg(help=text, help_behavior_hint=f"(default: {hint})")]
    return TypedDict(f"{name}_options", fields, total=False)  # type: ignore


def _choices(row: Setting) -> Iterator[tuple[str, Any, str, Any]]:
    """Name, type, documentation and value of each choice of a row: fields of the decoder, then its
    knobs.
    """
    for owner in (row.decoder, row.values):
        documented = _documented(type(owner))
        for field in dataclasses.fields(owner):
            if field.name in row.settings():
                text = documented.get(field.name, "")
                yield field.name, _spelled(field.type), text, getattr(owner, field.name)


def _spelled(kind: Any) -> Any:
    """A field's type without arrays and networks, which no command line can spell."""
    if get_origin(kind) not in (Union, types.UnionType):
        return kind
    plain = [
        one
        for one in get_args(kind)
        if one is not CachedNetwork
        and not (isinstance(one, type) and issubclass(one, AbstractArray))
    ]
    return functools.reduce(operator.or_, plain)


def _documented(owner: type) -> dict[str, str]:
    """What a class and those before it say of their attributes."""
    entries: dict[str, str] = {}
    for base in reversed(owner.__mro__):
        entries |= {
            entry.arg_name: " ".join((entry.description or "").split())
            for entry in _parsed(base).params
        }
    return entries


@functools.cache
def _parsed(owner: type) -> Any:
    return docstring_parser.parse(owner.__doc__ or "")
