"""Tiny requests, and tiny models of a few thousand random parameters.

`changes` are fields of their configs; `gain` multiplies parameters. The first caller of a function
that draws may be under a trace and the next one not, so it draws outside of any trace.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from paradec_jax.config import DraftConfig, ResidualHeadConfig
from paradec_jax.decode.machine.request import Request, make_request
from paradec_jax.families import PRESETS, init_params, network_of, parameter_shapes
from paradec_jax.models import DraftNetwork, RecurrentDepthNetwork, ResidualHeadNetwork

PROMPTS = ((3, 1, 4), (1, 5, 2, 6, 5), (2, 7))
NEVER = -1  # a stop token that no text holds, so that requests with and without one share a program


def tiny_request(
    max_new_tokens: Any = 8, *, prompts: Sequence[Sequence[int]] = PROMPTS, **options: Any
) -> Request:
    """A request of unequal prompts; `options` are those of `make_request`."""
    options = {"stop": (NEVER,), **options}
    return make_request(
        [list(prompt) for prompt in prompts], max_new_tokens=max_new_tokens, **options
    )


def infilling(
    texts: Sequence[Sequence[int | None]], max_new_tokens: Any = 0, **options: Any
) -> Request:
    """A request of texts in which None marks a hole."""
    return make_request(
        [[token or 0 for token in text] for text in texts],
        given=[[token is not None for token in text] for text in texts],
        max_new_tokens=max_new_tokens,
        **options,
    )


def drawn(
    init: Callable[[Any, Any], Any], config: Any, seed: int, gain: float = 1.0
) -> dict[str, Any]:
    """Random parameters, multiplied by `gain`; one program draws those of all seeds."""
    with jax.ensure_compile_time_eval():
        return _drawn(init, config, jax.random.key(seed), gain)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _drawn(init: Callable[[Any, Any], Any], config: Any, key: Any, gain: float) -> dict[str, Any]:
    return jax.tree.map(lambda x: gain * x, init(config, key))


def ones(config: Any) -> dict[str, Any]:
    """Parameters for what does not depend on their values: drawing some takes seconds."""
    return jax.tree.map(
        lambda leaf: np.ones(leaf.shape, leaf.dtype), dict(parameter_shapes(config))
    )


def tiny_network(
    cache: str = "shared", recurrence: int | None = None, **changes: Any
) -> RecurrentDepthNetwork:
    config = dataclasses.replace(PRESETS["test-recurrent"], **changes)
    return RecurrentDepthNetwork(config, cache=cache, recurrence=recurrence)


def tiny(name: str, **changes: Any) -> Any:
    return network_of(dataclasses.replace(PRESETS[name], **changes))


tiny_causal = functools.partial(tiny, "test-causal")
tiny_blocks = functools.partial(tiny, "test-sdar")
tiny_full = functools.partial(tiny, "test-full")
tiny_denoiser = functools.partial(tiny, "test-mdlm")


def params_of(network: Callable[..., Any]) -> Callable[..., dict[str, Any]]:
    """The function that draws parameters of `network(**changes)`."""

    @functools.cache
    def params(seed: int = 0, gain: float = 1.0, **changes: Any) -> dict[str, Any]:
        return drawn(init_params, network(**changes).config, seed, gain)

    return params


tiny_params, tiny_causal_params, tiny_blocks_params, tiny_full_params = map(
    params_of, (tiny_network, tiny_causal, tiny_blocks, tiny_full)
)


def tiny_head(**changes: Any) -> ResidualHeadNetwork:
    """A residual head of one layer for `tiny_blocks` of the same `changes`."""
    return ResidualHeadNetwork(ResidualHeadConfig.of(tiny_blocks(**changes).config, layers=1))


@functools.cache
def tiny_head_params(seed: int = 0, **changes: Any) -> dict[str, Any]:
    """Parameters of `tiny_head`, drawn as the released heads began."""
    init = functools.partial(ResidualHeadNetwork.init_params, init="normal_0.2")
    return drawn(init, tiny_head(**changes).config, seed)


def tiny_drafter(count: int = 3, **changes: Any) -> DraftNetwork:
    """Masks beside `tiny_causal` of the same `changes`."""
    return DraftNetwork(
        DraftConfig(base=tiny_causal(**changes).config, count=count, rank=2, inner=8)
    )


@functools.cache
def tiny_drafter_params(seed: int = 0, scale: float = 0.3, **changes: Any) -> dict[str, Any]:
    """Parameters of `tiny_drafter`, normal with that scale; those that training begins at zero too."""
    rng = np.random.default_rng(seed)
    with jax.ensure_compile_time_eval():
        return jax.tree.map(
            lambda leaf: jnp.asarray(scale * rng.normal(size=leaf.shape), leaf.dtype),
            parameter_shapes(tiny_drafter(**changes).config),
        )


@functools.cache
def tiny_denoiser_params(seed: int = 0, gain: float = 1.0, **changes: Any) -> dict[str, Any]:
    """Parameters of `tiny_denoiser`, those that training begins at zero among them."""
    rng, config = np.random.default_rng(seed), tiny_denoiser(**changes).config
    with jax.ensure_compile_time_eval():
        return jax.tree.map(
            lambda leaf: jnp.asarray(gain * (0.2 * rng.normal(size=leaf.shape) + 0.05), leaf.dtype),
            parameter_shapes(config),
        )
