"""Recorded arrays of the original denoiser: weights, forward pass, SUBS, the noise level that is
always zero.
"""

import json
import shutil
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
from reading import positions_of, read
from recorded import equal, jitted
from recorded_masked_diffusion import FOLDER, arrays, assert_close, assert_log_probs, model

from paradec_jax import store
from paradec_jax.convert import mdlm
from paradec_jax.convert.engine import table_shapes
from paradec_jax.decode.rules.subs import subs, without_mask
from paradec_jax.models import denoiser
from paradec_jax.models.denoiser import Denoiser, noise_map
from paradec_jax.nn import blocks

TOLERANCE = 1e-4
READ = {  # arrays of forward.npz, each by the test that compares it
    "x0",
    "xt",
    "sigma_passed",
    "raw_logits",
    "log_probs",
    "raw_logits_if_time_conditioned_row0",
    "sigma_map_out",
    "block0_attn_heads_out",
}


def hidden_after() -> list[str]:
    return [f"hidden_after_block_{i}" for i in range(model()[0].config.layers)]


@jitted
def call(network, params, tokens, level=None):
    """Head inputs and logits, what each block puts out, and the attended heads of the first; of a
    noise level.
    """
    heads = []

    def spied(*arguments, **options):
        heads.append(attention(*arguments, **options))
        return heads[-1]

    attention, of_zero = blocks.attention, denoiser.noise_map
    blocks.attention = spied
    if level is not None:
        denoiser.noise_map = lambda _, *leaves: of_zero(level, *leaves)
    try:
        hidden, captured = network.module.apply(
            {"params": params},
            tokens,
            positions_of(tokens),
            None,
            method=Denoiser.hidden,
            capture_intermediates=lambda module, method: method == "__call__",
            mutable=["intermediates"],
        )
    finally:
        blocks.attention, denoiser.noise_map = attention, of_zero
    kept = captured["intermediates"]
    outputs = [kept[f"layer_{i}"]["__call__"][0] for i in range(network.config.layers)]
    joined = jnp.reshape(jnp.swapaxes(heads[0], 1, 2), hidden.shape)
    return network.logits(params, hidden), outputs, joined


@cache
def plain():
    network, params, _ = model()
    return call(network, params, jnp.asarray(arrays("forward")["xt"]))


def test_every_recorded_array_is_compared():
    assert arrays("forward").keys() == READ | set(hidden_after())


def test_names_and_their_order():
    layout = json.loads((FOLDER / "key_layout.json").read_text())
    config = model()[0].config
    assert mdlm.parameter_order(config) == layout["parameter_order_for_ema"]
    shapes = {mdlm.plain_name(name): tuple(shape) for name, shape in layout["state_dict"].items()}
    assert shapes == table_shapes(mdlm.table(config)) | {mdlm.ROPE: (config.head_dim // 2,)}
    assert all(mdlm.plain_name(name) in shapes for name in layout["sdtt_lightning_state_dict_keys"])


def test_both_configs_describe_the_model(tmp_path):
    network, params, spec = model()
    for name, file in (
        ("config.json", "sdtt_config.json"),
        ("model.safetensors", "model.safetensors"),
    ):
        shutil.copyfile(FOLDER / file, tmp_path / name)
    nested = store.load(tmp_path, dtype="float32")
    assert (nested.config, nested.token_spec) == (network.config, spec)
    assert spec.mask == network.vocab_size - 1 and spec.alignment == "own"
    jax.tree.map(equal, nested.params, params)


def close(got, name: str):
    """What was computed is the recorded array."""
    assert_close(got, arrays("forward")[name], TOLERANCE)


def test_a_pass():
    """Logits, the attended heads of the first block, and what each block puts out."""
    logits, outputs, heads = plain()
    close(logits, "raw_logits")
    close(heads, "block0_attn_heads_out")
    for name in hidden_after():
        close(outputs[int(name.rpartition("_")[2])], name)


def test_logits_of_prepared_parameters():
    network, params, _ = model()
    logits, *_ = read(network, network.prepare(params), jnp.asarray(arrays("forward")["xt"]))
    close(logits, "raw_logits")


def test_log_probabilities():
    want, mask = arrays("forward"), model()[2].mask
    tokens = want["xt"]
    got = np.asarray(subs(plain()[0], jnp.asarray(tokens), mask))
    assert_log_probs(got, want["log_probs"])
    others = np.arange(got.shape[-1]) != mask
    masked = tokens == mask
    assert masked.any() and not masked[0].any()
    equal(got[~masked], want["log_probs"][~masked])  # carried over, to the bit
    equal(tokens[~masked], want["x0"][~masked])
    assert np.exp(got[masked][:, mask]).max() == 0
    lowered = np.asarray(without_mask(plain()[0], mask))
    equal(lowered[..., others], np.asarray(plain()[0])[..., others])


def test_noise_map():
    params, level = model()[1], jnp.zeros(len(arrays("forward")["sigma_passed"]))
    leaves = (params[f"noise_{name}"] for name in ("in", "in_bias", "out", "out_bias"))
    got = noise_map(level, *leaves)
    close(got, "sigma_map_out")


def test_a_noise_level_would_matter():
    """The recorded level is passed on in place of zero: other logits, which are those recorded for
    its first row.
    """
    network, params, _ = model()
    want = arrays("forward")
    got, *_ = call(network, params, jnp.asarray(want["xt"]), jnp.asarray(want["sigma_passed"]))
    close(got[:1], "raw_logits_if_time_conditioned_row0")
    assert np.abs(got[0] - want["raw_logits"][0]).max() > 100 * TOLERANCE
