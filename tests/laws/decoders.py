"""The tables of decoders that the laws are tested on.

`ROWS` holds every decoder class of `paradec_jax` and of `experiments`, and the test decoders of
this folder, on stub networks whose answers are known: every law that can be stated without knowing
the decoder runs over all rows. `REAL` and `CAUSAL` hold some of them for small models of random
weights.
"""

import collections
import dataclasses
import functools
from collections.abc import Iterable
from typing import Any

import decoders_block
import decoders_full
import jax
import jax.numpy as jnp
import numpy as np
from decoder_rows import (
    BUDGET,
    REPEATING,
    SIZE,
    STEPS,
    Row,
    causal_row,
    drafted_row,
    jacobi_row,
    masked_row,
    released_row,
    wave_row,
    whole_batch_row,
)
from marks import over
from plain_baselines import lookahead_count, prompt_lookup_count
from plain_canvas import grid_count, strided_count, whole_canvas_count
from plain_recurrent import (
    latent_count,
    one_by_one_count,
    second_check_count,
    speculative_count,
    static_count,
)
from stubs import StubCausal, tiny_causal, tiny_network, tiny_request

from experiments import replicas
from paradec_jax import decode

MIXED = {"needed": (3, 1, 2, 4, 1)}
# two windows
ROWS = {
    "autoregressive": Row(
        decode.AutoRegressive, {"log_probs": True}, net=StubCausal, count=one_by_one_count
    ),
    "static": Row(decode.Static, {"log_probs": True}, stub=MIXED, count=static_count),
    "static-hasty": Row(
        decode.Static,
        {"recurrence": 2},
        stub={**MIXED, "recurrence": 2},
        recurrence=2,
        count=static_count,
    ),
    "static-continuous": Row(decode.Static, {"continuous": True}, stub=MIXED, count=static_count),
    "adaptive-latent": Row(
        decode.Adaptive, stub={**MIXED, "recurrence": 5}, recurrence=1_000, count=latent_count
    ),
    "adaptive-entropy": Row(
        decode.Adaptive,
        {"criterion": "entropy-diff"},
        stub=MIXED,
        recurrence=2,
        count=second_check_count,
    ),
    "adaptive-argmax": Row(
        decode.Adaptive,
        {"criterion": "argmax-stability", "log_probs": True},
        {"exit_threshold": 2.0},
        stub={**MIXED, "errs": False},
    ),
    "speculative": Row(
        decode.SelfSpeculative,
        {"draft_recurrence": 2, "lookahead": 3, "log_probs": True},
        stub=MIXED,
        count=functools.partial(speculative_count, 2, 3),
        most=lambda new: 1 + 4 * (new - 1),
    ),
    "speculative-one": Row(
        decode.SelfSpeculative,
        {"draft_recurrence": 1, "lookahead": 1},
        stub=MIXED,
        count=functools.partial(speculative_count, 1, 1),
        most=lambda new: 1 + 2 * (new - 1),
    ),
    "wavefront": wave_row(counted=True, window=4, log_probs=True),
    "wavefront-buckets": wave_row(counted=True, window=6, buckets=(1, 3)),
    # Positions after a slow one settle while they wait, and are committed together.
    "wavefront-bursts": wave_row(stub={"needed": (5, 1, 1, 1), "errs": False}, window=6),
    "wavefront-headway": wave_row(
        knobs={"max_recurrence": 8, "noise": 0.1},
        most=8,
        recurrence=None,
        window=5,
        headway=2,
        noise_mixing="sqrt",
    ),
    "wavefront-restart": wave_row(
        stub={"needed": (2, 1)}, recurrence=None, window=5, headway=3, warm_start=False
    ),
    "wavefront-straight-through": wave_row(
        decode.SoftWavefront, counted=True, window=4, log_probs=True
    ),
    "prompt-lookup": causal_row(
        decode.PromptLookup,
        prompt_lookup_count,
        REPEATING,
        max_ngram=2,
        num_pred=3,
        min_ngram=1,
    ),
    "lookahead": causal_row(
        decode.Lookahead,
        lookahead_count,
        REPEATING,
        level=4,
        window=3,
        guesses=2,
        pool_from_prompt=True,
    ),
    "drafted": drafted_row(errs=True),
    "drafted-line": drafted_row(places=1),
    "drafted-ratio": drafted_row(places=2, acceptance="ratio", errs=True),
    "jacobi": jacobi_row(decode.Jacobi, block=4),
    "jacobi-candidates": jacobi_row(decode.Jacobi, block=4, candidates=3),
    "jacobi-running-pool": jacobi_row(decode.Jacobi, block=5, running=True, pool=2),
    "jacobi-blocks": jacobi_row(decode.Jacobi, block=3, blocks=2, pool=1, spawn=0.5),
    "jacobi-blocks-candidates": jacobi_row(
        decode.Jacobi, block=2, blocks=3, candidates=2, spawn=0.0
    ),
    "masked": masked_row(decode.Masked, whole_canvas_count, chunk=4, log_probs=True),
    "masked-groups": masked_row(decode.Masked, None, {"steps": 3, "grid": "cosine"}, chunk=2),
    "masked-single": masked_row(decode.Masked, whole_canvas_count, {}, order="single"),
    "masked-confidence": masked_row(decode.Masked, None, {"steps": 4}, order="confidence", chunk=5),
    "masked-next": dataclasses.replace(
        masked_row(decode.Masked, whole_canvas_count, chunk=3),
        stub={"sharpness": 12.0, "alignment": "next"},
    ),
    "soft-masked": masked_row(decode.SoftMasked, whole_canvas_count, chunk=4, log_probs=True),
    "strided": masked_row(
        decode.Strided, functools.partial(strided_count, 8, 3), width=8, stride=3, log_probs=True
    ),
    **decoders_block.BLOCKS,
    **decoders_full.FULL,
    # Released programs
    "released-adaptive": Row(
        replicas.ReleasedAdaptive, stub={**MIXED, "recurrence": 5}, recurrence=1_000
    ),
    "released-wavefront": Row(
        replicas.ReleasedWavefront,
        {"window": 5, "inner_recurrence": 2, "recurrence": 4, "buckets": (1, 3)},
        {"noise": 0.0, "max_steps": 40},
        overruns=True,
        most=lambda new: 40 + 3,
    ),
    "released-wavefront-fixed": Row(
        replicas.ReleasedWavefront,
        {
            "window": 10,
            "inner_recurrence": 2,
            "recurrence": 4,
            "headway": 2,
            "rule": "fixed",
            "buckets": (5,),
        },
        {"max_steps": 40},
        recurrence=None,
        overruns=True,
        most=lambda new: 40 + 3,
    ),
    "released-prompt-lookup": causal_row(
        replicas.ReleasedPromptLookup, None, REPEATING, max_ngram=2, num_pred=3, dummy=7
    ),
    "released-lookahead": causal_row(
        replicas.ReleasedLookahead, None, REPEATING, level=4, window=3, guesses=2
    ),
    "released-jacobi": released_row(replicas.ReleasedJacobi, lambda new: 1 + new + 2 * 4, block=4),
    "released-blocks": released_row(
        replicas.ReleasedMultiBlock, lambda new: 1 + 1024 * 128, block=3, in_flight=2
    ),
    "released-window": released_row(replicas.ReleasedRunningWindow, lambda new: new + 1, block=4),
    "released-masked": dataclasses.replace(
        masked_row(
            replicas.ReleasedMasked,
            functools.partial(grid_count, 6),
            {},
            sampler="ancestral",
            steps=5,
        ),
        most=lambda new: 5 + 1,
    ),
    "released-masked-cached": whole_batch_row(replicas.ReleasedMasked, 6 + 1, steps=6),
    "released-masked-sdtt": whole_batch_row(
        replicas.ReleasedMasked, 4 + 1, program="sdtt", sampler="analytic", steps=4
    ),
    "released-canvas": decoders_full.full_row(
        replicas.ReleasedCanvas, None, {"factor": 1.0}, length=4, rule="factor", last_along=True
    ),
    "replayed-planned": decoders_full.full_row(replicas.ReplayedPlanned, None, {}),
    "released-strided": whole_batch_row(
        replicas.ReleasedStrided, 2 * (2 + 2), steps=2, width=10, stride=5
    ),
}
REPLICAS = tuple(
    name for name, row in ROWS.items() if row.kind.__module__.startswith("experiments.replicas")
)


def first_rows(names: Iterable[str]) -> tuple[str, ...]:
    """The first of these rows of each class."""
    return tuple({ROWS[name].kind: name for name in reversed([*names])}.values())


def by_class(names: Iterable[str], seldom: Iterable[str], apart: Iterable[str] = ()) -> Any:
    """A test of each of these rows, quick on the first of each class and on rows apart that are not
    tested seldom.
    """
    names = [*names]
    return over(names, {*names} - {*first_rows(names), *apart} | {*seldom})


# Laws of the program of a run are quick on the first row of each class, those that compile a trace
# or a row alone too, but where the class steps as another one does, and those that compile more
# where the machine goes one more way. Slow are replicas, whose recorded arrays `make golden`
# replays, and what differs from the first row of its class in options.
CLASSES = first_rows(ROWS)
# Steps of these are those of SemiAutoregressive in another order.
LONG = (*REPLICAS, "prophet", "planned", "speculative-denoising")
ALIKE = (
    *LONG,
    "wavefront-straight-through",
    "soft-masked",
    "soft-block",
    "residual-veto",
    "elastic",
    # whose programs are the largest
    "residual",
    "residual-speculative",
    "self-verified",
    "multi-block",
)
APART = ("jacobi-blocks",)  # a window of several blocks is a paper of its own
# One of each kind of state goes through all drivers.
KINDS = ("autoregressive", "wavefront", "jacobi", "masked", "block", "residual")
MAPPED = {*KINDS} - {"residual"}  # whose programs are the largest


EVERY = by_class(ROWS, LONG, APART)
BY_CLASS = by_class(ROWS, ALIKE)
COUNTED = by_class([name for name, row in ROWS.items() if row.count], LONG, APART)
CUT = by_class([name for name, row in ROWS.items() if not row.overruns], LONG, APART)
SAMPLED = by_class([name for name, row in ROWS.items() if not row.only_greedy], LONG, APART)
EACH_CLASS = over(CLASSES, {*CLASSES} - {*KINDS})
EACH_SAMPLED_CLASS = over(
    [name for name in CLASSES if not ROWS[name].only_greedy], {*CLASSES} - MAPPED
)


# On small models of random weights

WIDE = {"window": 4, "inner_recurrence": 2, "headway": 2, "noise_mixing": "sqrt"}
REAL = {
    "static": (decode.Static, "shared", {"continuous": True}, {}),
    "adaptive": (decode.Adaptive, "latest", {"criterion": "kl"}, {"exit_threshold": 0.02}),
    "speculative": (decode.SelfSpeculative, "full", {"draft_recurrence": 2, "lookahead": 3}, {}),
    "wavefront": (decode.Wavefront, "shared", WIDE, {"noise": 0.2, "max_recurrence": 6}),
}
CAUSAL = {
    "prompt-lookup": (decode.PromptLookup, {"max_ngram": 2, "num_pred": 3, "min_ngram": 1}),
    "lookahead": (
        decode.Lookahead,
        {"level": 4, "window": 4, "guesses": 3, "pool_from_prompt": True},
    ),
    "jacobi": (decode.Jacobi, {"block": 4, "running": True, "candidates": 2}),
    "jacobi-blocks": (decode.Jacobi, {"block": 3, "blocks": 2, "pool": 2}),
}


def tiny(kind: type, cache: str, **options: Any) -> Any:
    return kind(tiny_network(cache), SIZE, **options)


def causal(kind: type, size: int = SIZE, **options: Any) -> Any:
    return kind(tiny_causal(), size, log_probs=True, **options)


# What tests of the laws share

NEWS = (BUDGET, 2, 6)


def traced(
    name: str, news: Any = NEWS, stop: tuple[int, ...] = (0,), network: Any = None, **knobs: Any
) -> Any:
    """The result of a row, and `record_all` of each step; JAX checks that no key is used twice (law
    13).
    """
    row = ROWS[name]
    with jax.debug_key_reuse(True):
        request = tiny_request(news, stop=stop)
        return decode.trace(
            row.decoder(network),
            row.params,
            request,
            row.values(**knobs),
            n=STEPS,
            record=record_all,
        )


@functools.cache
def alone(name: str) -> list[tuple[decode.Decoded, collections.Counter]]:
    """Each prompt by itself in a longer buffer, at temperature 3: its result, and what really ran,
    counted.
    """
    row, ran = ROWS[name], collections.Counter()

    def probe(counter: str) -> None:
        ran[counter] += 1

    decoder, results = row.decoder(row.network(probe=probe), size=SIZE + 7), []
    request = tiny_request(NEWS, stop=(0,))
    longer = jnp.asarray(np.pad(request.tokens, [(0, 0), (0, 3)], constant_values=9))
    request = dataclasses.replace(request, tokens=longer)
    for i in range(request.batch):
        result = decode.run(decoder, row.params, request.take((i,)), row.values(temperature=3.0))
        jax.effects_barrier()
        results.append((result, ran.copy()))
        ran.clear()
    return results


def record_all(state: Any, info: Any) -> Any:
    """Records a state, how many cache entries it trusts, and the info; one record, so that laws
    share a program.
    """
    return state, getattr(state, "cached", ()), info


def without_keys(tree: Any) -> Any:
    """A recorded tree on the host, its keys as numbers."""

    def leaf(x: Any) -> np.ndarray:
        is_key = jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(x) if is_key else x)

    return jax.tree.map(leaf, tree)
