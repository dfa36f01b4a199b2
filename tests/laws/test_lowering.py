"""Every decoder and the train step lower for GPU and TPU, though the tests run on the CPU alone."""

import jax
import jax.numpy as jnp
import pytest
from decoders import EVERY, REAL, ROWS
from jax import export

from paradec_jax import decode
from paradec_jax.decode import drive
from paradec_jax.losses import poisson_lognormal, recurrent_loss
from paradec_jax.families import parameter_shapes
from paradec_jax.testing import StubCausal, tiny_causal, tiny_network, tiny_request
from paradec_jax.train import TrainState, adamw, make_train_step

PLATFORMS = ("cuda", "tpu")
SIZE = 16


def lowers(function, *arguments) -> None:
    """Lowers a jitted function for both platforms at once."""
    exported = export.export(function, platforms=PLATFORMS)(*arguments)
    assert exported.platforms == PLATFORMS
    assert len(exported.mlir_module_serialized) > 0


def shapes_of(dtype: str):
    return parameter_shapes(tiny_network(dtype=dtype, param_dtype=dtype).config)


@EVERY
def test_decoder(name):
    row = ROWS[name]
    if row.net is StubCausal:
        network = tiny_causal(dtype="bfloat16", param_dtype="bfloat16")
    else:
        cache = "full" if row.kind is decode.SelfSpeculative else "shared"
        network = tiny_network(cache, dtype="bfloat16", param_dtype="bfloat16")
    decoder = row.decoder(network, SIZE)
    knobs = drive._knobs(decoder, row.values())

    @jax.jit
    def run(params, request, knobs):
        return drive._run(decoder, params, request, knobs, drive._bound(None))

    lowers(run, parameter_shapes(network.config), tiny_request(4), knobs)


@pytest.mark.parametrize("name", REAL)
def test_gradient_of_a_rollout(name):
    kind, cache, options, knobs = REAL[name]
    decoder, knobs = kind(tiny_network(cache), SIZE, **options), kind.Knobs(**knobs)

    def value(params, knobs, request):
        _, states = decode.rollout(decoder, params, request, knobs, n=2, record=latents_of)
        return jnp.sum(states)

    gradient = jax.jit(jax.grad(value))
    lowers(gradient, shapes_of("float32"), drive._knobs(decoder, knobs), tiny_request(4))


def latents_of(state):
    """Records whatever latents a state has."""
    return state.latents if hasattr(state, "latents") else state.latent


@pytest.mark.parametrize("accumulate", [1, 2])
def test_train_step(accumulate):
    network, optimizer = tiny_network(remat="iteration"), adamw(1e-3, 10)
    objective = recurrent_loss(network, poisson_lognormal(4.0), 2)
    step = make_train_step(objective, optimizer, ema_decay=0.99, accumulate=accumulate)
    params = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes_of("float32"))
    state = TrainState.create(params, optimizer, jax.random.key(0), ema=True)
    tokens = jnp.zeros((2, 6), jnp.int32)
    batch = {"tokens": tokens, "targets": tokens, "weights": jnp.ones(tokens.shape)}
    lowers(step, state, None, batch)
