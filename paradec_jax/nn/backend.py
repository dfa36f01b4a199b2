"""The one switch for layouts that suit a backend and are nobody's definition."""

import os

import jax

SWITCH = "PARADEC_LAYOUTS"


def cpu_layouts() -> bool:
    """Whether products are laid out for XLA's CPU backend: where that is the default one, unless told otherwise.

    The environment variable `PARADEC_LAYOUTS` ("cpu" or "plain") decides for a whole process, since compiled programs
    do not know by which layout they were traced.

    Raises:
      ValueError: another value of the variable.
    """
    told = os.environ.get(SWITCH)
    if told not in (None, "cpu", "plain"):
        raise ValueError(f"{SWITCH} must be 'cpu' or 'plain', not {told!r}")
    return jax.default_backend() == "cpu" if told is None else told == "cpu"
