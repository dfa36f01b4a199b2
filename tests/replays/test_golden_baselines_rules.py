"""Rules of `decode.rules` on recorded confidences of LLaDA, Fast-dLLM and Dream: who is revealed in
each call.

Every trace of the folder is replayed, with the settings that its traces.json names. A setting that
no replay reads is an error.
"""

import json
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from marks import over
from recorded import GOLDEN, arrays_in, equal, near

from experiments.replicas.masked_rules import time_grid
from paradec_jax.decode.machine.knobs import SamplingKnobs
from paradec_jax.decode.rules import reveal, score, select
from paradec_jax.decode.rules.sampling import filtered_probabilities

FOLDER = GOLDEN / "baselines"
# of the tiny models, unless config.json says otherwise
MASKS = {
    "llada": 99,
    "fast_dllm/llada": 99,
    "dream": 107,
}


def stored(part: str) -> list:
    path = FOLDER / part / "traces.json"
    names = json.loads(path.read_text()) if path.is_file() else {}
    return [(part, name) for name in names if (FOLDER / part / f"trace_{name}.npz").is_file()]


# of the recording, not of a run
TOLD = {
    "prompt_seed",
    "margins",
    "unique_token_ratio",
    "nfe_first_release",
}
# What decides logits and confidences: the arrays hold both as the program had them.
NETWORK = {"cache", "cfg_scale", "logits_eos_inf"}


class Settings(dict):
    """The settings of a trace; `read` holds those that were asked for."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.read: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.read.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.read |= {name} & self.keys()
        return super().get(name, default)

    def all_read(self) -> None:
        assert self.keys() - TOLD - NETWORK == self.read, (
            "settings that no replay reads, or that are not there"
        )


def read(part: str, name: str) -> tuple[Settings, dict, int]:
    settings = Settings(json.loads((FOLDER / part / "traces.json").read_text())[name])
    config = FOLDER / part / "config.json"
    mask = json.loads(config.read_text())["mask_token_id"] if config.is_file() else MASKS[part]
    return settings, arrays_in(FOLDER / part / f"trace_{name}.npz"), mask


def check(arrays: dict, mask: int, rule) -> None:
    """`rule(call, scores, open, tokens)` reveals what was revealed in every recorded call."""
    tokens, conf = arrays["tokens"], arrays["conf"]
    assert len(conf) > 4
    for call in range(len(conf)):
        masked = tokens[call] == mask
        want = masked & (tokens[call + 1] != mask)
        scores = jnp.asarray(np.where(masked, conf[call], 0.0), jnp.float32)
        got = rule(call, scores, masked, tokens[call])
        equal(got, want, err_msg=f"call {call}")


def blocks_of(settings: dict, arrays: dict, mask: int) -> tuple[int, list[int], list[int]]:
    """Block length, the block of each call, and the call's number in its block."""
    length, prompt = settings["block_length"], arrays["prompt"].shape[-1]
    if "block_index" in arrays:
        block = arrays["block_index"].tolist()
    else:
        per_block = settings["steps"] // (settings["gen_length"] // length)
        block = [call // per_block for call in range(len(arrays["conf"]))]
    first = {b: block.index(b) for b in block}
    return prompt, block, [call - first[b] for call, b in enumerate(block)]


def check_shapes(settings: Settings, arrays: dict, mask: int, new: str) -> None:
    """Rows, prompt, canvas, calls and what they reveal are those of the settings."""
    rows, prompt = arrays["prompt"].shape
    if "batch" in settings:  # Fast-dLLM's traces have one row without padding
        real = arrays.get("attention_mask", np.ones((rows, prompt)))
        assert (rows, prompt - real[0].sum()) == (settings["batch"], settings["left_pad_row0"])
    assert (prompt, arrays["tokens"].shape[-1]) == (
        settings["prompt_length"],
        prompt + settings[new],
    )
    assert len(arrays["conf"]) == settings["forwards" if "forwards" in settings else "nfe"]
    each = settings.get("revealed_per_step") or settings.get("revealed_per_forward")
    revealed = ((arrays["tokens"][:-1] == mask) & (arrays["tokens"][1:] != mask)).sum(axis=(1, 2))
    assert each is None or revealed.tolist() == each


def check_confidences(arrays: dict, mask: int, rule: Callable[..., Any]) -> None:
    """`rule(logits)` is what was recorded, in the calls that kept the network's scores."""
    for call, logits in zip(arrays["logits_steps"], arrays["logits"], strict=True):
        start, length = int(arrays["fwd_start"][call]), int(arrays["fwd_len"][call])
        masked = arrays["tokens"][call][:, start : start + length] == mask
        found = rule(jnp.asarray(logits[:, :length]))
        want = arrays["conf"][call][:, start : start + length]
        near(np.asarray(found)[masked], want[masked], rtol=1e-4, atol=5e-4)


@over(stored("llada") + stored("fast_dllm/llada"), argument="part, name")
def test_calls_reveal_what_llada_and_fast_dllm_reveal(part, name):
    settings, arrays, mask = read(part, name)
    check_shapes(settings, arrays, mask, "gen_length")
    drawn = settings.get("temperature", 0) != 0, settings.get("remasking") == "random"
    if drawn[1]:
        arrays["conf"] = arrays["random_confidence"]
    if not settings.get("confidence_eos_eot_inf") and not any(drawn):
        check_confidences(arrays, mask, score.probability)
    length = settings["block_length"]
    prompt, block, number = blocks_of(settings, arrays, mask)
    per_block = settings["steps"] // (settings["gen_length"] // length)
    threshold, factor = (settings.get(key) for key in ("threshold", "factor"))

    def rule(call, scores, masked, tokens):
        end = prompt + (block[call] + 1) * length
        open_ = jnp.asarray(masked & (np.arange(masked.shape[1]) < end))
        if threshold is not None:
            return reveal.threshold(scores, open_, threshold)
        if factor is not None:
            chosen = reveal.factor(scores, open_, factor)
            # As released, a run that stops at the last open position takes it along.
            one_left = (open_ & ~chosen).sum(axis=1, keepdims=True) == 1
            return chosen | (open_ & one_left)
        first = arrays["tokens"][block.index(block[call])]
        count = (first[:, end - length : end] == mask).sum(axis=1)
        return select.top(scores, open_, reveal.share(jnp.asarray(count), per_block, number[call]))

    check(arrays, mask, rule)
    settings.all_read()


def negative_entropy(logits):
    return -score.entropy(logits)


SCORES = {
    "maskgit_plus": score.probability,
    "origin": score.probability,
    "topk_margin": score.margin,
    "entropy": negative_entropy,
}


@over(stored("dream"), argument="part, name")
def test_calls_reveal_what_dream_reveals(part, name):
    """Who is revealed where no draw decides it; in every trace the times, the numbers and the
    confidences.
    """
    settings, arrays, mask = read(part, name)
    check_shapes(settings, arrays, mask, "max_new_tokens")
    calls, eps = settings["steps"], settings["eps"]
    near(arrays["timesteps"], np.linspace(1, eps, calls + 1), atol=1e-6)
    chosen = {key: settings[key] for key in ("top_k", "top_p") if settings[key] is not None}
    knobs = SamplingKnobs(settings["temperature"], **chosen)

    def confidence(logits):
        if chosen:
            logits = jnp.log(filtered_probabilities(logits, knobs, top_p_rule="keep"))
        return SCORES[settings["alg"]](logits)

    check_confidences(arrays, mask, confidence)

    def rule(call, scores, masked, tokens):
        # one number for all rows of a batch
        count = jnp.full(len(masked), masked.sum() // len(masked))
        return select.top(scores, jnp.asarray(masked), time_grid(count, call, calls, eps))

    if settings["alg_temp"] is None and settings["alg"] != "origin":
        check(arrays, mask, rule)
    settings.all_read()


@pytest.mark.skipif(
    not (FOLDER / "dream" / "sampler_units.npz").is_file(), reason="no sampler units there"
)
def test_scores_are_those_of_dreams_sampler():
    units = arrays_in(FOLDER / "dream" / "sampler_units.npz")
    logits = jnp.asarray(units["logits"])

    def filtered(temperature=0.0, **knobs):
        knobs = SamplingKnobs(temperature, **knobs)
        return jnp.log(filtered_probabilities(logits, knobs, top_p_rule="keep"))

    cases = {
        "plain": (score.probability, logits),
        "margin": (score.margin, logits),
        "negent": (negative_entropy, logits),
        "topp0p8": (score.probability, filtered(top_p=0.8)),
        "topk5": (score.probability, filtered(top_k=5)),
        "topp0p7_topk4_negent": (negative_entropy, filtered(top_p=0.7, top_k=4)),
    }
    for name, (rule, shaped) in cases.items():
        atol = 5e-4 if name.endswith("negent") else 1e-4
        near(rule(shaped), units[f"conf_{name}"], atol=atol, err_msg=name)
        equal(shaped.argmax(axis=-1), units[f"x0_{name}"], err_msg=name)
    equal(score.probability(logits, jnp.asarray(units["x0_plain"])), score.probability(logits))
    kept = {"topp0p8": filtered(top_p=0.8), "topk5": filtered(top_k=5)}
    kept["temp0p5_topp0p8"] = filtered(0.5, top_p=0.8)
    for name, shaped in kept.items():
        equal(jnp.isfinite(shaped), units[f"filtered_{name}"] > -1e38, err_msg=name)
