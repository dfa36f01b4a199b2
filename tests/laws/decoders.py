"""The tables of decoders that the laws are tested on.

`ROWS` holds every decoder class of `paradec_jax`, released ones included, and the test decoders of this folder, on
stub networks whose answers are known: every law that can be stated without knowing the decoder runs over all rows.
`REAL` and `CAUSAL` hold some of them for small models of random weights.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import house_decoders as house
import jax
import numpy as np
import pytest
from plain_baselines import Count, drafted_count, lookahead_count, prompt_lookup_count
from plain_canvas import (
    block_count,
    drafted_block_count,
    dual_cache_count,
    grid_count,
    residual_count,
    strided_count,
    whole_canvas_count,
)
from plain_jacobi import jacobi_count
from plain_recurrent import (
    latent_count,
    one_by_one_count,
    second_check_count,
    speculative_count,
    static_count,
    wavefront_count,
)

from paradec_jax import decode
from paradec_jax.config import TokenSpec
from paradec_jax.decode import released
from paradec_jax.decode.released.adaptive import ReleasedAdaptive
from paradec_jax.decode.released.lookahead import ReleasedLookahead
from paradec_jax.decode.released.prompt_lookup import ReleasedPromptLookup
from paradec_jax.testing import StubCausal, StubDenoiser, StubHead, StubNetwork, tiny_causal, tiny_network

SIZE, BUDGET = 20, 9
STEPS = 16  # more than any row of the table needs for BUDGET tokens


@dataclasses.dataclass(frozen=True)
class Row:
    """A decoder of the table.

    Attributes:
      kind, options: the decoder's class and static fields; stubs among them are further networks.
      knobs: knobs that differ from the defaults.
      stub: fields of the stub network.
      net: the stub network's class.
      recurrence: recurrences each position does at its end (the most that matter), for the expected tokens.
      overruns: repeats a release that cuts no commit at a budget or a stop token, so those laws leave it out.
      only_greedy: repeats a release that does not sample.
      batch_wide: repeats a release that calls the network for a whole batch or not at all, so that what a row costs
        depends on the others.
      count: (stub, prompt length, new tokens) -> network calls, positions, what networks declare; None without a
        formula.
      first: calls and tokens of `init`.
    """

    kind: type
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    knobs: dict[str, Any] = dataclasses.field(default_factory=dict)
    stub: dict[str, Any] = dataclasses.field(default_factory=dict)
    net: type = StubNetwork
    recurrence: int | None = 4
    overruns: bool = False
    only_greedy: bool = False
    batch_wide: bool = False
    count: Callable[[Any, int, int], Count] | None = None
    first: tuple[int, int] = (1, 1)

    def network(self, **changes: Any) -> Any:
        return self.net(**{**self.stub, **changes})

    def decoder(self, network: Any = None, size: int = SIZE, **options: Any) -> Any:
        network = self.network() if network is None else network
        options = {**self.options, **options}
        for name in self.kind.further_networks:
            if not isinstance(options[name], str):
                probe = getattr(network, "probe", None)
                options[name] = dataclasses.replace(options[name], probe=probe)
        return self.kind(network, size, self.spec, **options)

    @property
    def spec(self) -> TokenSpec:
        """A denoiser's logits are about their own positions, and it has a mask."""
        if self.net is not StubDenoiser:
            return TokenSpec(pad=10)
        return TokenSpec(pad=9, mask=self.network().mask, alignment=self.network().alignment)

    @property
    def params(self) -> Any:
        """Those of the stubs: none, for each of several networks."""
        names = self.kind.further_networks
        return dict.fromkeys(("network", *names)) if names else None

    def own(self, result: dict[str, Any]) -> dict[str, Any]:
        """What of a result (`results.listed`) is each row's own affair."""
        shared = ("network_calls", "positions", "head_calls") if self.batch_wide else ()
        return {name: value for name, value in result.items() if name not in shared}

    def values(self, **changes: Any) -> Any:
        if self.only_greedy:
            changes.pop("temperature", None)
        return self.kind.Knobs(**{**self.knobs, **changes})

    def expected(self, prompt: Sequence[int], count: int, recurrence: int | None = None) -> list[int]:
        """The tokens that follow a prompt."""
        stub = self.network()
        if self.net is StubDenoiser:
            return stub.expected([*prompt, *[None] * count])[len(prompt) :]
        return stub.expected(prompt, count, recurrence or self.recurrence)


def causal_row(kind: type, count: Callable[..., Count] | None, stub: dict[str, Any], **options: Any) -> Row:
    """A row on the causal stub; the options tell the calls as well."""
    options = {**options, "log_probs": True}
    return Row(kind, options, stub=stub, net=StubCausal, count=count and functools.partial(count, options))


def jacobi_row(kind: type, *, spawn: float | None = None, **options: Any) -> Row:
    """A row of a Jacobi decoder on the causal stub; the knob tells the calls as well."""
    knobs = {} if spawn is None else {"spawn": spawn}
    row = causal_row(kind, jacobi_count, REPEATING, **options)
    count = functools.partial(jacobi_count, {**options, **knobs})
    return dataclasses.replace(row, knobs=knobs, count=count)


def released_row(kind: type, knobs: dict[str, Any] | None = None, **options: Any) -> Row:
    """A row of a released block decoder, whose first call commits nothing."""
    return Row(
        kind, options, knobs or {}, REPEATING, StubCausal, overruns=True, only_greedy=True, first=(1, 0)
    )


def canvas_row(kind: type, count: Callable[..., Count], first: int, **options: Any) -> Row:
    """A row on the denoiser, one token a call."""
    knobs, options = {"threshold": 2.0}, {**options, "log_probs": True}
    return Row(kind, options, knobs, {"sharpness": 12.0}, StubDenoiser, count=count, first=(first, 0))


def masked_row(kind: type, count: Callable[..., Count] | None, knobs: Any = None, **options: Any) -> Row:
    """A row on the denoiser that draws beforehand who is revealed when; so many steps that each is alone."""
    knobs = {"temperature": 0.0, **({"steps": ALONE} if knobs is None else knobs)}
    return Row(kind, options, knobs, {"sharpness": 12.0}, StubDenoiser, count=count, first=(0, 0))


def block_row(
    kind: type,
    block: int,
    count: Callable[..., Count] | None = None,
    knobs: Any = None,
    first: tuple[int, int] = (1, 0),
    alignment: str = "own",
    **options: Any,
) -> Row:
    """A row on the denoiser that sees in blocks; one token a step, from left to right, unless told otherwise."""
    stub = {"sharpness": 12.0, "block": block, "alignment": alignment}
    return Row(kind, options, knobs or {}, stub, StubDenoiser, count=count, first=first)


def head_row(
    kind: type, block: int, count: Any = None, says: str | None = "right", alignment: str = "own", **rest: Any
) -> Row:
    """A row of a decoder with a residual head that is right, lies, guesses, or (None) does not run."""
    of = StubDenoiser(sharpness=12.0, block=block, alignment=alignment)
    head: Any = "zero" if says is None else StubHead(of, says)
    return block_row(kind, block, count, alignment=alignment, head=head, **rest)


ALONE = 1_000_014  # by chance not all of the first row is committed at once


REPEATING = {"weights": (0, 0, 1, 0), "slope": 0, "constant": 0}  # the text has period 3
HEAD = StubCausal(weights=(0, 0, 1, 0), slope=0, constant=0, sharpness=2.0, counter="head_calls")
NEARLY = {
    "weights": (0, 0, 1, 0, 0, 0, 0, 2, 0),
    "slope": 0,
    "constant": 0,
}  # .. which the head does not quite know
MIXED = {"needed": (3, 1, 2, 4, 1)}
ROWS = {
    "autoregressive": Row(decode.AutoRegressive, {"log_probs": True}, net=StubCausal, count=one_by_one_count),
    "static": Row(decode.Static, {"log_probs": True}, stub=MIXED, count=static_count),
    "static-hasty": Row(
        decode.Static, {"recurrence": 2}, stub={**MIXED, "recurrence": 2}, recurrence=2, count=static_count
    ),
    "static-continuous": Row(decode.Static, {"continuous": True}, stub=MIXED, count=static_count),
    "adaptive-latent": Row(
        decode.Adaptive, stub={**MIXED, "recurrence": 5}, recurrence=1_000, count=latent_count
    ),
    "adaptive-entropy": Row(
        decode.Adaptive, {"criterion": "entropy-diff"}, stub=MIXED, recurrence=2, count=second_check_count
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
    ),
    "speculative-one": Row(
        decode.SelfSpeculative,
        {"draft_recurrence": 1, "lookahead": 1},
        stub=MIXED,
        count=functools.partial(speculative_count, 1, 1),
    ),
    "wavefront": Row(
        decode.Wavefront,
        {"window": 4, "inner_recurrence": 2, "log_probs": True},
        count=functools.partial(wavefront_count, 2),
    ),
    "wavefront-buckets": Row(
        decode.Wavefront,
        {"window": 6, "inner_recurrence": 2, "buckets": (1, 3)},
        count=functools.partial(wavefront_count, 2),
    ),
    "wavefront-bursts": Row(  # positions after a slow one settle while they wait, and are committed together
        decode.Wavefront, {"window": 6, "inner_recurrence": 2}, stub={"needed": (5, 1, 1, 1), "errs": False}
    ),
    "wavefront-headway": Row(
        decode.Wavefront,
        {"window": 5, "inner_recurrence": 2, "headway": 2, "noise_mixing": "sqrt"},
        {"max_recurrence": 8, "noise": 0.1},
        recurrence=None,
    ),
    "wavefront-restart": Row(
        decode.Wavefront,
        {"window": 5, "inner_recurrence": 2, "headway": 3, "warm_start": False},
        stub={"needed": (2, 1)},
        recurrence=None,
    ),
    "wavefront-straight-through": Row(
        decode.SoftWavefront,
        {"window": 4, "inner_recurrence": 2, "log_probs": True},
        count=functools.partial(wavefront_count, 2),
    ),
    "prompt-lookup": causal_row(decode.PromptLookup, prompt_lookup_count, REPEATING, max_ngram=2, num_pred=3),
    "lookahead": causal_row(
        decode.Lookahead, lookahead_count, REPEATING, level=4, window=3, guesses=2, pool_from_prompt=True
    ),
    "jacobi": jacobi_row(decode.Jacobi, block=4),
    "jacobi-candidates": jacobi_row(decode.Jacobi, block=4, candidates=3),
    "jacobi-running-pool": jacobi_row(decode.Jacobi, block=5, running=True, pool=2),
    "jacobi-rejection": jacobi_row(decode.Jacobi, block=4, running=True, acceptance="rejection"),
    "jacobi-blocks": jacobi_row(decode.Jacobi, block=3, blocks=2, pool=1, spawn=0.5),
    "jacobi-blocks-candidates": jacobi_row(decode.Jacobi, block=2, blocks=3, candidates=2, spawn=0.0),
    "masked": masked_row(decode.Masked, whole_canvas_count, chunk=4, log_probs=True),
    "masked-groups": masked_row(decode.Masked, None, {"steps": 3, "grid": "cosine"}, chunk=2),
    "masked-single": masked_row(decode.Masked, whole_canvas_count, {}, order="single"),
    "masked-confidence": masked_row(decode.Masked, None, {"steps": 4}, order="confidence", chunk=5),
    "soft-masked": masked_row(decode.SoftMasked, whole_canvas_count, chunk=4, log_probs=True),
    "strided": masked_row(
        decode.Strided, functools.partial(strided_count, 8, 3), width=8, stride=3, log_probs=True
    ),
    "block": block_row(
        decode.BlockDenoising,
        4,
        functools.partial(block_count, 4, True),
        first=(1, 1),
        rule="static",
        log_probs=True,
    ),
    "block-next": block_row(
        decode.BlockDenoising,
        3,
        functools.partial(block_count, 3, True),
        {"threshold": 2.0},
        (1, 1),
        "next",
        rule="dynamic",
    ),
    "block-unfused": block_row(
        decode.BlockDenoising,
        2,
        functools.partial(block_count, 2, False),
        rule="threshold",
        knobs={"threshold": 2.0},
        fuse_store=False,
        fuse_prompt=False,
    ),
    "block-random": block_row(decode.BlockDenoising, 4, knobs={"steps": 2}, rule="random"),
    "soft-block": block_row(
        decode.SoftBlock,
        4,
        functools.partial(block_count, 4, True),
        {"threshold": 2.0},
        (1, 1),
        log_probs=True,
    ),
    "elastic": dataclasses.replace(
        block_row(
            decode.ElasticDenoising, 2, None, {"length_entropy": 1.0}, (1, 1), rule="static", log_probs=True
        ),
        stub={"sharpness": 12.0, "block": 2, "others": (4,)},
    ),
    "elastic-one": block_row(
        decode.ElasticDenoising,
        4,
        functools.partial(block_count, 4, True),
        {"threshold": 2.0},
        (1, 1),
        rule="dynamic",
    ),
    "residual": head_row(
        decode.Residual,
        4,
        functools.partial(residual_count, 4, 2, True),
        first=(1, 1),
        rule="static",
        head_steps=2,
        log_probs=True,
    ),
    "residual-next": head_row(
        decode.Residual,
        2,
        functools.partial(residual_count, 2, 1, False),
        alignment="next",
        rule="threshold",
        knobs={"threshold": 2.0},
        fuse_store=False,
        fuse_prompt=False,
    ),
    "residual-zero": head_row(
        decode.Residual,
        4,
        says=None,
        first=(1, 1),
        rule="dynamic",
        head_rule="dynamic",
        knobs={"threshold": 2.0},
    ),
    "residual-speculative": head_row(
        decode.ResidualSpeculative,
        4,
        functools.partial(drafted_block_count, 4, 3),
        first=(1, 1),
        rule="static",
        log_probs=True,
    ),
    "residual-speculative-next": head_row(
        decode.ResidualSpeculative,
        3,
        functools.partial(drafted_block_count, 3, 2, right=False),
        says="liar",
        alignment="next",
        first=(1, 1),
        rule="static",
        candidates=2,
    ),
    "residual-speculative-unfused": head_row(
        decode.ResidualSpeculative,
        2,
        functools.partial(drafted_block_count, 2, 2, rides=False, fused=False),
        rule="threshold",
        knobs={"threshold": 2.0},
        candidates=2,
        ride=False,
        fuse_store=False,
        fuse_prompt=False,
    ),
    "residual-speculative-random": head_row(
        decode.ResidualSpeculative, 4, says="random", first=(1, 1), rule="dynamic", knobs={"threshold": 0.4}
    ),
    "residual-veto": head_row(
        decode.ResidualVeto, 4, judge="confidence", first=(1, 1), knobs={"threshold": 0.5}, log_probs=True
    ),
    # Released programs
    "released-adaptive": Row(ReleasedAdaptive, stub={**MIXED, "recurrence": 5}, recurrence=1_000),
    "released-wavefront": Row(
        released.ReleasedWavefront,
        {"window": 5, "inner_recurrence": 2, "recurrence": 4, "buckets": (1, 3)},
        {"noise": 0.0},
        overruns=True,
    ),
    "released-wavefront-fixed": Row(
        released.ReleasedWavefront,
        {
            "window": 10,
            "inner_recurrence": 2,
            "recurrence": 4,
            "headway": 2,
            "rule": "fixed",
            "buckets": (5,),
        },
        recurrence=None,
        overruns=True,
    ),
    "released-prompt-lookup": causal_row(
        ReleasedPromptLookup, None, REPEATING, max_ngram=2, num_pred=3, dummy=7
    ),
    "released-lookahead": causal_row(ReleasedLookahead, None, REPEATING, level=4, window=3, guesses=2),
    "released-jacobi": released_row(released.ReleasedJacobi, block=4),
    "released-blocks": released_row(released.ReleasedMultiBlock, block=3, in_flight=2, capacity=8),
    "released-window": released_row(released.ReleasedRunningWindow, block=4),
    "released-masked": masked_row(
        released.ReleasedMasked, functools.partial(grid_count, 6), {}, sampler="ancestral", steps=5
    ),
    "released-masked-cached": dataclasses.replace(
        masked_row(released.ReleasedMasked, None, {}, steps=6), batch_wide=True
    ),
    "released-masked-sdtt": dataclasses.replace(
        masked_row(released.ReleasedMasked, None, {}, program="sdtt", sampler="analytic", steps=4),
        batch_wide=True,
    ),
    "released-denoising": dataclasses.replace(
        block_row(released.ReleasedDenoising, 2, knobs={"threshold": 2.0}, program="jetengine"), overruns=True
    ),
    "released-speculative": dataclasses.replace(
        head_row(released.ReleasedSpeculative, 4, candidates=2), overruns=True, batch_wide=True
    ),
    "released-veto": head_row(released.ReleasedVeto, 2, knobs={"threshold": 0.5}),
    "lossy-position-wise": head_row(released.LossyPositionWise, 2),
    "released-strided": dataclasses.replace(
        masked_row(released.ReleasedStrided, None, {}, steps=2, width=10, stride=5), batch_wide=True
    ),
    # Decoders of this folder
    "any-order": canvas_row(house.AnyOrder, whole_canvas_count, 0),
    "any-order-shifted": dataclasses.replace(
        canvas_row(house.AnyOrder, whole_canvas_count, 0), stub={"sharpness": 12.0, "alignment": "next"}
    ),
    "dual-cache": canvas_row(house.DualCache, functools.partial(dual_cache_count, 4), 1),
    "dual-cache-per-query": canvas_row(
        house.DualCache, functools.partial(dual_cache_count, 3), 1, block=3, per_query=True
    ),
    "drafted": Row(
        house.Drafted,
        {"head": HEAD, "ahead": 3, "log_probs": True},
        stub=NEARLY,
        net=StubCausal,
        count=functools.partial(drafted_count, HEAD, 3),
    ),
}
# One row of each class is quick in the laws of `EVERY` and `COUNTED`. In the others only rows that go a way of their
# own through the machine are quick, and none of the replicas that append, which studies alone run.
CLASSES = tuple({row.kind: name for name, row in reversed(ROWS.items())}.values())
VARIANTS = (
    "static-hasty",
    "adaptive-argmax",
    "speculative-one",
    "wavefront-bursts",
    "released-wavefront-fixed",
    "jacobi-rejection",
    "jacobi-running-pool",
    "jacobi-blocks-candidates",
    "dual-cache-per-query",
    "masked-groups",
    "masked-single",
    "masked-confidence",
    "block-next",
    "block-unfused",
    "block-random",
    "elastic-one",
    "residual-next",
    "residual-zero",
    "residual-speculative-next",
    "residual-speculative-unfused",
    "residual-speculative-random",
    "released-masked-cached",
    "released-masked-sdtt",
)


def over(rows: Any, slow: tuple[str, ...]) -> Any:
    """A test of each of these rows, some of them slow."""
    names = [pytest.param(name, marks=pytest.mark.slow) if name in slow else name for name in rows]
    return pytest.mark.parametrize("name", names)


REPLICAS = tuple(
    name for name, row in ROWS.items() if ".released." in row.kind.__module__ and not row.kind.any_order
)
SELDOM = (
    *VARIANTS,
    *REPLICAS,
    "static-continuous",
    "adaptive-entropy",
    "wavefront-buckets",
    "wavefront-headway",
    "wavefront-straight-through",
    "lookahead",
    "prompt-lookup",
    "jacobi-candidates",
    "dual-cache",
    "any-order-shifted",
)
EVERY = over(ROWS, VARIANTS)
COUNTED = over({name: row for name, row in ROWS.items() if row.count}, VARIANTS)
ALL = over(ROWS, SELDOM)
EACH_CLASS = over(CLASSES, SELDOM)
CUT = over({name: row for name, row in ROWS.items() if not row.overruns}, SELDOM)
SAMPLED = over({name: row for name, row in ROWS.items() if not row.only_greedy}, SELDOM)


# On small models of random weights

WIDE = {"window": 4, "inner_recurrence": 2, "headway": 2, "noise_mixing": "sqrt"}
REAL = {
    "static": (decode.Static, "shared", {"continuous": True}, {}),
    "adaptive": (decode.Adaptive, "latest", {"criterion": "kl"}, {"exit_threshold": 0.02}),
    "speculative": (decode.SelfSpeculative, "full", {"draft_recurrence": 2, "lookahead": 3}, {}),
    "wavefront": (decode.Wavefront, "shared", WIDE, {"noise": 0.2, "max_recurrence": 6}),
}
CAUSAL = {
    "prompt-lookup": (decode.PromptLookup, {"max_ngram": 2, "num_pred": 3}),
    "lookahead": (
        decode.Lookahead,
        {"level": 4, "window": 4, "guesses": 3, "pool_from_prompt": True},
    ),
    "jacobi": (decode.Jacobi, {"block": 4, "running": True, "candidates": 2}),
    "jacobi-blocks": (decode.Jacobi, {"block": 3, "blocks": 2, "pool": 2}),
}


def tiny(kind: type, cache: str, **options: Any) -> Any:
    """A decoder of the small recurrent model."""
    return kind(tiny_network(cache), SIZE, **options)


def causal(kind: type, size: int = SIZE, **options: Any) -> Any:
    """A decoder of the small causal model."""
    return kind(tiny_causal(), size, log_probs=True, **options)


# What tests of the laws share


def record_all(state: Any, info: Any) -> Any:
    """Records a state, how many cache entries it trusts, and the info; one record, so that laws share a program."""
    return state, getattr(state, "cached", ()), info


def record_length(state: Any, info: Any) -> Any:
    """Records committed lengths."""
    return state.rows.length


def without_keys(tree: Any) -> Any:
    """A recorded tree on the host, its keys as numbers."""

    def leaf(x: Any) -> np.ndarray:
        is_key = jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(x) if is_key else x)

    return jax.tree.map(leaf, tree)
