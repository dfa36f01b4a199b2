"""Recorded decoding of the original Jacobi Forcing programs, replayed network call by network call.

Models, settings and prompts come from the names of files and arrays. Runs of equal static settings
share a program, those of several models too.
"""

import dataclasses
import re
from collections.abc import Iterator
from functools import cache, cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import over
from recorded import equal
from recorded_jacobi import FOLDER, MODELS, folder_of
from recorded_jacobi import arrays_if_any as arrays

from experiments import replicas
from experiments.replicas.trajectories import trajectories
from paradec_jax import decode, store
from paradec_jax.config import TokenSpec
from paradec_jax.convert.engine import read_json
from paradec_jax.decode.rules.sampling import filtered_probabilities
from paradec_jax.models import TransformerNetwork

KINDS = ("jacobi_decode", "trajectories", "multiblock_main", "multiblock_promote", "running_window")


# What was recorded


@cache
def fields_of(model: str) -> dict[str, Any]:
    return read_json(folder_of(model) / "config.json")


@cache
def loaded(model: str) -> tuple[TransformerNetwork, Any]:
    """Network and parameters; a tied output matrix is written out beforehand, so that models share
    programs.
    """
    read = store.load(folder_of(model))
    params = dict(read.params)
    if read.config.tie_embeddings:
        params["head"] = params["embedding"].T
    network = TransformerNetwork(dataclasses.replace(read.config, tie_embeddings=False))
    return network, network.prepare(params)


@dataclasses.dataclass(frozen=True)
class Case:
    """All prompts of a tag."""

    model: str
    kind: str
    tag: str

    @cached_property
    def prompts(self) -> list[int]:
        names = [str(name).split("/p") for name in arrays(self.model, self.kind)["names"]]
        return [int(prompt) for tag, prompt in names if tag == self.tag]

    def of(self, name: str) -> list[np.ndarray]:
        """An array of each prompt."""
        stored = arrays(self.model, self.kind)
        return [stored[f"{self.tag}/p{prompt}/{name}"] for prompt in self.prompts]

    @property
    def settings(self) -> dict[str, float]:
        """Numbers of the tag by their letters; N or L is the width of a draft."""
        return {
            key: float(value) for key, value in re.findall(r"_?([a-zA-Z]+)(\d[\d.]*)", self.tag)
        }

    @property
    def block(self) -> int:
        return int(self.settings.get("n") or self.settings["L"])

    @property
    def stop(self) -> int:
        return fields_of(self.model)["eos_token_id"]


def recorded_cases() -> list[Case]:
    found = []
    for kind in KINDS:
        for model in MODELS:
            tags = [str(name).split("/p")[0] for name in arrays(model, kind).get("names", ())]
            found += [Case(model, kind, tag) for tag in dict.fromkeys(tags)]
    return found


CASES = recorded_cases()


def alike(case: Case) -> tuple[Any, ...]:
    """What cases must have in common to share a program."""
    variant = case.tag.split("_")[0] if case.kind.startswith("multiblock") else case.kind
    return variant, case.block, case.settings.get("pool", 0)


def group_of(case: Case) -> list[Case]:
    return [other for other in CASES if alike(other) == alike(case)]


def parameters(*kinds: str) -> list:
    """Cases of some kinds as parameters, those that share a program next to each other."""
    listed = sorted(
        (case for case in CASES if case.kind in kinds), key=lambda case: str(alike(case))
    )
    return [pytest.param(case, id=f"{case.model}-{case.tag}") for case in listed]


def test_folder_holds_recorded_runs():
    assert MODELS, f"{FOLDER} has no *_greedy.npz with prompts"
    assert {case.kind for case in CASES} == set(KINDS)


# Replaying it


def padded(values: list[np.ndarray], *shape: int) -> np.ndarray:
    """Arrays of unequal shape in one, padded with -1."""
    result = np.full((len(values), *shape), -1, np.int32)
    for place, value in zip(result, values, strict=True):
        place[tuple(map(slice, value.shape))] = value
    return result


def iterations(case: Case) -> list[int]:
    """Network calls of each prompt."""
    if case.kind == "trajectories":
        return [int(forwards.sum()) for forwards in case.of("num_forwards")]
    return [len(fed) for fed in case.of("it_draft" if case.kind == "running_window" else "it_call")]


def ended(case: Case) -> list[bool]:
    """Which prompts ended with a stop token."""
    return [case.stop in output for output in case.of("output")]


def most_iterations(case: Case) -> int:
    """The bound on a call's network calls: what a call took that ended amid a block without a stop
    token.
    """
    cut = set()
    for other in CASES:
        if (other.model, other.kind) == (case.model, case.kind):
            for calls in zip(
                *map(other.of, ("call_iters", "call_out_len", "call_out")), strict=True
            ):
                for taken, length, out in zip(*calls, strict=True):
                    if length % other.block and other.stop not in out:
                        cut.add(int(taken))
    assert len(cut) <= 1
    return cut.pop() if cut else 128


def pseudo_blocks(case: Case) -> int:
    """Most pseudo blocks that a network call was fed, and one more where a call's last one spawned
    another.
    """
    most = 0
    for fed, taken, spawned in zip(
        *map(case.of, ("it_len", "call_iters", "spawn_iter")), strict=True
    ):
        late = np.isin(np.cumsum(taken) - 1, spawned).any()
        most = max(most, int(fed.max()) // case.block + int(late) if len(spawned) else 0)
    return most


def decoder_of(case: Case):
    """The decoder, with room for every case that shares its program."""
    group = group_of(case)
    longest = max(len(output) for other in group for output in other.of("output"))
    options = {"block": case.block, "spec": TokenSpec(pad=fields_of(case.model)["pad_token_id"])}
    network, size = loaded(case.model)[0], widest_prompt() + longest + 2 * case.block
    if case.kind == "running_window":
        return replicas.ReleasedRunningWindow(network, size, **options)
    if not case.kind.startswith("multiblock"):
        return replicas.ReleasedJacobi(
            network, size, complete_blocks=case.kind == "trajectories", **options
        )
    return replicas.ReleasedMultiBlock(
        network,
        size,
        variant=alike(case)[0],
        pool=int(case.settings.get("pool", 0)),
        in_flight=1 + max(map(pseudo_blocks, group)),
        **options,
    )


@cache
def widest_prompt() -> int:
    return max(int(arrays(model, "greedy")["prompt_len"].max()) for model in MODELS)


def request_of(case: Case) -> decode.Request:
    """All prompts of a case and its recorded drafts, in the shapes of all cases that share its
    program.
    """
    group, n = group_of(case), case.block
    rows = max(len(other.prompts) for other in group)

    def filled(values):
        """As many as there are rows; those that are missing repeat the last one."""
        return [*values, *values[-1:] * (rows - len(values))]

    def stacked(name: str, *shape: int):
        return jnp.asarray(padded(filled(case.of(name)), *shape))

    greedy = arrays(case.model, "greedy")
    prompts = [greedy["prompts"][i][: greedy["prompt_len"][i]] for i in filled(case.prompts)]
    tokens = np.maximum(padded(prompts, widest_prompt()), 0)
    recorded = {}
    if case.kind == "running_window":
        steps = max(max(iterations(other)) for other in group)
        recorded["windows"] = stacked("it_draft", steps, n)
    else:
        name = "init_draft" if case.kind == "trajectories" else "call_draft"
        calls = max(len(draft) for other in group for draft in other.of(name))
        recorded["drafts"] = stacked(name, calls, n)
    if case.kind != "trajectories":
        recorded["prefill_drafts"] = stacked("prefill_draft", n)
        if "drafts" in recorded:  # the first comes from the prefill
            recorded["drafts"] = recorded["drafts"].at[:, 0].set(-1)
    lengths = [len(prompt) for prompt in prompts]
    return decode.make_request(
        tokens,
        lengths,
        max_new_tokens=filled(budgets_of(case)),
        stop=(case.stop,),
        recorded=replicas.RecordedBlocks(**recorded),
    )


def budgets_of(case: Case) -> list[int]:
    """New tokens of each prompt. Trajectories end with the block that goes beyond the budget."""
    outputs = case.of("output")
    own = [len(output) - (case.kind == "trajectories") for output in outputs]
    far = 10 * max(map(len, outputs))
    return [far if stopped else budget for stopped, budget in zip(ended(case), own, strict=True)]


def knobs_of(case: Case, decoder):
    if not case.kind.startswith("multiblock"):
        return decoder.Knobs()
    settings = case.settings
    return decoder.Knobs(
        blocks=int(settings["K"]), spawn_ratio=settings["r"], max_iterations=most_iterations(case)
    )


@cache
def replayed(case: Case) -> tuple[decode.Decoded, Any]:
    """The result and the info of every network call."""
    decoder, request = decoder_of(case), request_of(case)
    knobs, params = knobs_of(case, decoder), loaded(case.model)[1]
    if case.kind == "trajectories":
        steps = max(max(iterations(other)) for other in group_of(case))
        result, infos = decode.trace(decoder, params, request, knobs, n=steps + 1)
        return result, jax.tree.map(np.asarray, infos)
    infos = []
    for state, info in decode.stream(decoder, params, request, knobs):
        infos += [] if info is None else [jax.tree.map(np.asarray, info)]
        result = decoder.finish(state)
    return result, jax.tree.map(lambda *steps: np.stack(steps), *infos)


class Run:
    """Recorded and replayed arrays of a prompt."""

    def __init__(self, case: Case, row: int):
        result, infos = replayed(case)
        self.case, self.row = case, row
        self.running = infos.running[:, row]
        fields = {
            field.name: getattr(infos, field.name)[:, row] for field in dataclasses.fields(infos)
        }
        self.got = {name: value[self.running] for name, value in fields.items()}
        self.output = result.completions()[row]
        self.reason = decode.Reason(int(result.reasons[row]))
        self.network_calls = int(result.network_calls[row])

    def want(self, name: str) -> np.ndarray:
        return self.case.of(name)[self.row]

    def exactly(self, where=slice(None), **values):
        for name, value in values.items():
            got, want = np.asarray(value), self.want(name)
            assert np.array_equal(got[where], want[where]), (
                f"{name}: {got.tolist()} for {want.tolist()}"
            )

    def ends_alike(self):
        assert self.output == self.want("output").tolist()
        stopped = self.want("output")[-1] == self.case.stop
        assert self.reason == (decode.Reason.STOP if stopped else decode.Reason.BUDGET)
        assert self.network_calls == 1 + iterations(self.case)[self.row]
        stored = f"{self.case.tag}/p{self.case.prompts[self.row]}/stop"
        if stored in arrays(self.case.model, self.case.kind):
            assert str(self.want("stop")) == {"STOP": "eos", "BUDGET": "max_new"}[self.reason.name]


def runs(case: Case) -> Iterator[Run]:
    for row in range(len(case.prompts)):
        yield Run(case, row)


def check_calls(run: Run, tokens: list[np.ndarray], predicted: list[np.ndarray]):
    """What all block decoders record, given what each network call was fed and predicted, [rows,
    length].
    """
    got, draft = run.got, run.want("call_draft")

    def alike_to(name: str, values: list[np.ndarray]) -> np.ndarray:
        return padded(values, *run.want(name).shape[1:])

    # A call that begins with a stop token reads a cache that the program has cut wrongly.
    sound = draft[run.want("it_call"), 0] != run.case.stop
    run.exactly(
        it_call=got["block_call"], it_accept=got["committed"], it_rows=[len(t) for t in tokens]
    )
    run.exactly(it_len=[t.shape[1] for t in tokens], it_tokens=alike_to("it_tokens", tokens))
    run.exactly(sound, it_past=got["cached"], it_argmax=alike_to("it_argmax", predicted))
    calls = [np.flatnonzero(got["block_call"] == call) for call in range(len(draft))]
    ends = np.cumsum([got["committed"][at].sum() for at in calls])
    outs = np.split(np.array(run.output), ends[:-1])
    run.exactly(
        call_iters=[len(at) for at in calls],
        call_draft=[tokens[at[0]][0, : run.case.block] for at in calls],
        call_out=alike_to("call_out", outs),
        call_out_len=[len(out) for out in outs],
    )
    known = np.array([got["known"][at[-1]] for at in calls])
    within = [run.case.stop in out for out in outs]
    run.exactly(call_next=np.where(within, run.case.stop, known))
    run.ends_alike()


@over(parameters("jacobi_decode"), argument="case")
def test_blocks(case):
    for run in runs(case):
        start = run.got["start"]
        fed = [x[None, at:] for x, at in zip(run.got["before"], start, strict=True)]
        check_calls(
            run, fed, [x[None, at:] for x, at in zip(run.got["predicted"], start, strict=True)]
        )
        run.exactly(prefill_argmax=run.got["before"][0], spawn_iter=[], promote_iter=[])


@over(parameters("multiblock_main", "multiblock_promote"), argument="case")
def test_multi_block(case):
    for run in runs(case):
        got = run.got
        cut = [
            (slice(count), slice(width))
            for count, width in zip(got["count"], got["width"], strict=True)
        ]
        tokens, predicted = (
            [x[at] for x, at in zip(got[name], cut, strict=True)]
            for name in ("tokens", "predicted")
        )
        check_calls(run, tokens, predicted)
        promoted = np.flatnonzero(got["promoted"] >= 0)
        run.exactly(prefill_argmax=tokens[0][0], spawn_iter=np.flatnonzero(got["spawned"]))
        run.exactly(promote_iter=promoted, promote_block=got["promoted"][promoted])


@over(parameters("running_window"), argument="case")
def test_running_window(case):
    for run in runs(case):
        got = run.got
        run.exactly(it_draft=got["window"], it_seqlen=got["length"], it_argmax=got["predicted"])
        run.ends_alike()


@over(parameters("trajectories"), argument="case")
def test_trajectories(case):
    result, infos = replayed(case)
    for row, blocks in enumerate(trajectories(infos)[: len(case.prompts)]):
        want = {
            name: case.of(name)[row]
            for name in ("points", "point_block", "num_forwards", "kv_start")
        }
        equal(np.concatenate([block.points for block in blocks]), want["points"])
        counts = [len(block.points) for block in blocks]
        assert np.repeat(np.arange(len(blocks)), counts).tolist() == want["point_block"].tolist()
        assert [block.network_calls for block in blocks] == want["num_forwards"].tolist()
        assert [block.start for block in blocks] == want["kv_start"].tolist()
        chain = [int(blocks[0].points[0, 0]), *(block.known for block in blocks)]
        assert chain == case.of("first_tokens")[row].tolist()
        assert result.completions()[row] == case.of("output")[row].tolist()


@over(parameters("trajectories")[:1], argument="case")
def test_aliased_trajectories_lose_their_draft(case):
    _, infos = replayed(case)
    for true, stored in zip(trajectories(infos), trajectories(infos, aliased=True), strict=True):
        for one, other in zip(true, stored, strict=True):
            equal(other.points[0], one.points[-1])
            equal(other.points[1:], one.points[1:])
            assert (one.points[0] != one.points[-1]).any()


# The verifier that samples


def probability_names() -> list:
    return [
        (m, name)
        for m in MODELS
        for name in arrays(m, "running_window")
        if name.startswith("probs/set")
    ]


@over(probability_names(), argument="model, name")
def test_target_probabilities(model, name):
    stored = arrays(model, "running_window")
    temperature, top_k, top_p = re.fullmatch(
        r"probs/set\d+_T([\d.]+)_k(\w+)_p([\w.]+)", name
    ).groups()
    knobs = decode.SamplingKnobs(
        temperature=float(temperature),
        top_k=None if top_k == "None" else int(top_k),
        top_p=1.0 if top_p == "None" else float(top_p),
    )
    probs = filtered_probabilities(
        jnp.asarray(stored["probs/logits"]), knobs, top_p_rule="drop-renormalised"
    )
    assert np.abs(np.asarray(probs) - stored[name]).max() <= 1e-6
