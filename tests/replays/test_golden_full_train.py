"""CoDA's recorded training forward: what is hidden, its logits and its loss."""

import json

import jax
import jax.numpy as jnp
import numpy as np
from marks import over
from reading import read
from recorded import GOLDEN, arrays_in, imported, near

from paradec_jax.losses import BoundRules, masked_diffusion_loss
from paradec_jax.losses.masked_diffusion import noise
from paradec_jax.noise import Schedule, Times

FOLDER = GOLDEN / "full"
NAMES = [
    path.parent.name
    for path in sorted(FOLDER.glob("*/forward.npz"))
    if "train_loss" in arrays_in(path)
]


def test_folder_holds_a_recorded_loss():
    assert NAMES, f"{FOLDER} has no folder with a train_loss"


@over(NAMES)
def test_training_loss(name):
    network, params, spec = imported(FOLDER / name)
    want = arrays_in(FOLDER / name / "forward.npz")
    floor = json.loads((FOLDER / name / "config.json").read_text())["sampling_eps"][1]
    rules, tokens = BoundRules(Schedule("ratio"), Times("plain", floor)), want["train_input_ids"]
    batch = {"tokens": jnp.asarray(tokens, jnp.int32)}
    batch |= {
        f"{x}_uniforms": jnp.asarray(want[f"train_u_{y}"])
        for x, y in (("time", "level"), ("mask", "mask"))
    }
    noised, *_ = noise(batch, rules, spec.mask, *jax.random.split(jax.random.key(0)))
    near(read(network, params, noised)[0][:, :-1], want["train_logits"], atol=5e-4, rtol=1e-4)
    # What the original hides of first tokens, about which nothing is said, is seen here.
    batch["tokens"] = jnp.where(np.arange(tokens.shape[1]) == 0, noised, batch["tokens"])
    loss = jax.jit(masked_diffusion_loss(network, spec, rules))
    found, _ = loss(params, None, batch, jax.random.key(0))
    # The original divides by all tokens, the first ones among them.
    near(found * (1 - 1 / tokens.shape[1]), want["train_loss"][0], atol=1e-4)
