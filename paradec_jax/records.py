"""Three kinds of frozen dataclasses: arrays that travel together, choices that programs are made for,
and records that nobody compares.
"""

import dataclasses
from typing import Any, TypeVar, dataclass_transform

import jax

T = TypeVar("T")


def static(**options: Any) -> Any:
    """A field of a `pytree` that is part of its structure, not one of its arrays."""
    return dataclasses.field(metadata={"static": True}, **options)


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field, static))
def pytree(kind: type[T]) -> type[T]:
    """A frozen dataclass that JAX takes apart into its fields."""
    return jax.tree_util.register_dataclass(dataclasses.dataclass(frozen=True)(kind))


@dataclass_transform(frozen_default=True, kw_only_default=True)
def choices(kind: type[T]) -> type[T]:
    """A frozen dataclass that is equal by its fields, which are given by their names."""
    return dataclasses.dataclass(frozen=True, kw_only=True)(kind)


@dataclass_transform(frozen_default=True, eq_default=False, field_specifiers=(dataclasses.field,))
def record(kind: type[T]) -> type[T]:
    """A frozen dataclass that is equal to itself alone, as one with arrays on the host."""
    return dataclasses.dataclass(frozen=True, eq=False)(kind)
