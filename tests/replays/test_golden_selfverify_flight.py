"""Recorded decodes with edits (LLaDA2.1), and of several open blocks in full attention (d3LLM).

The folders are no part of the repository: `PARADEC_GOLDEN` names where they lie.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from marks import over
from reading import read
from recorded import GOLDEN, arrays_in, call, equal, imported, near, part_of
from recorded_canvas import Settings
from recorded_full import LOGITS, json_in, model

from experiments.replicas import RecordedCanvas, ReplayedFlight
from experiments.replicas.delayed import CACHED, RENEWS, DelayedBlocks
from paradec_jax import decode
from paradec_jax.decode.rules import reveal, select
from paradec_jax.nn import masks

EDITING = GOLDEN / "selfverify" / "editing"
OPEN = {name: GOLDEN / "selfverify" / name for name in ("multiblock", "multiblock/dream")}
# What a case tells of a run beside its settings.
TOLD = {"calls", "edits", "edits_while_masked", "edits_to_mask", "max_post", "fills_per_call"}
TOLD |= {"prompt", "noise_seed", "margins", "prompt_index", "nfe", "calls_by_kind", "unfinished"}
TOLD |= {"calls_with_cache_not_equal_prefix", "max_open", "eos_token_id", "function"}
FLIGHTS = [
    f"{name} {case}"
    for name, folder in OPEN.items()
    for case in json_in(folder / "traces.json").get("cases", {})
]


@over(json_in(EDITING / "traces.json").get("cases", {}))
def test_edits(name):
    """Every call, then the whole text, in as many calls."""
    of, want = (
        json_in(EDITING / "traces.json")["cases"][name],
        part_of(arrays_in(EDITING / "decode.npz"), f"{name}."),
    )
    network, params, spec = imported(EDITING)
    settings, whole = Settings(of, TOLD), len(want["tokens"])
    take, prompt = settings.take, arrays_in(EDITING / "decode.npz")[f"prompt_{of['prompt']}"]
    block, new, eos = take("block_size"), take("max_new_tokens"), take("eos")
    network = dataclasses.replace(network, config=dataclasses.replace(network.config, block=block))
    assert whole == -(-(len(prompt) + new) // block) * block
    knobs = {
        "threshold": take("threshold", 0.95),
        "edit": take("editing_threshold", 0.9),
        "looks": take("max_post_steps", 16),
        "temperature": take("temperature", 0.0),
        "top_k": take("top_k"),
        "top_p": take("top_p", 1.0),
        "steps": -(-block // take("num_to_transfer", 1)),
    }
    stop = (eos,) if take("eos_early_stop", False) else ()
    settings.all_read()
    decoder = ReplayedFlight(flight=1, edits=True, confidence="filtered", fuse_prompt=False)
    decoder = decoder.bind(network, whole, spec)
    starts, calls = want["window_end"] - block, len(want["window_end"])
    draws = None
    if (drawn := want.get("u_draft")) is not None:
        draws = np.zeros((1, calls, whole), np.float32)
        for t, at in enumerate(starts):
            draws[0, t, at : at + block] = drawn[t]
        draws = RecordedCanvas(samples=jnp.asarray(draws))
        assert len(prompt) >= block  # a call of its own, which draws nothing, comes first
    request = decode.make_request(
        prompt[None], max_new_tokens=whole - len(prompt), stop=stop, recorded=draws
    )
    with jax.default_matmul_precision("highest"):
        knobs = decoder.knobs(decoder.Knobs(**knobs))
        state = call(decoder, "init", params, request, knobs)
        for t, at in enumerate(starts):
            assert not state.rows.done[0]
            span = slice(at, at + block)
            before = np.asarray(state.rows.tokens[0, span])
            equal(before, want["before"][t], err_msg=f"before call {t}")
            looked = int(state.looks[0, state.ready[0]])
            assert want["post_step"][t] == (0 if (before == decoder.mask).any() else looked + 1)
            state, info = call(decoder, "step", params, state, knobs)
            slot = int(info.stored[0])
            assert int(info.at[0]) + slot * block == at and int(info.reads.sum()) == slot + 1
            equal(info.choice.tokens[0, slot], want["prediction"][t])
            near(info.choice.scores[0, slot], want["prob"][t], atol=1e-4)
            equal(info.choice.where[0, slot], want["filled"][t])
            equal(info.edited[0, slot], want["edited"][t])
            equal(state.rows.tokens[0, span], want["after"][t])
            if "logits" in want:
                logits = call(decoder.network, "logits", params, info.hidden)
                near(logits[0, slot * block :][:block], want["logits"][t], **LOGITS)
    assert state.rows.done[0]
    length = int(state.rows.length[0])
    equal(state.rows.tokens[0, :length], want["tokens"][:length])
    assert length == whole or want["tokens"][length - 1] == eos
    assert int(state.rows.counts["network_calls"][0]) == calls + (len(prompt) >= block)
    if "mask_last" in want:
        sees = masks.block_causal(jnp.arange(starts[-1] + block)[None], block)[0]
        equal(sees, want["mask_last"].astype(bool))


@over(FLIGHTS)
def test_open_blocks_and_delayed_caches(name):
    """The whole run, each call beside the recorded one. Where the original sees keys twice, tokens
    are the recorded ones.
    """
    part, case = name.split()
    folder = OPEN[part]
    network, params, spec = model(folder)
    want = part_of(arrays_in(folder / "decode.npz"), f"{case}.")
    of = json_in(folder / "traces.json")["cases"][case]
    settings, dream = Settings(of, TOLD), spec.alignment == "next"
    take = settings.take
    block, size, prompt = take("block_size"), want["tokens"].shape[1], len(want["prompt"])
    assert size == prompt + take("max_new_tokens")
    delay = take("cache_delay_iter", 10_000 if of.get("function", "").endswith("cache") else None)
    blocks = DelayedBlocks(
        np.asarray([0, *range(prompt, size + 1, block)]),
        take("block_add_threshold"),
        take("decoded_token_threshold"),
        delay,
        take("refresh_interval", 10_000),
        dream,
    )
    bound, temperature = take("threshold"), take("temperature", 0.0)
    eos, stops = take("eos"), take("early_stop", False)
    settings.all_read()
    text, place = want["tokens"][0].copy(), np.arange(size)
    cache = network.init_cache(jax.random.split(jax.random.key(0), 1), 2 * size)
    equal(text[:prompt], want["prompt"])
    for t in range(len(want["kind"])):
        if stops and (said := np.flatnonzero(text[prompt:] == eos)).size:
            text = blocks.ended(text, prompt + said[0], eos)
        equal(text, want["tokens"][t], err_msg=f"before call {t}")
        kind, start, appended, entries = blocks.call(t + 1, text == spec.mask)
        names = (
            "kind nfe fwd_start first_position fwd_len update_kvcache cache_entries cached_prefix"
        )
        found = kind, t + 1, start, start, size - start, appended, entries
        found += (blocks.prefix - appended,)
        assert found == tuple(int(want[n][t]) for n in names.split()), f"call {t}"
        state = np.stack([blocks.full, blocks.masks, blocks.cached, blocks.noticed], axis=1)
        opened = np.arange(len(state)) <= blocks.last
        equal(np.where(opened[:, None], state, -1), want["block_state"][t], err_msg=f"call {t}")
        ends = blocks.begins[1:][opened & ((blocks.masks > 0) | blocks.filled)]
        end = ends.max() if delay is not None or dream else blocks.begins[blocks.last + 1]
        assert end == want["active_end"][t]

        # What is fed, in one compiled shape; the rest of it is invisible.
        fed, real = np.roll(text, -start)[None], place < size - start
        with jax.default_matmul_precision("highest"):
            logits, _, kv = read(
                network,
                params,
                jnp.asarray(fed),
                jnp.asarray(start + place)[None],
                decode.Prefix(cache, jnp.asarray([start])),
                jnp.broadcast_to(jnp.asarray(real), (1, size, size)),
            )
        if kind != CACHED:
            cache = network.write(cache, kv, jnp.asarray([start]))
        masked = (text == spec.mask) & (place < end)
        twice = kind != RENEWS and start > 0 and entries != start
        if twice:
            assert dream
            text = want["tokens"][t + 1].copy()
            continue
        rows = np.asarray(logits[0], np.float64)
        for k in np.flatnonzero(np.asarray(want.get("logits_steps", ())) == t):
            near(rows[: size - start], want["logits"][k][: size - start], **LOGITS)
        if dream:  # the first row that is fed has none before it
            rows = np.concatenate([rows[:1], rows[:-1]])
        rows = np.roll(rows, start, axis=0)
        p = np.exp(rows - rows.max(1, keepdims=True))
        p /= p.sum(1, keepdims=True)
        entropy = -np.sum(p * np.log(np.maximum(p, 1e-300)), axis=1)
        best = rows.argmax(1)
        equal(best[masked], want["argmax"][t][masked])
        near(entropy[masked], want["entropy"][t][masked], atol=1e-4)

        scores, open_ = jnp.asarray(-entropy)[None], jnp.asarray(masked)[None]
        where = reveal.threshold(scores, open_, -bound, strict=dream, best=not dream)
        first = np.flatnonzero(blocks.full & opened & (blocks.masks > 0))[0]
        own = (place >= blocks.begins[first]) & (place < blocks.begins[first + 1])
        if not (where[0] & own).any():
            where |= select.top(scores, open_ & own, 1)
        tokens = best
        if "gumbel_uniform" in want:
            noise = -np.log(want["gumbel_uniform"][t].astype(np.float64))
            tokens = np.argmax(np.exp(rows) / noise**temperature, axis=1)
        if "uniform_draw" in want:
            hot = np.exp((rows - rows.max(1, keepdims=True)) / temperature)
            passed = np.cumsum(hot / hot.sum(1, keepdims=True), axis=1)
            tokens = np.argmax(passed > want["uniform_draw"][t][:, None], axis=1)
        text = np.where(np.asarray(where[0]), tokens, text)
        equal(want["reveal"][t], masked_before_next(want, t, spec.mask))
    if stops:
        text = blocks.ended(text, prompt + np.flatnonzero(text[prompt:] == eos)[0], eos)
    equal(text, want["tokens"][-1])
    kinds = "prompt tokens kind nfe fwd_start fwd_len first_position update_kvcache cache_entries "
    kinds += (
        "cached_prefix active_end block_state argmax entropy reveal gumbel_uniform uniform_draw "
    )
    assert want.keys() <= {*(kinds + "logits_steps logits").split()}


def masked_before_next(want: dict[str, np.ndarray], t: int, mask: int) -> np.ndarray:
    """Masks of call t that the next one finds filled."""
    return (want["tokens"][t] == mask) & (want["tokens"][t + 1] != mask)
