"""Recorded decodes of D2F, several blocks in flight: every call, whole texts, losses.

Settings come from each folder's traces.json, sizes from the arrays. The folders are no part of the
repository: `PARADEC_GOLDEN` names where they lie.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from marks import over
from reading import read
from recorded import GOLDEN, arrays_in, call, equal, near
from recorded_full import LOGITS, json_in, model

from experiments.replicas import ReleasedForcing
from paradec_jax import decode
from paradec_jax.convert import peft
from paradec_jax.losses import ForcingRules, forcing_loss
from paradec_jax.nn import masks
from paradec_jax.noise import monotone
from paradec_jax.store.lora import merge

FOLDER = GOLDEN / "baselines" / "d2f"
NAMES = [path.parent.name for path in sorted(FOLDER.glob("*/adapter_config.json"))]
CASES = [f"{name} {case}" for name in NAMES for case in json_in(FOLDER / name / "traces.json")]
# What a case tells of a run beside its settings.
ABSENT, ACTIVE, READY, CACHED = range(4)
ARRAYS = (
    "prompt tokens block_state fwd_start fwd_len update_kvcache cache_length eos_detected argmax"
)


@functools.cache
def adapted(name: str) -> tuple[Any, Any, Any]:
    """Network, parameters with the adapter, special tokens."""
    network, params, spec = model(FOLDER / name)
    return network, merge(params, peft.read(FOLDER / name, network.config), 1.0), spec


@over(NAMES)
def test_forwards(name):
    """With the adapter and without, each in blocks and as a whole."""
    want = dict(arrays_in(FOLDER / name / "forward.npz"))
    tokens, prompt, block = (want.pop(key) for key in ("input_ids", "prompt_length", "block_size"))
    place = jnp.arange(tokens.shape[1])[None]
    sees = masks.block_causal(place, int(block), int(prompt))
    equal(sees[0], want.pop("mask_allowed"))
    network, base, _ = model(FOLDER / name)
    for kind, params in (("base", base), ("lora", adapted(name)[1])):
        for seen, mask in (("blockcausal", sees), ("full", jnp.ones_like(sees))):
            with jax.default_matmul_precision("highest"):
                logits = read(network, params, jnp.asarray(tokens), None, None, mask)[0]
            near(logits, want.pop(f"logits_{kind}_{seen}"), **LOGITS)
    assert not want


@over(NAMES)
def test_losses(name):
    """Of the adapter, whose teacher is the model without it, and of the data's tokens."""
    want = dict(arrays_in(FOLDER / name / "train_loss.npz"))
    tokens, prompts, block = (want.pop(n) for n in ("input_ids", "prompt_lengths", "block_size"))
    network, base, spec = model(FOLDER / name)
    place, hidden = jnp.arange(tokens.shape[1])[None], want.pop("masked")
    sees = masks.block_causal(place, int(block), jnp.asarray(prompts))
    equal(sees, want.pop("attention_allowed"))
    equal(np.where(hidden, spec.mask, tokens), want.pop("noisy"))
    batch = {"tokens": tokens, "labelled": place >= prompts[:, None]}
    batch |= {"hidden": hidden, "probability": want.pop("p_mask")}
    for kind, labels in (("distill", "teacher"), ("hardlabel", "data")):
        rules = ForcingRules(int(block), labels=labels)
        loss = jax.jit(forcing_loss(network, spec, rules, chunk=7))
        with jax.default_matmul_precision("highest"):
            found, _ = loss(adapted(name)[1], base, batch, jax.random.key(0))
        near(found, want.pop(f"loss_{kind}"), rtol=1e-4)
    # Shares of blocks: recorded draws, and ours
    recorded = want.pop("pmask_schedule_samples")
    shape = recorded.shape
    ours = monotone(jax.random.key(1), jnp.broadcast_to(jnp.arange(shape[1]), shape), 0.2, 0.7)
    for shares in (recorded, np.asarray(ours)):
        assert (np.diff(shares, axis=1) >= 0).all()
        assert (shares[:, 0] >= 0.2).all() and (shares[:, -1] <= 0.7 + 1e-6).all()
    assert not want


def setting(name: str, **options: Any) -> tuple[Any, ...]:
    """Decoder, knobs, request and arrays of a case."""
    folder, case = name.split()
    network, params, spec = adapted(folder)
    of, want = (
        json_in(FOLDER / folder / "traces.json")[case],
        arrays_in(FOLDER / folder / f"trace_{case}.npz"),
    )
    new, block = of["max_new_tokens"], of["block_size"]
    decoder = ReleasedForcing(length=block, flight=new // block, **options)
    decoder = decoder.bind(network, want["prompt"].shape[1] + new, spec)
    shares = {"admit": of["tau_add"], "activate": of["tau_act"], "threshold": of["tau_conf"]}
    request = decode.make_request(want["prompt"], max_new_tokens=new, stop=spec.stop[:1])
    return decoder, params, request, decoder.knobs(decoder.Knobs(**shares)), want, of


@over(CASES)
def test_every_call(name):
    """The prompt is read apart, so that the call on the first block says what it did, too."""
    decoder, params, request, knobs, want, of = setting(name, fuse_prompt=False)
    mask, block, prompt = decoder.mask, decoder.block, want["prompt"].shape[1]
    width, spans = want["tokens"].shape[1], want["block_state"].shape[1] - 1
    wanted = np.where(want["tokens"] < 0, mask, want["tokens"])
    with jax.default_matmul_precision("highest"):
        state = call(decoder, "init", params, request, knobs)
        for t in range(of["forwards"]):
            assert not state.rows.done[0]
            before = np.asarray(state.rows.tokens[0, :width])
            equal(before, wanted[t], err_msg=f"before call {t}")
            said = np.isin(before[prompt:], np.asarray(request.stop)).any()
            assert said == want["eos_detected"][t]
            state, info = call(decoder, "step", params, state, knobs)
            at, count, stored = int(info.at[0]), int(info.reads.sum()), int(info.stored[0])
            # Blocks by their states, the prompt first
            places = (prompt + block * np.arange(spans) - at) // block
            kind = np.select([places < 0, places < stored, places < count], [CACHED, READY, ACTIVE])
            full = (places < 0) | np.asarray(info.full[0])[np.maximum(places, 0)]
            masked = (before.reshape(-1) == mask)[prompt:].reshape(spans, block)
            left = np.where(kind == ACTIVE, masked.sum(1), 0)
            found = np.stack([kind, left, np.where(kind == ABSENT, 0, full)], axis=1)
            equal(found, want["block_state"][t, 1:], err_msg=f"call {t}")
            equal(want["block_state"][t, 0], (CACHED if t else READY, 0, 1))
            # Spans: the first call reads the prompt along
            first = (want["fwd_start"][t], want["fwd_len"][t], want["update_kvcache"][t])
            assert first == ((at, block * count, block * stored) if t else (0, at + block, at))
            assert want["cache_length"][t] == (at if t else 0)
            # What the call said of the masks that it read
            span = slice(at, at + block * count)
            open_ = before[span] == mask
            tokens, scores = (
                np.asarray(x[0]).reshape(-1)[: block * count]
                for x in (info.choice.tokens, info.choice.scores)
            )
            equal(tokens[open_], want["argmax"][t, span][open_])
            near(scores[open_], want["conf"][t, span][open_], atol=1e-4)
            for k in np.flatnonzero(want["logits_steps"] == t):
                logits = call(decoder.network, "logits", params, info.hidden)[0, : block * count]
                skip = 0 if t else prompt
                rows = want["logits"][k, skip : skip + len(logits)]
                # Where keys are stored, Dream's program keeps no row for the first position.
                kept = slice(int(stored > 0 and decoder.spec.alignment == "next"), None)
                near(logits[kept], rows[kept], **LOGITS)
    equal(state.rows.tokens[0, :width], wanted[-1])
    assert state.rows.done[0]
    assert want.keys() == {*ARRAYS.split(), "conf", "logits_steps", "logits"}


@over(CASES)
def test_texts_and_calls(name):
    decoder, params, request, knobs, want, of = setting(name)
    with jax.default_matmul_precision("highest"):
        result = decode.run(decoder, params, request, knobs)
    length = int(result.lengths[0])
    equal(result.tokens[0, :length], want["tokens"][-1])
    assert int(result.network_calls[0]) == of["forwards"] == len(want["fwd_len"])
    assert int(result.positions[0]) == want["fwd_len"].sum()
    stopped = int(result.reasons[0]) == decode.Reason.STOP
    assert stopped == of["stopped_by_eos"] and length == want["tokens"].shape[1]


@over([name for name in CASES if "serial" in name])
def test_cached_is_uncached(name):
    """The logits of every call are those of a forward of the whole canvas, block by block."""
    decoder, params, request, knobs, want, of = setting(name, fuse_prompt=False)
    block, prompt = decoder.block, want["prompt"].shape[1]
    with jax.default_matmul_precision("highest"):
        state = call(decoder, "init", params, request, knobs)
        width = state.rows.tokens.shape[1]
        place = jnp.arange(width)[None]
        sees = masks.block_causal(place, block, prompt)
        for _ in range(of["forwards"]):
            tokens = state.rows.tokens
            state, info = call(decoder, "step", params, state, knobs)
            hidden = read(decoder.network, params, tokens, None, None, sees)[1]
            if decoder.spec.alignment == "next":
                hidden = jnp.roll(hidden, 1, axis=1)
            at, count = int(info.at[0]), int(info.reads.sum()) * block
            found = np.asarray(info.hidden[0, :count])
            near(found, hidden[0, at : at + count], atol=2e-4)
