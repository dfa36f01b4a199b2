"""Requests that tests of decoders share."""

from collections.abc import Sequence
from typing import Any

from paradec_jax.decode.machine.request import Request, make_request

PROMPTS = ((3, 1, 4), (1, 5, 2, 6, 5), (2, 7))
NEVER = -1


def tiny_request(
    max_new_tokens: Any = 8, *, prompts: Sequence[Sequence[int]] = PROMPTS, **options: Any
) -> Request:
    """A request of unequal prompts; `options` are those of `make_request`.

    The stop token is one that no text holds unless told otherwise, so that requests with and without one share a
    program.
    """
    options = {"stop": (NEVER,), **options}
    return make_request([list(prompt) for prompt in prompts], max_new_tokens=max_new_tokens, **options)
