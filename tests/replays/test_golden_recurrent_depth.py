"""Recorded arrays of the original recurrent-depth program: what they are, and the forward pass.

Names, shapes and cases come from its manifest and arrays; a kind of run that the manifest does not
list is not tested.
"""

import re
from functools import cache

import jax
import jax.numpy as jnp
from jax import lax
from marks import over
from recorded_recurrent_depth import (
    FOLDER,
    KINDS,
    RUNS,
    arrays,
    assert_close,
    forward_inputs,
    forward_of,
    model,
    names,
    network,
    params,
)

from paradec_jax.models import RecurrentDepthNetwork
from paradec_jax.nn.products import dense


def test_folder_holds_recorded_runs():
    assert RUNS, f"{FOLDER} has no manifest.json with runs of the kinds {', '.join(KINDS)}"
    for run in RUNS.values():
        file = FOLDER / run["file"]
        assert file.is_file(), f"{file} is listed in the manifest, but missing"


@over(names("forward", r"(logits|latent_lnf|head_hidden)_r\d+(_\w+_positions)?"))
def test_forward(name):
    what, r, positions = re.fullmatch(r"(\w+)_r(\d+)(?:_(\w+)_positions)?", name).groups()
    assert_close(forward_of("forward", int(r), positions)[what], arrays("forward")[name])


def keys_of(window) -> jax.Array:
    """Rotated keys of the first prelude block, [B, W, H, C]."""
    return window.prelude[0].k.transpose(0, 3, 1, 2)


@cache
def parts_of_forward() -> dict:
    """What a forward pass computes on its way to the logits."""
    want = arrays("forward")
    config = model().config
    state = jnp.asarray(want["init_state"])
    steps = len(want["state_trajectory_raw"]) - 1 if "state_trajectory_raw" in want else 0

    @jax.jit
    def compute(params, tokens, positions, state):
        net = network()
        view, window = net.view(positions), net.empty_window(*tokens.shape)
        e, window = net.embed(params, tokens, view, window)

        def one(state, _):
            new, _ = net.iterate(params, state, e, view, window, 0)
            return new, new

        parts = {
            "token_embed_scaled": params["embedding"][tokens] * config.width**0.5,
            "prelude_out": e,
            "prelude0_k_rot": keys_of(window),
            "adapter_out_step1": dense(jnp.concatenate([state, e], axis=-1), params["adapter"]),
            "state_trajectory_raw": jnp.concatenate(
                [state[None], lax.scan(one, state, length=steps)[1]]
            ),
        }
        # A model that ends after its first prelude block, and one whose keys are the queries.
        first = RecurrentDepthNetwork(config.__class__(**{**config.to_dict(), "prelude_layers": 1}))
        parts["prelude0_out"], _ = first.embed(
            params, tokens, view, first.empty_window(*tokens.shape)
        )
        exchange = {"q": "k", "k": "q", "q_bias": "k_bias", "k_bias": "q_bias"}
        attention = params["prelude_0"]["attention"]
        attention = {name: attention[exchange.get(name, name)] for name in attention}
        swapped = {**params, "prelude_0": {**params["prelude_0"], "attention": attention}}
        _, window = first.embed(swapped, tokens, view, first.empty_window(*tokens.shape))
        parts["prelude0_q_rot"] = keys_of(window)
        return parts

    return compute(params(), *forward_inputs("forward"), state)


INPUTS = r"input_ids|init_state|position_ids_\w+"
OUTPUTS = r"(logits|latent_lnf|head_hidden)_r\d+(_\w+_positions)?"


@over(names("forward", rf"(?!({INPUTS}|{OUTPUTS})$).*"))
def test_forward_part(name):
    assert_close(parts_of_forward()[name], arrays("forward")[name])
