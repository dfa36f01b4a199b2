"""Recorded forwards of a2d, CoDA and Open-dCoder; sizes, masks and types are read from each folder."""

import jax
import jax.numpy as jnp
from forwards_full import PAD, check_forward, check_padded
from marks import over
from reading import positions_of, read
from recorded import GOLDEN, arrays_in, equal, imported, near
from recorded_full import LOGITS, folders_in, model

from paradec_jax.nn import masks

FOLDER = GOLDEN / "full"
NAMES = folders_in(FOLDER)


def test_folder_holds_recorded_networks():
    assert NAMES, f"{FOLDER} has no folders with a config.json"


@over(NAMES)
def test_forward(name):
    """Every array is compared, but for those of training."""
    folder, want = FOLDER / name, arrays_in(FOLDER / name / "forward.npz")
    seen = check_forward(folder, normed=False)
    if "pad_logits" in want:
        seen |= check_padded(folder)
    if "causal_logits" in want:
        seen |= check_causal(folder)
    if "block_mask" in want:
        seen |= check_blocks(folder)
    assert {key for key in want if not key.startswith("train_")} == seen


def check_causal(folder) -> set[str]:
    """The same weights without a kind: a causal model, as its program runs beside padding."""
    network, params, _ = imported(folder)
    want, executed = arrays_in(folder / "forward.npz"), "pad_logits_as_executed_causal"
    assert network.visibility == "causal"
    for ids, logits in (("input_ids", "causal_logits"), ("pad_input_ids", executed)):
        with jax.default_matmul_precision("highest"):
            got, _, _ = read(network, params, jnp.asarray(want[ids], jnp.int32))
        real = want[PAD] > 0 if logits == executed else ...
        near(got[real], want[logits][real], **LOGITS)
    return {"causal_logits", "pad_input_ids", PAD, executed}


def check_blocks(folder) -> set[str]:
    """The same weights of the other kind, which see block by block."""
    want = arrays_in(folder / "forward.npz")
    block = int(want["block_mask"][0].sum())
    network, params, _ = model(folder, "bd3lm", block)
    tokens = jnp.asarray(want["input_ids"], jnp.int32)
    seen = masks.block_causal(positions_of(tokens), network.block)
    equal(seen[0], want["block_mask"])
    with jax.default_matmul_precision("highest"):
        logits, _, _ = read(network, params, tokens)
    near(logits, want["block_causal_logits"], **LOGITS)
    return {"block_mask", "block_causal_logits"}
