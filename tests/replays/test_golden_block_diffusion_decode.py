"""Recorded decodes of SDAR's programs: every step of every block, whole texts, calls; what top-k
and top-p leave.

Settings are read from `decode_cases.json`, sizes from the arrays.
"""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from marks import over, slow
from recorded import call, equal
from recorded_block_diffusion import (
    arrays,
    assert_close,
    cases,
    model,
    prompts,
    request_of,
    steps_in,
    traced,
)

from experiments.replicas import ReleasedDenoising
from paradec_jax import decode
from paradec_jax.decode.rules import score
from paradec_jax.decode.rules.sampling import filtered_probabilities, tempered

LOGITS, PROBABILITIES = 2e-4, 1e-4
RULES = {
    "sequential": "sequential",
    "low_confidence_static": "static",
    "low_confidence_dynamic": "dynamic",
    "entropy_bounded": "entropy",
}
# of Fast-dLLM: rule, and its number
FAST = {
    "fast_threshold": ("threshold", "tau"),
    "fast_factor": ("factor", "gamma"),
}
EVERY = cases("decode_cases")["cases"]
# of the programs
RECORDED = {name: entry for name, entry in EVERY.items() if entry["strategy"] in RULES}
STOPS = max(len(entry["stop_ids"] or ()) for entry in RECORDED.values())


@dataclasses.dataclass(frozen=True)
class Case:
    """A recorded decode.

    Attributes:
      name: in the files.
      rule, knobs: as our decoders know them.
      prompt: its tokens.
      stop: token ids that end it.
      new: tokens that were asked for.
      truncated: whether confidences are those after truncation.
      steps: denoising calls.
      calls: all calls, where they are told.
    """

    name: str
    rule: str
    knobs: dict[str, Any]
    prompt: np.ndarray
    stop: tuple[int, ...] = ()
    new: int = 0
    truncated: bool = False
    steps: int = 0
    calls: int | None = None

    def __getitem__(self, kind: str) -> np.ndarray:
        return arrays("decode")[f"{self.name}.{kind}"]

    @property
    def has(self) -> set[str]:
        return {
            name.partition(".")[2] for name in arrays("decode") if name.startswith(f"{self.name}.")
        }

    @property
    def whole(self) -> int:
        """Positions of the text up to the end of its last block that was recorded as tokens."""
        return len(self["tokens"])


def case_of(name: str) -> Case:
    entry = EVERY[name]
    prompt, new = prompts()[entry["prompt"]], entry["gen_length"]
    if name not in RECORDED:
        rule, number = FAST[entry["strategy"]]
        return Case(
            name, rule, {rule: entry[number]}, prompt, new=new, steps=entry["n_denoise_forwards"]
        )
    rule = RULES[entry["strategy"]]
    knobs = {"temperature": entry["temperature"], "top_k": 1}
    if rule == "entropy":
        knobs["entropy"] = entry["entropy_gamma"]
    else:
        knobs["steps"] = entry["denoising_steps"]
    if rule == "dynamic":
        knobs["threshold"] = entry["threshold"]
    return Case(
        name,
        rule,
        knobs,
        prompt,
        tuple(entry["stop_ids"] or ()),
        new,
        entry["confidence"] == "post-truncation",
        entry["n_denoise_forwards"],
        entry["n_forwards"],
    )


NAMES = list(EVERY)
CLEAN = [name for name in NAMES if not case_of(name).truncated]
SIZE = max(case_of(name).whole for name in NAMES)
STEPS = 3 * SIZE // 2


def everything(state, info):
    return state.rows.tokens, info


def asked(case: Case, new: int) -> decode.Request:
    stop = (*case.stop, *[-1] * (STOPS - len(case.stop)))
    return request_of(case.prompt, new, stop)


def replayed(decoder: Any, case: Case, new: int) -> tuple[Any, dict[str, np.ndarray]]:
    """A decode and its steps: all of one row that read a block with masks."""
    network, params, spec = model()
    decoder = decoder.bind(network, SIZE, spec)
    result, (tokens, info) = traced(
        decoder, params, asked(case, new), case.knobs, STEPS, everything
    )
    with jax.default_matmul_precision("highest"):
        logits = call(network, "logits", params, info.hidden[info.reads])
    temperature = case.knobs.get("temperature", 1.0)
    return result, steps_in(tokens, info) | {
        "pred": info.tokens[info.reads],
        "conf": info.scores[info.reads],
        "logits": np.asarray(logits),
        "entropy": np.asarray(score.entropy(tempered(logits, temperature))),
    }


def assert_steps(found: dict[str, np.ndarray], case: Case, count: int) -> None:
    """The first `count` recorded steps are those found."""
    assert all(len(value) == count for value in found.values())
    for name in case.has - {"tokens"}:
        want = case[name][:count]
        if name in ("conf", "entropy"):
            assert_close(found[name], want, PROBABILITIES)
        elif name == "logits":
            assert_close(found[name], want, LOGITS)
        else:
            equal(found[name], want, err_msg=name)


def until_stop(case: Case) -> int:
    """Positions up to the first generated stop token, or to the end of what was recorded."""
    hits = np.isin(case["tokens"], case.stop) & (np.arange(case.whole) >= len(case.prompt))
    return int(hits.argmax()) + 1 if hits.any() else case.whole


@over(CLEAN)
def test_steps(name):
    """Without fusions, a recorded step is a call; a row ends at its stop token, and where nothing
    follows a store.
    """
    case = case_of(name)
    decoder = decode.BlockDenoising(rule=case.rule, fuse_store=False, fuse_prompt=False)
    result, found = replayed(decoder, case, case.whole - len(case.prompt))
    end = until_stop(case)
    count = len(case["block"])
    if end < case.whole:
        count = len(found["block"])
        assert 0 < count <= len(case["block"]) and result.reasons[0] == decode.Reason.STOP
    assert_steps(found, case, count)
    assert int(result.lengths[0]) == end
    equal(result.tokens[0, :end], case["tokens"][:end])
    if end == case.whole:
        assert count == case.steps
        assert case.calls is None or int(result.network_calls[0]) == case.calls - 1


ONE_A_RULE = {case_of(name).rule: name for name in reversed(CLEAN)}.values()


@over([*ONE_A_RULE, *(slow(name) for name in CLEAN if name not in ONE_A_RULE)])
def test_fusions_repeat_the_texts(name):
    """Each recorded denoising call is one call here, and nothing else is."""
    case = case_of(name)
    network, params, spec = model()
    decoder = decode.BlockDenoising(network, SIZE, spec, rule=case.rule)
    with jax.default_matmul_precision("highest"):
        request = asked(case, case.whole - len(case.prompt))
        result = decode.run(decoder, params, request, decoder.Knobs(**case.knobs))
    end = until_stop(case)
    equal(result.tokens[0, :end], case["tokens"][:end])
    calls = int(result.network_calls[0])
    assert calls == len(case["block"]) if end == case.whole else calls <= len(case["block"])


@over(RECORDED)
def test_programs(name):
    """The late end, and for one case confidences after truncation: every step, every token, every
    call.
    """
    case = case_of(name)
    program = "generate" if case.truncated else "evaluation"
    result, found = replayed(ReleasedDenoising(program=program, rule=case.rule), case, case.new)
    assert_steps(found, case, len(case["block"]))
    assert (case.steps, case.calls) == (len(case["block"]), int(result.network_calls[0]))
    length = int(result.lengths[0])
    equal(result.tokens[0, :length], case["tokens"][:length])
    assert (case["tokens"][length:] == model()[2].mask).all() and length % model()[0].block == 0
    assert (length < case.whole) == (result.reasons[0] == decode.Reason.STOP)


def test_unequal_prompts_in_one_batch():
    """Rows in phases of their own: all recorded cases of one setting at once, with fusions."""
    same = [name for name in CLEAN if name in RECORDED and not case_of(name).stop]
    wanted = next(case_of(name) for name in same if case_of(name).rule == "dynamic")
    group = [
        case
        for case in map(case_of, same)
        if (case.rule, case.knobs) == (wanted.rule, wanted.knobs)
    ]
    assert len({len(case.prompt) for case in group}) > 2
    network, params, spec = model()
    decoder = decode.BlockDenoising(network, SIZE, spec, rule=wanted.rule)
    request = decode.make_request(
        [case.prompt.tolist() for case in group],
        max_new_tokens=[case.whole - len(case.prompt) for case in group],
    )
    with jax.default_matmul_precision("highest"):
        result = decode.run(decoder, params, request, decoder.Knobs(**wanted.knobs))
    for row, case in enumerate(group):
        equal(result.tokens[row, : case.whole], case["tokens"])
    assert result.network_calls.tolist() == [len(case["block"]) for case in group]


def filters() -> dict[str, decode.SamplingKnobs]:
    """Knobs of each recorded truncation, read from its name."""
    found = {}
    for name in arrays("decode"):
        if match := re.fullmatch(r"filter\.topk(\d+)", name):
            found[name] = decode.SamplingKnobs(temperature=1.0, top_k=int(match[1]))
        elif match := re.fullmatch(r"filter\.topp(\d+)", name):
            found[name] = decode.SamplingKnobs(temperature=1.0, top_p=int(match[1]) / 100)
        elif match := re.fullmatch(r"filter\.topk(\d+)_topp(\d+)_T(\d)(\d)_probs", name):
            k, p, whole, tenths = map(int, match.groups())
            found[name] = decode.SamplingKnobs(
                temperature=whole + tenths / 10, top_k=k, top_p=p / 100
            )
    return found


@over(filters())
def test_truncation(name):
    logits, want = jnp.asarray(arrays("decode")["filter.logits"]), arrays("decode")[name]
    probs = filtered_probabilities(logits, filters()[name], top_p_rule="keep-renormalised")
    if not name.endswith("_probs"):
        equal(probs > 0, np.isfinite(want))
        want = np.asarray(jax.nn.softmax(jnp.asarray(want), axis=-1))
    assert_close(probs, want, PROBABILITIES)


def test_every_array_is_read():
    """So that none of a folder is left out in silence."""
    kinds = ("tokens", "block", "step", "before", "pred", "conf", "reveal", "entropy", "logits")
    known = {f"{name}.{kind}" for name in NAMES for kind in kinds}
    known |= {f"prompt.{case['prompt']}" for case in EVERY.values()} | {"filter.logits", *filters()}
    assert arrays("decode").keys() <= known
    entry = cases("decode_cases")
    assert (entry["block_length"], entry["mask_token_id"]) == (model()[0].block, model()[2].mask)
