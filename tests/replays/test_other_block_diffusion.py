"""Block diffusion with other sizes than the recorded ones: plain programs, and the replays against what they write.

`plain_sdar` and `plain_mrp` first repeat what was recorded of SDAR's programs and of residual prediction; a folder
that they wrote, of another block length, other heads, RoPE base and mask id, is then replayed like the recorded one.
"""

import functools
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import plain_mrp
import pytest
from plain_sdar import Reader, Sizes, decoded
from recorded_block_diffusion import FOLDER, arrays, cases
from safetensors.numpy import load_file

pytestmark = pytest.mark.golden

TESTS = Path(__file__).parents[1]
TOLERANCE = 2e-4
NUMBERS = ("threshold", "entropy_gamma", "tau", "gamma")


@functools.cache
def reader() -> Reader:
    """The recorded checkpoint and its head."""
    told, own = cases("config"), cases("mrp_config")
    sizes = Sizes(
        width=told["hidden_size"],
        layers=told["num_hidden_layers"],
        heads=told["num_attention_heads"],
        kv_heads=told["num_key_value_heads"],
        head_dim=told["head_dim"],
        feed_forward=told["intermediate_size"],
        vocabulary=told["vocab_size"],
        eps=told["rms_norm_eps"],
        theta=float(told["rope_theta"]),
        block=told["block_size"],
        mask=told["mask_token_id"],
        pad=told["eos_token_id"],
        head_layers=own["num_nextn_predict_layers"],
    )
    prefix = "mrp_modules.0.model."
    files = load_file(FOLDER / "model.safetensors"), load_file(FOLDER / "mrp.safetensors")
    weights, head = (
        {name.removeprefix(prefix): value.astype(np.float64) for name, value in of.items()} for of in files
    )
    return Reader(sizes, weights, head)


def assert_recorded(file: str, name: str, found: dict[str, np.ndarray]) -> None:
    """All that was recorded of a case is what was found."""
    wanted = {key: of for key, of in arrays(file).items() if key.startswith(f"{name}.")}
    assert wanted
    for key, want in wanted.items():
        got = found[key.removeprefix(f"{name}.")]
        if key.endswith("draft_tok"):  # of drafts beyond the last one the recorded tokens say nothing
            some = arrays(file)[f"{name}.draft_reveal"].any(axis=-1)
            got, want = got[some], want[some]
        if want.dtype.kind == "f":
            np.testing.assert_allclose(got, want, atol=TOLERANCE, rtol=0, err_msg=key)
        else:
            np.testing.assert_array_equal(got, want, err_msg=key)


def test_the_plain_network_is_the_recorded_one():
    want = arrays("forward")
    np.testing.assert_allclose(
        reader().logits(reader().whole(want["full_ids"])), want["full_logits"], atol=TOLERANCE, rtol=0
    )


@pytest.mark.slow
def test_the_plain_decodes_are_the_recorded_ones():
    for name, told in cases("decode_cases")["cases"].items():
        number = next((told[key] for key in NUMBERS if told.get(key) is not None), None)
        found = decoded(reader(), arrays("decode")[f"prompt.{told['prompt']}"], told, number)
        assert_recorded("decode", name, found)
        assert len(found["block"]) == told["n_denoise_forwards"]


@pytest.mark.slow
def test_the_plain_decodes_with_a_head_are_the_recorded_ones():
    for name, told in cases("mrp_decode_cases").items():
        prompt, new = arrays("decode")[f"prompt.{told['prompt']}"], told["gen_length"]
        dynamic = "dynamic" in (told.get("strategy") or told.get("backbone") or "")
        tau = told["tau"] if dynamic else None
        if told["mode"] == "base":
            found, counts = plain_mrp.base(reader(), prompt, new, tau)
        elif told["mode"] == "direct":
            own, mix = tau if "dynamic" in told.get("mrp", "") else None, told["mix"].rpartition("_")[2]
            found, counts = plain_mrp.direct(
                reader(), prompt, new, told["K"], tau, own, mix, told.get("scale", 1.0)
            )
        elif told["mode"] == "spec":
            released, context = told["variant"] == "official", told.get("mrp_prefix_kv", True)
            found, counts = plain_mrp.speculative(
                reader(), prompt, new, told["K"], tau, released=released, context=context
            )
        else:
            found, counts = plain_mrp.veto(reader(), prompt, new, told["tau"], told.get("delta"))
        assert_recorded("mrp_decode", name, found)
        assert counts.items() <= told.items()


@pytest.mark.slow
def test_replays_of_other_sizes(tmp_path):
    """`PARADEC_GOLDEN=DIR make test-golden FAMILY=block_diffusion` of a folder that the plain programs wrote."""
    made = subprocess.run(
        [sys.executable, str(TESTS / "other_block_diffusion.py"), str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode == 0, made.stdout + made.stderr
    replays = sorted((TESTS / "replays").glob("test_golden_block_diffusion*.py"))
    assert len(replays) == 5
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *map(str, replays)],
        cwd=TESTS.parent,
        env=os.environ | {"PARADEC_GOLDEN": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert " skipped" not in done.stdout
