"""Every decoder and the train step lower for GPU and TPU, though tests run on the CPU; what their
programs hold.
"""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import stubs
from decoder_rows import BUDGET, STEPS
from decoders import EACH_CLASS, REAL, ROWS
from jax import export
from loss_table import OBJECTIVES
from marks import over, slow

from paradec_jax import decode
from paradec_jax.config import TokenSpec
from paradec_jax.decode.canvas.weigh import CanvasDecoder
from paradec_jax.decode.machine import drive
from paradec_jax.families import parameter_shapes
from paradec_jax.losses import (
    block_diffusion_loss,
    masked_diffusion_loss,
    poisson_lognormal,
    recurrent_loss,
    self_distillation_loss,
)
from paradec_jax.models.recurrent_cache import CACHE_MODES
from paradec_jax.nn.backend import SWITCH
from paradec_jax.train import TrainState, adamw, make_train_step

PLATFORMS = ("cuda", "tpu")
SIZE = 16
OWN, NEXT = (
    TokenSpec(mask=stubs.tiny_denoiser().vocab_size - 1, alignment=name) for name in ("own", "next")
)
HALF = {"dtype": "bfloat16", "param_dtype": "bfloat16"}


def lowers(function, *arguments) -> None:
    """Lowers a jitted function for both platforms at once."""
    exported = export.export(function, platforms=PLATFORMS)(*arguments)
    assert exported.platforms == PLATFORMS
    assert len(exported.mlir_module_serialized) > 0


def run_of(decoder):
    return jax.jit(
        lambda params, request, knobs: drive.compiled_run(
            decoder, params, request, knobs, np.int32(drive.UNBOUNDED)
        )
    )


def shapes_of(dtype: str):
    return parameter_shapes(stubs.tiny_network(dtype=dtype, param_dtype=dtype).config)


@EACH_CLASS
def test_decoder(name):
    row = ROWS[name]
    network = row.network()
    if row.net is stubs.StubCausal:
        network = stubs.tiny_causal(**HALF)
    elif row.net is stubs.StubNetwork:
        cache = "full" if row.kind is decode.SelfSpeculative else "shared"
        network = stubs.tiny_network(cache, **HALF)
    elif "block" in row.kind.visibilities:
        network = stubs.tiny_blocks(**HALF)
    elif issubclass(row.kind, CanvasDecoder):
        network = stubs.tiny_full(**HALF)
    elif not row.kind.needs_cache:
        network = stubs.tiny_denoiser(**HALF)
    decoder = row.decoder(network, SIZE)
    params = None if isinstance(network, stubs.StubDenoiser) else parameter_shapes(network.config)
    if isinstance(row.params, dict):
        params = {**row.params, "network": params}
        if row.kind.visibilities == ("block",):
            decoder = dataclasses.replace(decoder, head=stubs.tiny_head(**HALF))
            params["head"] = parameter_shapes(decoder.head.config)
        if isinstance(row.net(), stubs.StubCausal):
            drafter = stubs.tiny_drafter(**HALF)
            decoder = dataclasses.replace(decoder, drafter=drafter)
            params["drafter"] = parameter_shapes(drafter.config)

    lowers(run_of(decoder), params, stubs.tiny_request(4), decoder.knobs(row.values()))


@pytest.mark.slow
@over(REAL, ("static", "adaptive", "speculative"))
def test_gradient_of_a_rollout(name):
    kind, cache, options, knobs = REAL[name]
    decoder, knobs = kind(stubs.tiny_network(cache), SIZE, **options), kind.Knobs(**knobs)

    def value(params, knobs, request):
        _, states = decode.rollout(decoder, params, request, knobs, n=2, record=latents_of)
        return jnp.sum(states)

    gradient = jax.jit(jax.grad(value))
    lowers(gradient, shapes_of("float32"), decoder.knobs(knobs), stubs.tiny_request(4))


def latents_of(state, info):
    """Records the states of a wave, or those that positions start from."""
    return state.wave.states if hasattr(state, "wave") else state.cache.initial


@pytest.mark.slow
def test_gradient_of_a_soft_sampler():
    network = stubs.tiny_denoiser()
    decoder = decode.SoftMasked(network, SIZE, OWN, order="single", chunk=4)

    def value(params, knobs, request):
        _, hidden = decode.rollout(decoder, params, request, knobs, n=2, record=hidden_of)
        return jnp.sum(hidden)

    shapes = parameter_shapes(network.config)
    lowers(jax.jit(jax.grad(value)), shapes, decoder.knobs(None), stubs.tiny_request(4))


def hidden_of(state, info):
    return info.hidden


# What the programs hold


@pytest.mark.parametrize("platform", ["cpu", *PLATFORMS])
def test_only_a_program_for_a_cpu_feeds_a_row_twice(platform):
    """Decoding one by one in bfloat16: a CPU's products want two rows, and no other program has
    such a product.
    """
    network = stubs.tiny_causal(**HALF)
    decoder, request = (
        decode.AutoRegressive(network, SIZE),
        stubs.tiny_request(4, prompts=[[3, 1, 4]]),
    )
    params = jax.eval_shape(decoder.prepare, parameter_shapes(network.config))

    program = export.export(run_of(decoder), platforms=(platform,))(
        params, request, decoder.knobs(None)
    )
    products = re.findall(r"dot_general .*: \(tensor<(\d+)x16xbf16>", program.mlir_module())
    assert {"1", "2"} & set(products) == ({"2"} if platform == "cpu" else {"1"})


FEW = HALF | {"width": 64, "heads": 2, "kv_heads": 1, "feed_forward": 128}


@pytest.mark.parametrize("platform", PLATFORMS)
@over(["call", "tree", "gradient"])
def test_kernels_are_in_programs_for_cuda_alone(name, platform, monkeypatch):
    """Of few rows, a tree's windows among them, and where nothing is differentiated."""
    monkeypatch.setenv(SWITCH, "plain")
    network, request = stubs.tiny_causal(**FEW), stubs.tiny_request(4)
    shapes = parameter_shapes(network.config)
    if name == "gradient":

        def program(params, tokens):
            return jnp.sum(network.forward(params, tokens, tokens).hidden.astype(jnp.float32))

        arguments = (jax.jit(jax.grad(program)), shapes, jax.ShapeDtypeStruct((1, 3), jnp.int32))
    else:
        further = {"candidates": 2} if name == "tree" else {}
        decoder = decode.Jacobi(network, SIZE, block=4, **further)
        prepared = jax.eval_shape(decoder.prepare, shapes)
        arguments = (run_of(decoder), prepared, request, decoder.knobs(None))
    kernel = "__gpu$xla.gpu.triton"
    known = [export.DisabledSafetyCheck.custom_call(kernel)]
    exported = export.export(arguments[0], platforms=(platform,), disabled_checks=known)
    text = exported(*arguments[1:]).mlir_module()
    assert (kernel in text) == (platform == "cuda" and name != "gradient")


@over(["semi", "wavefront"], ["semi"])
def test_a_run_holds_no_array_that_only_infos_have(name):
    """The array of a marked info is in the program of a trace and not in that of a run."""
    row = ROWS[name]
    decoder, request = row.decoder(), stubs.tiny_request(BUDGET)
    knobs = decoder.knobs(row.values())

    @dataclasses.dataclass(frozen=True)
    class Talkative(row.kind):
        def step(self, params, state, knobs):
            state, info = row.kind.step(self, params, state, knobs)
            score = sum(jnp.sum(leaf) for leaf in jax.tree.leaves(info)).astype(jnp.float32)
            return state, jnp.sin(jnp.full((7, 13), score))

    told = Talkative(**{f.name: getattr(decoder, f.name) for f in dataclasses.fields(decoder)})
    bound = np.int32(drive.UNBOUNDED)
    run = drive.compiled_run.lower(told, row.params, request, knobs, bound).compile().as_text()
    trace = drive.compiled_trace.lower(told, drive.INFO, STEPS, row.params, request, knobs)
    marked = re.compile(r"f32\[(\d+,)*7,13\]")
    assert marked.search(trace.compile().as_text()) and not marked.search(run)


@over(["causal", "recurrent"], ["causal"])
def test_a_step_of_a_stream_copies_no_matrix(name):
    """Prepared parameters are read where they lie: no transpose, copy or concatenation as large as
    a matrix.
    """
    if name == "causal":
        decoder, params = (
            decode.Jacobi(stubs.tiny_causal(), SIZE, block=4),
            stubs.tiny_causal_params(),
        )
    else:
        decoder, params = (
            decode.Wavefront(stubs.tiny_network(), SIZE, window=4, inner_recurrence=2),
            stubs.tiny_params(),
        )
    request, knobs = stubs.tiny_request(4), decoder.knobs(None)
    smallest = min(
        leaf.size for leaf in jax.tree.leaves(params) if leaf.ndim == 2 and min(leaf.shape) > 8
    )

    def copies(params):
        state = drive.start.eval_shape(decoder, params, request, knobs)
        lowered = drive.advance_with_info.lower(decoder, params, state, knobs, np.int32(1))
        moved = r"= stablehlo\.(?:transpose|concatenate).*-> tensor<([0-9x]+)xf32>"
        shapes = [tuple(map(int, s.split("x"))) for s in re.findall(moved, lowered.as_text())]
        return [shape for shape in shapes if sorted(shape) in matrices]

    matrices = [
        sorted(leaf.shape)
        for leaf in jax.tree.leaves(decoder.prepare(params))
        if leaf.size >= smallest
    ]
    assert copies(decoder.prepare(params)) == []
    assert copies(params), "unprepared parameters are laid out anew, so this test can see it"


@over(CACHE_MODES, {*CACHE_MODES} - {"full"}, "mode")
def test_a_step_of_several_rows_copies_no_cache(mode):
    """Keys and values are written where they lie, in the loop of a compiled run, whatever a
    position keeps.
    """
    decoder, params = (
        decode.Static(stubs.tiny_network(mode), SIZE, greedy=True),
        stubs.tiny_params(),
    )
    request, bound = stubs.tiny_request(4), np.int32(drive.UNBOUNDED)
    knobs = decoder.knobs(None)
    buffers = drive.start.eval_shape(decoder, params, request, knobs).cache.kv.core[0]
    whole = {tuple(sorted(leaf.shape)) for leaf in buffers}
    program = drive.compiled_run.lower(decoder, params, request, knobs, bound).compile().as_text()
    in_the_loop = program.partition("\nENTRY ")[0]
    moved = re.findall(
        r"= f32\[([\d,]+)\]\S* (copy|transpose|dynamic-update-slice|scatter)\(", in_the_loop
    )
    moved = [(tuple(sorted(map(int, shape.split(",")))), how) for shape, how in moved]
    moved = [how for shape, how in moved if shape in whole]
    assert moved and not {"copy", "transpose"} & set(moved), moved


CAUSAL_READERS = (decode.Jacobi, decode.AutoRegressive, decode.PromptLookup, decode.Lookahead)
READERS = (decode.Static, *CAUSAL_READERS, decode.Wavefront, decode.Adaptive)


@over(READERS, READERS[2:], "kind")
def test_a_prompt_is_scored_at_its_end_alone(kind):
    """No program that reads prompts of 13 tokens holds scores of 37 tokens at each of them."""
    network = (stubs.tiny_causal if kind in CAUSAL_READERS else stubs.tiny_network)(vocab_size=37)
    decoder, request = kind(network, 24), stubs.tiny_request(4, prompts=[range(3, 16)] * 2)
    arguments = (parameter_shapes(network.config), request, decoder.knobs(None))
    text = drive.start.lower(decoder, *arguments).as_text()
    found = re.findall(r"tensor<([0-9x]+)x37xf32>", text)
    assert found and not any("13" in shape.split("x") or shape == "26" for shape in found)


def drawn_depths(network):
    return recurrent_loss(network, poisson_lognormal(4.0), 2)


@pytest.mark.parametrize(
    ("name", "remat", "accumulate", "loss"),
    [
        slow("recurrent", "iteration", 1, drawn_depths),
        slow("recurrent", "iteration", 2, drawn_depths),
        (
            "masked diffusion",
            "layer",
            1,
            lambda network: masked_diffusion_loss(network, OWN, chunk=4),
        ),
        slow(
            "self-distillation",
            "layer",
            1,
            lambda network: self_distillation_loss(network, OWN, chunk=4),
        ),
        (
            "block diffusion",
            "layer",
            1,
            lambda network: block_diffusion_loss(network, OWN, chunk=4),
        ),
        slow(
            "block diffusion",
            "layer",
            1,
            lambda network: block_diffusion_loss(network, NEXT, chunk=4),
        ),
    ],
)
def test_train_step(name, remat, accumulate, loss):
    row, optimizer = OBJECTIVES[name], adamw(1e-3, 10)
    network = row.network(remat=remat)
    step = make_train_step(loss(network), optimizer, ema_decay=0.99, accumulate=accumulate)
    params = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), parameter_shapes(network.config))
    teacher = None if row.teacher() is None else params
    state = TrainState.create(params, optimizer, jax.random.key(0), ema=True, teacher=teacher)
    lowers(step.jitted, state, None, row.batch(1))
