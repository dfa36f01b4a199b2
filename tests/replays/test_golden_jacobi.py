"""Recorded arrays of the original causal program: forward passes, cache, rotation, greedy decoding.

Models are named by the files `NAME_logits.npz` and `NAME_greedy.npz`; their weights lie in a folder
of that name, or beside the files. Parallel decoders and training have test files of their own.
"""

import re
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
from marks import over
from reading import positions_of
from recorded import assert_close, jitted
from recorded_jacobi import FOLDER, arrays, model, models, recorded_rows

from paradec_jax import decode
from paradec_jax.decode import Prefix
from paradec_jax.models import TransformerNetwork
from paradec_jax.models.transformer import Transformer
from paradec_jax.nn import masks
from paradec_jax.nn.blocks import PreNormBlock
from paradec_jax.nn.rope import rotation

TOLERANCES = {"random": 3e-4}  # of logits; large random weights make large logits
TOLERANCE = 1e-4
ANGLES = 1e-6
FED = (10, 6)  # tokens of the first calls that fill the cache; then one at a time
DROPPED = 3  # cache entries that are dropped before `retrim_ids` are fed


def test_folder_holds_recorded_arrays():
    for kind in ("logits", "greedy"):
        assert models(kind), f"{FOLDER} has no file NAME_{kind}.npz"


@jitted
def forward(network: TransformerNetwork, params, tokens, positions, window_mask):
    """Logits, keys and values of a window, and what each block and the final norm put out."""

    def blocks(module, method):
        return isinstance(module, PreNormBlock) and method == "__call__"

    (hidden, kv), captured = network.module.apply(
        {"params": params},
        tokens,
        network.view(positions, mask=window_mask),
        method=Transformer.hidden,
        capture_intermediates=blocks,
        mutable=["intermediates"],
    )
    layers = captured["intermediates"]
    outputs = [layers[f"layer_{i}"]["__call__"][0][0] for i in range(network.config.layers)]
    states = jnp.stack([params["embedding"][tokens], *outputs[:-1], hidden])
    return network.logits(params, hidden), states, kv


@cache
def plain(name: str):
    network, params, _ = model(name)
    tokens = jnp.asarray(arrays(name, "logits")["input_ids"])
    return forward(network, params, tokens, positions_of(tokens), masks.causal(tokens.shape[1]))


def close(name: str, got: jax.Array, array: str):
    """What was computed is the recorded array."""
    assert_close(got, arrays(name, "logits")[array], TOLERANCES.get(name, TOLERANCE))


every_model = over(models("logits"))


@every_model
def test_a_pass_over_whole_texts(name):
    logits, states, kv = plain(name)
    close(name, logits, "logits")
    close(name, states, "hidden_states")
    close(name, jnp.stack([layer.k.swapaxes(-1, -2) for layer in kv]), "cache_k")
    close(name, jnp.stack([layer.v for layer in kv]), "cache_v")


@every_model
def test_custom_positions_and_mask(name):
    network, params, _ = model(name)
    want = arrays(name, "logits")
    tokens, positions = want["input_ids"][:1], want["custom_pos"][None]
    logits, _, _ = forward(network, params, tokens, positions, want["custom_mask"])
    close(name, logits[0], "custom_logits")


@jitted
def feed(network: TransformerNetwork, params, cache, tokens, at):
    """A window after `at` cached positions; it is stored at once."""
    start = jnp.full(tokens.shape[0], at, jnp.int32)
    out = network.forward(params, tokens, positions_of(tokens, at), Prefix(cache, start))
    return network.logits(params, out.hidden), network.write(cache, out.kv, start)


@cache
def fed(name: str):
    """Logits of the recorded tokens, fed in pieces, and the cache that they leave."""
    network, params, _ = model(name)
    tokens = jnp.asarray(arrays(name, "logits")["input_ids"])
    batch, length = tokens.shape
    cache = network.init_cache(
        jax.random.split(jax.random.key(0), batch),
        length + arrays(name, "logits")["retrim_ids"].shape[1],
    )
    logits, at = [], 0
    for width in (*FED, *(1,) * (length - sum(FED))):
        out, cache = feed(network, params, cache, tokens[:, at : at + width], at)
        logits.append(out)
        at += width
    return jnp.concatenate(logits, axis=1), cache, at - DROPPED


@every_model
def test_fed_through_a_cache(name):
    close(name, fed(name)[0], "cached_logits")


@every_model
def test_fed_after_dropping_entries(name):
    """Nothing is done to drop them: what lies beyond the trusted length is not seen, then
    overwritten.
    """
    network, params, _ = model(name)
    _, cache, trusted = fed(name)
    again = jnp.asarray(arrays(name, "logits")["retrim_ids"])
    close(name, feed(network, params, cache, again, trusted)[0], "retrim_logits")


def rotations() -> list[tuple[str, str]]:
    """Each model with the names of its recorded cosines and sines."""
    return [(n, a) for n in models("logits") for a in arrays(n, "logits") if a.startswith("rope_")]


@over(rotations(), argument="name, array")
def test_rotation(name, array):
    config = model(name)[0].config
    at = re.fullmatch(r"rope_(?:inv_freq|(?:cos|sin)_p(\d+))", array)
    position = 1 if at[1] is None else int(at[1])
    cos, sin = (
        x[0, 0, 0] for x in rotation(jnp.array([[position]]), config.head_dim, config.rope_base)
    )
    if at[1] is None:
        got = np.arctan2(sin, cos)  # an angle below pi: that of position 1
    else:
        got = np.tile(cos if "cos" in array else sin, 2)
    assert_close(got, arrays(name, "logits")[array], ANGLES)


@over(models("greedy"))
def test_greedy_outputs(name):
    network, params, spec = model(name)
    prompts, outputs = recorded_rows(name)
    budget = max(len(output) for output in outputs)
    request = decode.make_request(prompts, max_new_tokens=budget, stop=spec.stop)
    size = max(len(prompt) for prompt in prompts) + budget
    for decoder in (decode.AutoRegressive(greedy=True), decode.Jacobi(block=16, greedy=True)):
        result = decode.run(decoder.bind(network, size), params, request)
        assert result.completions() == outputs
        assert (result.network_calls <= result.generated).all()
        for output, reason in zip(outputs, result.reasons.tolist(), strict=True):
            assert reason == (
                decode.Reason.STOP if output[-1] in spec.stop else decode.Reason.BUDGET
            )


@over(models("greedy"))
def test_greedy_margins(name):
    """Best minus second logit of each step, from one pass over prompt and output."""
    network, params, _ = model(name)
    prompts, outputs = recorded_rows(name)
    want = arrays(name, "greedy")["margins"]
    width = max(len(prompt) + len(output) for prompt, output in zip(prompts, outputs, strict=True))
    tokens = np.zeros((len(prompts), width), np.int32)
    for row, prompt, output in zip(tokens, prompts, outputs, strict=True):
        row[: len(prompt) + len(output)] = prompt + output
    logits, _, _ = forward(network, params, tokens, positions_of(tokens), masks.causal(width))
    best = np.sort(np.asarray(logits), axis=-1)
    margins = best[..., -1] - best[..., -2]
    for row, prompt, output, recorded in zip(margins, prompts, outputs, want, strict=True):
        got = row[len(prompt) - 1 :][: len(output)]
        assert_close(got, recorded[: len(output)], TOLERANCES.get(name, TOLERANCE))
        assert np.isnan(recorded[len(output) :]).all()
