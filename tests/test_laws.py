"""The laws of decoders: drivers agree, equivalences, row independence, honest counts, one program, gradients.

`ROWS` is the table of decoders; every decoder that `paradec_jax.decode` offers has a row, and every law that can
be stated without knowing the decoder runs over all rows, on a stub network whose answers are known.
"""

import collections
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from plain_baselines import lookahead_count, prompt_lookup_count
from plain_jacobi import jacobi_count

from paradec_jax import decode
from paradec_jax.decode import drive, protocol
from paradec_jax.decode.randomness import Purpose, fold
from paradec_jax.decode.sampling import SamplingKnobs, filtered_probabilities, sample
from paradec_jax.testing import (
    PROMPTS,
    StubCausal,
    StubNetwork,
    tiny_causal,
    tiny_causal_params,
    tiny_network,
    tiny_params,
    tiny_request,
)

SIZE, BUDGET = 20, 9
STEPS = 16  # more than any row of the table needs for BUDGET tokens
Count = tuple[int, int, int]


@dataclasses.dataclass(frozen=True)
class Row:
    """A decoder of the table.

    Attributes:
      kind, options: the decoder's class and static fields.
      knobs: knobs that differ from the defaults.
      stub: fields of the stub network.
      net: the stub network's class.
      recurrence: recurrences each position does at its end (the most that matter), for the expected tokens.
      faithful: repeats a release that cuts no commit at a budget or a stop token, so those laws leave it out.
      count: (stub, prompt length, new tokens) -> network calls, positions, recurrences; None without a formula.
    """

    kind: type
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    knobs: dict[str, Any] = dataclasses.field(default_factory=dict)
    stub: dict[str, Any] = dataclasses.field(default_factory=dict)
    net: type = StubNetwork
    recurrence: int | None = 4
    faithful: bool = False
    count: Callable[[Any, int, int], Count] | None = None

    def network(self, **changes: Any) -> Any:
        return self.net(**{**self.stub, **changes})

    def decoder(self, network: Any = None, size: int = SIZE, **options: Any) -> Any:
        network = self.network() if network is None else network
        return self.kind(network, size, **{**self.options, **options})

    def values(self, **changes: Any) -> Any:
        return self.kind.Knobs(**{**self.knobs, **changes})


def static_count(stub: StubNetwork, prompt: int, new: int) -> Count:
    """One call a token, r recurrences each."""
    return new, prompt + new - 1, new * stub.recurrence


def latent_count(stub: StubNetwork, prompt: int, new: int) -> Count:
    """Each token leaves when its latent stands still, one recurrence after it arrived."""
    first = max(stub.needs(p) for p in range(prompt)) + 1
    later = sum(min(stub.needs(p) + 1, stub.recurrence) for p in range(prompt, prompt + new - 1))
    return new, prompt + new - 1, min(first, stub.recurrence) + later


def second_check_count(stub: StubNetwork, prompt: int, new: int) -> Count:
    """The entropy never changes, which the second check sees."""
    return new, prompt + new - 1, 2 * new


def speculative_count(draft: int, lookahead: int, stub: StubNetwork, prompt: int, new: int) -> Count:
    """A round commits the drafts before the first position that needs more than the draft's recurrences."""
    length, rounds = prompt + 1, 0
    while length < prompt + new:
        good = [stub.needs(length - 1 + i) <= draft for i in range(lookahead)]
        length += lookahead if all(good) else good.index(False) + 1
        rounds += 1
    one_round = lookahead * draft + stub.recurrence
    return 1 + rounds * (lookahead + 1), prompt + rounds * 2 * lookahead, stub.recurrence + rounds * one_round


def wavefront_count(inner: int, stub: StubNetwork, prompt: int, new: int) -> Count:
    """k steps until a position stands still, then a token a step, with k positions on the way."""
    k = math.ceil(stub.needed[0] / inner) + 1
    steps = k + new - 2 if new > 1 else 0
    positions = prompt + sum(min(t, k) for t in range(1, steps + 1))
    return 1 + steps, positions, stub.recurrence + steps * inner


def causal_row(kind: type, count: Callable[..., Count], stub: dict[str, Any], **options: Any) -> Row:
    """A row on the causal stub; the options tell the calls as well."""
    options = {**options, "log_probs": True}
    return Row(kind, options, stub=stub, net=StubCausal, count=functools.partial(count, options))


def jacobi_row(kind: type, *, spawn: float | None = None, **options: Any) -> Row:
    """A row of a Jacobi decoder on the causal stub; the knob tells the calls as well."""
    knobs = {} if spawn is None else {"spawn": spawn}
    row = causal_row(kind, jacobi_count, REPEATING, **options)
    count = functools.partial(jacobi_count, {**options, **knobs})
    return dataclasses.replace(row, knobs=knobs, count=count)


REPEATING = {"weights": (0, 0, 1, 0), "slope": 0, "constant": 0}  # the text has period 3
MIXED = {"needed": (3, 1, 2, 4, 1)}
ROWS = {
    "autoregressive": Row(decode.AutoRegressive, {"log_probs": True}, stub=MIXED, count=static_count),
    "autoregressive-hasty": Row(
        decode.AutoRegressive,
        {"recurrence": 2},
        stub={**MIXED, "recurrence": 2},
        recurrence=2,
        count=static_count,
    ),
    "autoregressive-continuous": Row(
        decode.AutoRegressive, {"continuous": True}, stub=MIXED, count=static_count
    ),
    "adaptive-latent": Row(decode.Adaptive, stub={**MIXED, "recurrence": 5}, count=latent_count),
    "adaptive-entropy": Row(
        decode.Adaptive, {"criterion": "entropy-diff"}, stub=MIXED, recurrence=2, count=second_check_count
    ),
    "adaptive-argmax": Row(
        decode.Adaptive,
        {"criterion": "argmax-stability", "log_probs": True},
        {"exit_threshold": 2.0},
        stub={**MIXED, "errs": False},
    ),
    "speculative": Row(
        decode.SelfSpeculative,
        {"draft_recurrence": 2, "lookahead": 3, "log_probs": True},
        stub=MIXED,
        count=functools.partial(speculative_count, 2, 3),
    ),
    "speculative-one": Row(
        decode.SelfSpeculative,
        {"draft_recurrence": 1, "lookahead": 1},
        stub=MIXED,
        count=functools.partial(speculative_count, 1, 1),
    ),
    "wavefront": Row(
        decode.Wavefront,
        {"width": 4, "inner_recurrence": 2, "log_probs": True},
        count=functools.partial(wavefront_count, 2),
    ),
    "wavefront-buckets": Row(
        decode.Wavefront,
        {"width": 6, "inner_recurrence": 2, "buckets": (1, 3)},
        count=functools.partial(wavefront_count, 2),
    ),
    "wavefront-bursts": Row(  # positions behind a slow one settle while they wait, and are committed together
        decode.Wavefront, {"width": 6, "inner_recurrence": 2}, stub={"needed": (5, 1, 1, 1), "errs": False}
    ),
    "wavefront-headway": Row(
        decode.Wavefront,
        {"width": 5, "inner_recurrence": 2, "headway": 2, "noise_mixer": "sqrt"},
        {"max_recurrence": 8, "noise": 0.1},
        recurrence=None,
    ),
    "wavefront-straight-through": Row(
        decode.SoftWavefront,
        {"width": 4, "inner_recurrence": 2, "log_probs": True},
        count=functools.partial(wavefront_count, 2),
    ),
    "official": Row(
        decode.OfficialWavefront,
        {"width": 5, "inner_recurrence": 2, "recurrence": 4},
        {"noise": 0.0},
        faithful=True,
    ),
    "official-fixed": Row(
        decode.OfficialWavefront,
        {"width": 10, "inner_recurrence": 2, "recurrence": 4, "headway": 2, "rule": "fixed"},
        recurrence=None,
        faithful=True,
    ),
    "prompt-lookup": causal_row(decode.PromptLookup, prompt_lookup_count, REPEATING, max_ngram=2, num_pred=3),
    "lookahead": causal_row(
        decode.Lookahead, lookahead_count, REPEATING, level=4, window=3, guesses=2, pool_from_prompt=True
    ),
    "jacobi": jacobi_row(decode.Jacobi, block=4),
    "jacobi-rows": jacobi_row(decode.Jacobi, block=4, rows=3),
    "jacobi-running-pool": jacobi_row(decode.Jacobi, block=5, running=True, pool=2),
    "jacobi-rejection": jacobi_row(decode.Jacobi, block=4, running=True, acceptance="rejection"),
    "multiblock": jacobi_row(decode.MultiBlock, block=3, blocks=2, pool=1, spawn=0.5),
    "multiblock-rows": jacobi_row(decode.MultiBlock, block=2, blocks=3, rows=2, spawn=0.0),
}
# Slow: another row of the same decoder takes the same way through its code.
VARIANTS = (
    "autoregressive-hasty",
    "adaptive-argmax",
    "speculative-one",
    "wavefront-headway",
    "official-fixed",
    "jacobi",
    "jacobi-rows",
    "jacobi-rejection",
    "jacobi-running-pool",
    "multiblock-rows",
)


def over(rows: dict[str, Any]) -> Any:
    """A test of each of these rows."""
    names = [pytest.param(name, marks=pytest.mark.slow) if name in VARIANTS else name for name in rows]
    return pytest.mark.parametrize("name", names)


EVERY = over(ROWS)
CUT = over({name: row for name, row in ROWS.items() if not row.faithful})
COUNTED = over({name: row for name, row in ROWS.items() if row.count})


def whole(state: Any) -> Any:
    """Records a state as it is."""
    return state


def listed(decoded: decode.Decoded) -> dict[str, Any]:
    """All fields of a result on the host."""
    fields = {f.name: getattr(decoded, f.name) for f in dataclasses.fields(decoded)}
    return {name: None if value is None else np.asarray(value).tolist() for name, value in fields.items()}


def rows_of(decoded: decode.Decoded, *rows: int, columns: int | None = None) -> dict[str, Any]:
    """Some rows of a result, cut to some columns."""
    taken = jax.tree.map(lambda x: x[jnp.array(rows)], decoded)
    if columns is not None:
        taken = jax.tree.map(lambda x: x[:, :columns] if x.ndim == 2 else x, taken)
    return listed(taken)


def take(request: decode.Request, *rows: int) -> decode.Request:
    return jax.tree.map(lambda x: x[jnp.array(rows)], request)


def test_every_decoder_has_a_row():
    offered = {value for name in decode.__all__ if hasattr(value := getattr(decode, name), "Knobs")}
    offered.discard(decode.Decoder)
    assert offered == {row.kind for row in ROWS.values()}


def test_stub_is_a_recurrent_network():
    for kind in (protocol.Network, protocol.RecurrentNetwork):
        for name in vars(kind):
            assert name.startswith("_") or hasattr(StubNetwork(), name), name
    assert StubNetwork() == StubNetwork() and hash(StubNetwork()) == hash(StubNetwork())


def test_stub_is_a_causal_network():
    for kind in (protocol.Network, protocol.CandidateNetwork):
        for name in vars(kind):
            assert name.startswith("_") or hasattr(StubCausal(), name), name
    assert StubCausal() == StubCausal() and hash(StubCausal()) == hash(StubCausal())


def test_the_causal_stub_notices_what_a_position_sees():
    """Right tokens through window or cache; another token where a position is missing, seen twice or misplaced."""
    stub = StubCausal(weights=(0, 0, 1, 0), slope=0, constant=0)
    tokens, positions = jnp.array([[4, 7, 9, 4, 7, 9]]), jnp.arange(6)[None]

    def last(positions=positions[:, 3:], visible=3, cached=3, **options):
        cache = stub.write(stub.init_cache(1, 8), stub.pick(whole.kv, jnp.array([0]), cached), jnp.array([0]))
        out = stub.forward(None, tokens[:, 3:], positions, cache, jnp.array([visible]), **options)
        return int(stub.logits(None, out.hidden)[0, -1].argmax())

    whole = stub.forward(None, tokens, positions)
    assert stub.logits(None, whole.hidden)[0, 2:].argmax(-1).tolist() == [4, 7, 9, 4]
    assert stub.expected([4, 7, 9], 4) == [4, 7, 9, 4] and last() == 4
    for wrong in (
        {"visible": 2},
        {"visible": 4, "cached": 4},
        {"positions": jnp.array([[3, 4, 6]])},
        {"window_mask": jnp.tril(jnp.ones((3, 3), bool)).at[2, 1].set(False)},
    ):
        assert last(**wrong) != 4


# 1. Drivers agree


@EVERY
def test_drivers_agree(name):
    row = ROWS[name]
    decoder, knobs, request = (
        row.decoder(),
        row.values(temperature=3.0),
        tiny_request((BUDGET, 2, 5), stop=(0,)),
    )
    result = listed(decode.run(decoder, None, request, knobs))
    traced, states = decode.trace(decoder, None, request, knobs, n=STEPS, record=whole)
    assert listed(traced) == result
    rollout = jax.jit(lambda r, k: decode.rollout(decoder, None, r, k, n=STEPS, segment=4, record=whole))
    rolled, rolled_states = rollout(request, knobs)
    assert listed(rolled) == result
    jax.tree.map(
        np.testing.assert_array_equal, strip_keys(states.progress), strip_keys(rolled_states.progress)
    )
    streamed = [
        listed(decoder.finish(state)) for state in decode.stream(decoder, None, request, knobs, every=2)
    ]
    assert streamed[-1] == result
    lengths = np.array([state["lengths"] for state in streamed])
    assert (np.diff(lengths, axis=0) >= 0).all()
    assert (np.array(result["reasons"]) > 0).all()


@EVERY
def test_greedy_programs_are_those_of_temperature_0(name):
    row = ROWS[name]
    request = tiny_request((BUDGET, 2, 5), stop=(0,))
    result = listed(decode.run(row.decoder(), None, request, row.values()))
    assert listed(decode.run(row.decoder(greedy=True), None, request, row.values())) == result
    with pytest.raises(ValueError, match=r"is greedy, so temperature must be 0, not 3\.0"):
        decode.run(row.decoder(greedy=True), None, request, row.values(temperature=3.0))


# 3. Row independence, and rows that are finished


@EVERY
def test_rows_are_independent(name):
    row = ROWS[name]
    knobs = row.values(temperature=3.0)
    request = tiny_request((BUDGET, 2, 6), stop=(0,))
    together = decode.run(row.decoder(), None, request, knobs)
    longer = dataclasses.replace(request, tokens=jnp.pad(request.tokens, [(0, 0), (0, 3)], constant_values=9))
    longer = decode.run(row.decoder(size=SIZE + 7), None, longer, knobs)
    assert rows_of(longer, 0, 1, 2, columns=together.tokens.shape[1]) == listed(together)
    swapped = decode.run(row.decoder(), None, take(request, 2, 0, 1), knobs)
    assert rows_of(swapped, 1, 2, 0) == listed(together)
    alone = row.decoder()
    for i in range(len(PROMPTS)):
        assert listed(decode.run(alone, None, take(request, i), knobs)) == rows_of(together, i)


@EVERY
def test_finished_rows_do_not_move(name):
    row = ROWS[name]
    decoder, request = row.decoder(), tiny_request((BUDGET, 1, 4))
    _, states = decode.trace(decoder, None, request, row.values(), n=STEPS, record=whole)
    states = jax.tree.map(np.asarray, dataclasses.replace(states, progress=strip_keys(states.progress)))
    done = states.progress.reason > 0
    assert (np.diff(done.astype(int), axis=0) >= 0).all() and done[-1].all() and not done[0].all()
    for i in range(len(PROMPTS)):
        since = int(np.argmax(done[:, i]))
        length = states.progress.length[since, i]
        progress = jax.tree.map(lambda x, since=since, i=i: x[since:, i], states.progress)
        for field in ("length", "reason", "network_calls", "positions", "recurrences"):
            values = getattr(progress, field)
            assert (values == values[0]).all(), field
        assert (progress.tokens[:, :length] == progress.tokens[0, :length]).all()
        # Trusted entries are those before the newest token.
        trusted = jax.tree.map(lambda x, since=since, i=i, n=length: x[since:, i, : n - 1], states.cache)
        jax.tree.map(lambda x: np.testing.assert_array_equal(x, np.broadcast_to(x[:1], x.shape)), trusted)


def strip_keys(progress: Any) -> Any:
    return dataclasses.replace(progress, keys=None)


# 4. Honest counts and known answers


@EVERY
def test_tokens_are_the_known_ones(name):
    row = ROWS[name]
    if row.recurrence is None:
        pytest.skip("positions of this row end at a number of recurrences that varies")
    result = decode.run(row.decoder(), None, tiny_request(BUDGET), row.values())
    stub = row.network()
    recurrence = row.recurrence if name != "adaptive-latent" else 1_000
    completions = result.completions()
    if row.faithful:
        assert all(len(tokens) >= BUDGET for tokens in completions)
        completions = [tokens[:BUDGET] for tokens in completions]
    assert completions == [stub.expected(prompt, BUDGET, recurrence) for prompt in PROMPTS]


@COUNTED
def test_counts_are_the_known_ones(name):
    row = ROWS[name]
    result = decode.run(row.decoder(), None, tiny_request((BUDGET, 1, 6)), row.values())
    stub = row.network()
    expected = [row.count(stub, len(p), n) for p, n in zip(PROMPTS, (BUDGET, 1, 6), strict=True)]
    assert list(zip(*(listed(result)[f] for f in ("network_calls", "positions", "recurrences")))) == expected  # noqa: B905


@EVERY
def test_counts_are_what_really_ran(name):
    row = ROWS[name]
    ran: collections.Counter = collections.Counter()

    def probe(part: str) -> None:
        ran[part] += 1

    request = take(tiny_request(BUDGET), 1)
    result = decode.run(row.decoder(row.network(probe=probe)), None, request, row.values())
    jax.effects_barrier()
    assert (ran["embed"], ran["iterate"]) == (int(result.network_calls[0]), int(result.recurrences[0]))


# Stops and budgets


@CUT
def test_stops_and_budgets_of_each_row(name):
    row = ROWS[name]
    decoder, knobs = row.decoder(), row.values()
    free = decode.run(decoder, None, tiny_request(BUDGET), knobs).completions()
    budgets, stops = (3, BUDGET, 5), (free[0][-1], free[1][4], -1)
    request = dataclasses.replace(
        tiny_request(budgets), stop=jnp.array([[token, -1] for token in stops], jnp.int32)
    )
    result = decode.run(decoder, None, request, knobs)
    for tokens, got, budget, stop, reason in zip(
        free, result.completions(), budgets, stops, result.reasons, strict=True
    ):
        end = tokens.index(stop) + 1 if stop in tokens else BUDGET
        assert got == tokens[: min(budget, end)]
        assert reason == (decode.Reason.STOP if end <= budget else decode.Reason.BUDGET)
    tokens = np.asarray(result.tokens)
    for i, end in enumerate(np.asarray(result.lengths)):
        assert (tokens[i, end:] == decoder.pad).all()


LEAPING = ("speculative", "wavefront-bursts", "prompt-lookup", "lookahead", "jacobi", "multiblock")


@pytest.mark.parametrize("name", LEAPING)
def test_a_commit_is_cut_in_its_middle(name):
    """A stop token, or the end of the budget, inside several tokens that one step commits."""
    row = ROWS[name]
    stub = row.network(**{"errs": False} if row.net is StubNetwork else {})
    decoder, prompt = row.decoder(stub), take(tiny_request(BUDGET), 0)
    _, lengths = decode.trace(decoder, None, prompt, row.values(), n=STEPS, record=length_of)
    lengths = [len(PROMPTS[0]) + 1, *np.asarray(lengths)[:, 0].tolist()]
    leap = next(i for i in range(STEPS) if lengths[i + 1] - lengths[i] >= 3)
    inside = lengths[leap] + 1 - len(PROMPTS[0])  # index of the second token of that commit
    want = stub.expected(PROMPTS[0], BUDGET)
    short = decode.run(decoder, None, take(tiny_request(inside + 1), 0), row.values())
    assert short.completions() == [want[: inside + 1]] and short.reasons[0] == decode.Reason.BUDGET
    stopped = decode.run(decoder, None, take(tiny_request(BUDGET, stop=(want[inside],)), 0), row.values())
    assert stopped.completions() == [want[: want.index(want[inside]) + 1]]
    assert stopped.reasons[0] == decode.Reason.STOP


def length_of(state: Any) -> Any:
    """Records committed lengths."""
    return state.progress.length


@CUT
def test_max_steps_and_a_full_buffer(name):
    row = ROWS[name]
    decoder, knobs, request = row.decoder(), row.values(), tiny_request(BUDGET)
    free = decode.run(decoder, None, request, knobs)
    for steps in (0, 1, 3):
        cut = decode.run(decoder, None, request, knobs, max_steps=steps)
        for some, every in zip(cut.completions(), free.completions(), strict=True):
            assert some == every[: len(some)] and len(some) >= 1
        if steps == 0:
            assert cut.network_calls.tolist() == [1] * len(PROMPTS)
            assert (cut.reasons == decode.Reason.RUNNING).all()
    full = decode.run(decoder, None, tiny_request(1_000), knobs)
    assert full.lengths.tolist() == [SIZE] * len(PROMPTS)
    assert (full.reasons == decode.Reason.BUDGET).all()


@EVERY
def test_the_caller_may_interrupt(name):
    row = ROWS[name]
    decoder = row.decoder()

    def interrupt(state: Any) -> np.ndarray:
        return np.asarray(state.progress.length - state.progress.prompt_lengths >= 4) & [True, False, False]

    *_, last = decode.stream(decoder, None, tiny_request(BUDGET), row.values(), interrupt=interrupt)
    result = decoder.finish(last)
    assert result.reasons.tolist() == [decode.Reason.CALLER] + [decode.Reason.BUDGET] * 2
    assert 4 <= result.generated[0] < BUDGET and (result.generated[1:] >= BUDGET).all()


# 5. Compile once


@EVERY
def test_knobs_and_equal_decoders_share_a_program(name):
    row = ROWS[name]
    request = tiny_request(BUDGET)
    decode.run(row.decoder(), None, request, row.values())
    compiled = drive._run._cache_size()
    defaults = {f.name: getattr(row.values(), f.name) for f in dataclasses.fields(row.kind.Knobs)}
    for field, default in defaults.items():
        changed = default + 1 if isinstance(default, int) else 0.5
        for value in (changed, np.asarray(changed), jnp.asarray(changed)):
            decode.run(row.decoder(row.network()), None, request, row.values(**{field: value}))
    for seed in range(5):
        again = dataclasses.replace(row.decoder(dataclasses.replace(row.network())))
        decode.run(again, None, tiny_request((3, 4, 5), seed=seed, stop=(seed,)), row.values())
        decode.run(again, None, request, row.values(), max_steps=seed)
    assert drive._run._cache_size() == compiled


@EVERY
def test_knobs_can_be_mapped(name):
    row = ROWS[name]
    decoder, request = row.decoder(), tiny_request(BUDGET)
    temperatures = jnp.array([0.0, 0.5, 2.0])
    mapped = jax.vmap(lambda t: decode.run(decoder, None, request, row.values(temperature=t)))(temperatures)
    for i, temperature in enumerate(temperatures):
        single = decode.run(decoder, None, request, row.values(temperature=temperature))
        assert listed(jax.tree.map(lambda x, i=i: x[i], mapped)) == listed(single)


# Errors come before compilation


@EVERY
def test_what_cannot_work_is_refused_at_once(name):
    row = ROWS[name]
    request, knobs = tiny_request(BUDGET), row.values()
    drivers = {
        "run": decode.run,
        "trace": functools.partial(decode.trace, n=2),
        "rollout": functools.partial(decode.rollout, n=2),
        "stream": lambda *given: next(decode.stream(*given)),
    }
    compiled = [f._cache_size() for f in (drive._run, drive._trace, drive._init, drive._steps)]
    for drive_it in drivers.values():
        with pytest.raises(ValueError, match=r"bind\(network, size\)"):
            drive_it(row.kind(**row.options), None, request, knobs)
        with pytest.raises(ValueError, match="prompt of 5 tokens"):
            drive_it(row.decoder(size=5), None, request, knobs)
        with pytest.raises(ValueError, match=r"65 .* 64 positions"):
            drive_it(row.decoder(size=65), None, request, knobs)
        for field, value in {"temperature": -1.0, "top_p": 0.0, "top_k": -1, "min_p": 2.0}.items():
            with pytest.raises(ValueError, match=field):
                drive_it(row.decoder(), None, request, row.values(**{field: value}))
    assert compiled == [f._cache_size() for f in (drive._run, drive._trace, drive._init, drive._steps)]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: decode.Adaptive(criterion="mood"), "criterion must be one of"),
        (lambda: decode.SelfSpeculative(lookahead=0), "lookahead"),
        (lambda: decode.SelfSpeculative(draft_recurrence=0), "draft_recurrence"),
        (lambda: decode.SelfSpeculative(continuous=True, lookahead=2), "continuous"),
        (lambda: decode.PromptLookup(max_ngram=0), "max_ngram must be at least 1, not 0"),
        (lambda: decode.PromptLookup(num_pred=0), "num_pred must be at least 1, not 0"),
        (lambda: decode.PromptLookup(dummy=-1), "dummy must be a token id or None, not -1"),
        (lambda: decode.Lookahead(level=2), "level must be at least 3, not 2"),
        (lambda: decode.Lookahead(window=0), "window must be at least 1, not 0"),
        (lambda: decode.Lookahead(guesses=0), "guesses must be at least 1, not 0"),
        (lambda: decode.Lookahead(official=True), "official .* needs pool_from_prompt"),
        (
            lambda: decode.Lookahead(StubNetwork(), SIZE).init(
                None, tiny_request(2), decode.Lookahead.Knobs()
            ),
            "not StubNetwork",
        ),
        (
            lambda: decode.run(
                ROWS["lookahead"].decoder(),
                None,
                tiny_request(2, recorded=decode.Recorded(window=jnp.zeros(3, int))),
            ),
            r"recorded.window must have shape \(4,\), not \(3,\)",
        ),
        (lambda: decode.Jacobi(block=1), "block must be at least 2, not 1"),
        (lambda: decode.Jacobi(pool=-1), "pool and rows must not be negative, not -1, 0"),
        (lambda: decode.Jacobi(rows=-2), "pool and rows must not be negative, not 0, -2"),
        (lambda: decode.Jacobi(pool=2, rows=1), "a pool needs rows of at least 2"),
        (
            lambda: decode.Jacobi(acceptance="hope"),
            "acceptance must be one of coupled, rejection, not 'hope'",
        ),
        (lambda: decode.Jacobi(pool=2, acceptance="rejection"), "rejection' verifies one row, .* not 2, 0"),
        (
            lambda: decode.MultiBlock(rows=2, acceptance="rejection"),
            "rejection' verifies one row, .* not 0, 2",
        ),
        (
            lambda: decode.run(
                ROWS["jacobi-rejection"].decoder(),
                None,
                tiny_request(2, recorded=decode.Recorded(uniforms=jnp.zeros(9))),
            ),
            "recorded.uniforms .* acceptance 'rejection'",
        ),
        (lambda: decode.MultiBlock(block=1), "block must be at least 2, not 1"),
        (lambda: decode.MultiBlock(blocks=0), "blocks must be at least 1, not 0"),
        (lambda: decode.MultiBlock(running=True), "a running window has no blocks"),
        (lambda: unusual(decode.MultiBlock, {"spawn": 1.5}), "spawn must be between 0 and 1, not 1.5"),
        (lambda: unusual(decode.MultiBlock, {"spawn": -0.1}), "spawn must be between 0 and 1, not -0.1"),
        (lambda: unusual(decode.Jacobi, rows=12), "must not exceed the 11 tokens of the vocabulary, not 12"),
        (
            lambda: unusual(decode.Jacobi, network=tiny_network("full"), pool=1),
            "Jacobi with 2 rows needs a network with candidates .*, not RecurrentDepthNetwork",
        ),
        (lambda: decode.Wavefront(inner_recurrence=0), "inner_recurrence"),
        (lambda: decode.Wavefront(width=0), "width"),
        (lambda: decode.Wavefront(headway=0), "headway"),
        (lambda: decode.Wavefront(noise_mixer="shaken"), "noise_mixer"),
        (lambda: decode.Wavefront(width=4, buckets=(4,)), "buckets"),
        (lambda: decode.Wavefront(width=4, buckets=(3, 2)), "buckets"),
        (lambda: decode.OfficialWavefront(rule="mood"), "rule must be one of latent-diff"),
        (lambda: decode.OfficialWavefront(width=2, headway=3), "headway 3 must not exceed the width 2"),
        (lambda: decode.OfficialWavefront(noise_mixer="shaken"), "noise_mixer"),
        (lambda: decode.make_request([[1], []], max_new_tokens=1), "lengths"),
        (lambda: decode.make_request([], max_new_tokens=1), "at least one row"),
        (lambda: decode.make_request([[1]], max_new_tokens=0), "max_new_tokens"),
        (lambda: decode.make_request([[1, 2]], [3], max_new_tokens=1), "lengths"),
        (
            lambda: decode.rollout(ROWS["wavefront"].decoder(), None, tiny_request(2), n=4, segment=3),
            "segment",
        ),
    ],
)
def test_bad_input_is_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def unusual(kind: type, knobs: dict[str, Any] | None = None, *, network: Any = None, **options: Any) -> Any:
    """A run that must be refused."""
    decoder, knobs = kind(network or StubCausal(), SIZE, **options), kind.Knobs(**(knobs or {}))
    return decode.run(decoder, tiny_params() if network else None, tiny_request(2), knobs)


# 2. Equivalences, on a small model of random weights


def tiny(kind: type, cache: str, **options: Any) -> Any:
    return kind(tiny_network(cache), SIZE, **options)


@functools.cache
def static(cache: str, temperature: float = 0.0) -> decode.Decoded:
    """Static decoding of the small model."""
    decoder = tiny(decode.AutoRegressive, cache, log_probs=True)
    knobs = decoder.Knobs(temperature=temperature)
    return decode.run(decoder, tiny_params(), tiny_request(BUDGET), knobs)


@functools.cache
def whole_sequence() -> Callable[..., Any]:
    """Logits [B, S, V] of whole sequences, without a cache."""
    decoder = tiny(decode.AutoRegressive, "full")
    network = decoder.network

    @jax.jit
    def logits(params, tokens, keys):
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        state = network.initial_state(fold(keys, Purpose.STATE, positions), 1.0)
        out = network.forward(params, tokens, positions, None, None, state)
        return network.logits(params, out.hidden)

    return logits


def test_cached_is_uncached():
    request, result = tiny_request(BUDGET), static("full")
    tokens = np.zeros((len(PROMPTS), SIZE), np.int32)
    tokens[:, : request.tokens.shape[1]] = request.tokens
    lengths = np.array([len(p) for p in PROMPTS])
    for _ in range(BUDGET):
        logits = np.asarray(whole_sequence()(tiny_params(), jnp.asarray(tokens), request.keys))
        for i, length in enumerate(lengths):
            tokens[i, length] = logits[i, length - 1].argmax()
        lengths += 1
    assert result.completions() == [
        row[len(p) : n].tolist() for row, p, n in zip(tokens, PROMPTS, lengths, strict=True)
    ]


def test_log_probabilities_are_those_of_a_forward_pass():
    result = static("full")
    keys = tiny_request(BUDGET).keys
    logits = whole_sequence()(tiny_params(), result.tokens, keys)
    scores = jax.nn.log_softmax(logits[:, :-1])
    scores = np.asarray(jnp.take_along_axis(scores, result.tokens[:, 1:, None], axis=-1)[..., 0])
    for i in range(len(PROMPTS)):
        start, end = int(result.prompt_lengths[i]), int(result.lengths[i])
        np.testing.assert_allclose(result.log_probs[i, start:end], scores[i, start - 1 : end - 1], atol=2e-5)
        assert not np.any(result.log_probs[i, :start]) and not np.any(result.log_probs[i, end:])


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (decode.SelfSpeculative, {"draft_recurrence": 2, "lookahead": 3}),
        pytest.param(decode.Jacobi, {"block": 3}, marks=pytest.mark.slow),
    ],
)
def test_drafts_of_a_recurrent_network_are_static_decoding(kind, options):
    decoder = tiny(kind, "full", **options)
    result = decode.run(decoder, tiny_params(), tiny_request(BUDGET), decoder.Knobs())
    assert result.completions() == static("full").completions()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_of_the_verifier_itself_are_static_decoding(temperature):
    """With drafts as deep as the verification and draws that belong to positions, sampling agrees too."""
    stub = StubNetwork(needed=(3, 1), sharpness=2.0)
    one = decode.AutoRegressive(stub, SIZE)
    other = decode.SelfSpeculative(stub, SIZE, draft_recurrence=stub.recurrence, lookahead=3)
    request = tiny_request(BUDGET, seed=1)
    static = decode.run(one, None, request, one.Knobs(temperature=temperature))
    drafted = decode.run(other, None, request, other.Knobs(temperature=temperature))
    assert drafted.completions() == static.completions()
    if temperature:
        assert static.completions() != [stub.expected(prompt, BUDGET) for prompt in PROMPTS]


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_a_wavefront_of_one_position_is_adaptive_decoding(temperature):
    wave = tiny(decode.Wavefront, "shared", width=1, inner_recurrence=2, prefill_recurrence=8)
    knobs = {"temperature": temperature, "exit_threshold": 0.4}
    waved = decode.run(
        wave,
        tiny_params(),
        tiny_request(BUDGET),
        wave.Knobs(momentum=0.0, max_recurrence=8, **knobs),
    )
    adaptive = tiny(decode.Adaptive, "shared", max_recurrence=8, exit_in_prefill=False)
    adapted = decode.run(
        adaptive,
        tiny_params(),
        tiny_request(BUDGET),
        adaptive.Knobs(min_recurrence=1, check_every=2, **knobs),
    )
    assert waved.completions() == adapted.completions()
    assert waved.recurrences.tolist() == adapted.recurrences.tolist()
    spread = np.asarray(adapted.recurrences - 8) / (BUDGET - 1)
    assert (spread > 2).all() and (spread < 8).all(), f"the threshold decides nothing: {spread}"


def test_a_wavefront_of_one_position_without_exit_is_static_decoding():
    wave = tiny(decode.Wavefront, "shared", width=1, inner_recurrence=2)
    knobs = wave.Knobs(momentum=0.0, exit_threshold=0.0, max_recurrence=4)
    waved = decode.run(wave, tiny_params(), tiny_request(BUDGET), knobs)
    assert waved.completions() == static("shared").completions()
    assert waved.recurrences.tolist() == static("shared").recurrences.tolist()


WIDE = {"width": 4, "inner_recurrence": 2, "headway": 2, "noise_mixer": "sqrt"}
REAL = {
    "autoregressive": (decode.AutoRegressive, "shared", {"continuous": True}, {}),
    "adaptive": (decode.Adaptive, "latest", {"criterion": "kl"}, {"exit_threshold": 0.02}),
    "speculative": (decode.SelfSpeculative, "full", {"draft_recurrence": 2, "lookahead": 3}, {}),
    "wavefront": (decode.Wavefront, "shared", WIDE, {"noise": 0.2, "max_recurrence": 6}),
}


@pytest.mark.parametrize("name", REAL)
def test_rows_of_a_model_are_independent(name):
    kind, cache, options, knobs = REAL[name]
    request = tiny_request((BUDGET, 3, 6))
    knobs = kind.Knobs(temperature=1.0, **knobs)
    together = decode.run(tiny(kind, cache, **options), tiny_params(), request, knobs)
    row, padded = 2, take(request, 2)
    padded = dataclasses.replace(padded, tokens=jnp.pad(padded.tokens, [(0, 0), (0, 2)], constant_values=7))
    alone = decode.run(kind(tiny_network(cache), SIZE + 4, **options), tiny_params(), padded, knobs)
    assert rows_of(alone, 0, columns=SIZE) == rows_of(together, row)


CAUSAL = {
    "prompt-lookup": (decode.PromptLookup, {"max_ngram": 2, "num_pred": 3}),
    "lookahead": (
        decode.Lookahead,
        {"level": 4, "window": 4, "guesses": 3, "pool_from_prompt": True},
    ),
    "jacobi": (decode.Jacobi, {"block": 4, "running": True, "rows": 2}),
    "multiblock": (decode.MultiBlock, {"block": 3, "blocks": 2, "pool": 2}),
}


def causal(kind: type, size: int = SIZE, **options: Any) -> Any:
    return kind(tiny_causal(), size, log_probs=True, **options)


@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.slow), 1.0])
@over(CAUSAL)
def test_drafts_of_any_origin_are_static_decoding(name, temperature):
    """On a stub whose drafts are often right, each position with its own draw, and on a model, whose are not."""
    kind, options = CAUSAL[name]
    stub, size, knobs = StubCausal(**REPEATING, sharpness=4.0), 45, kind.Knobs(temperature=temperature)
    request = tiny_request(40, seed=1)
    static = decode.run(decode.AutoRegressive(stub, size), None, request, knobs).completions()
    drafted = decode.run(kind(stub, size, **options), None, request, knobs)
    assert drafted.completions() == static
    assert (drafted.network_calls < 36).all(), drafted.network_calls
    right = [stub.expected(prompt, len(tokens)) for prompt, tokens in zip(PROMPTS, static, strict=True)]
    assert (static == right) == (temperature == 0)

    request = tiny_request((BUDGET, 4, 7), stop=(2,))
    static = decode.run(causal(decode.AutoRegressive), tiny_causal_params(), request, knobs)
    drafted = decode.run(causal(kind, **options), tiny_causal_params(), request, knobs)
    assert drafted.completions() == static.completions()
    assert drafted.reasons.tolist() == static.reasons.tolist()
    np.testing.assert_allclose(drafted.log_probs, static.log_probs, atol=2e-5)
    assert (drafted.network_calls <= static.network_calls).all()
    if temperature and not issubclass(kind, decode.Jacobi):  # whose guesses know the draws of their positions
        assert (drafted.network_calls >= 0.8 * static.network_calls).all()


@pytest.mark.parametrize("name", ["lookahead", pytest.param("multiblock", marks=pytest.mark.slow)])
def test_rows_of_a_causal_model_are_independent(name):
    kind, options = CAUSAL[name]
    request, knobs = tiny_request((BUDGET, 4, 7), stop=(2,)), kind.Knobs(temperature=1.0)
    together = rows_of(decode.run(causal(kind, **options), tiny_causal_params(), request, knobs), 2)
    padded = take(request, 2)
    padded = dataclasses.replace(padded, tokens=jnp.pad(padded.tokens, [(0, 0), (0, 2)], constant_values=7))
    decoder = causal(kind, SIZE + 4, **options)
    alone = rows_of(decode.run(decoder, tiny_causal_params(), padded, knobs), 0, columns=SIZE)
    np.testing.assert_allclose(alone.pop("log_probs"), together.pop("log_probs"), atol=2e-5)
    assert alone == together


def test_buckets_change_nothing():
    kind, cache, options, knobs = REAL["wavefront"]
    request, knobs = tiny_request((BUDGET, 3, 6)), kind.Knobs(temperature=1.0, **knobs)
    plain = decode.run(tiny(kind, cache, **options), tiny_params(), request, knobs)
    bucketed = decode.run(tiny(kind, cache, buckets=(2, 3), **options), tiny_params(), request, knobs)
    assert listed(bucketed) == listed(plain)


# 6. Gradients (more of them, in float64, in test_gradients.py)


def latents_of(state: Any) -> Any:
    """Records what the soft path carries, and the tokens that it must not change."""
    if hasattr(state, "latents"):
        return state.latents, state.candidates
    return state.latent, state.progress.tokens


def soft(
    decoder: Any, names: tuple[str, ...], steps: int, segment: int, **fixed: Any
) -> Callable[[Any], Any]:
    """A scalar of all latents on the way, and the tokens, as a function of some knobs."""

    def value(at: jax.Array) -> Any:
        knobs = decoder.Knobs(**fixed, **{name: at[i] for i, name in enumerate(names)})
        _, (latents, tokens) = decode.rollout(
            decoder, tiny_params(), tiny_request(BUDGET), knobs, n=steps, segment=segment, record=latents_of
        )
        weights = jnp.sin(jnp.arange(latents.size, dtype=jnp.float32)).reshape(latents.shape)
        return jnp.sum(weights * latents), tokens

    return value


SOFT = {
    "wavefront": (
        (decode.Wavefront, {"width": 3, "inner_recurrence": 2}),
        ("momentum", "noise", "init_scale", "exit_threshold"),
        (0.2, 0.3, 0.8, 1e-3),
    ),
    "continuous": ((decode.AutoRegressive, {"continuous": True}), ("init_scale",), (0.8,)),
}


@pytest.mark.parametrize("name", SOFT)
def test_gradients_are_finite_differences(name):
    (kind, options), names, at = SOFT[name]
    decoder, at = tiny(kind, "shared", **options), np.array(at, np.float32)
    graded = jax.jit(jax.value_and_grad(soft(decoder, names, 4, 2), has_aux=True))
    (_, tokens), gradient = graded(at)
    plain = jax.jit(soft(decoder, names, 4, 2))
    for i, knob in enumerate(names):
        if knob == "exit_threshold":
            assert gradient[i] == 0
            continue
        h = 0.01 * np.eye(len(names), dtype=np.float32)[i]
        (high, tokens_high), (low, tokens_low) = plain(at + h), plain(at - h)
        for other in (tokens_high, tokens_low):
            np.testing.assert_array_equal(other, tokens)
        difference = (float(high) - float(low)) / 0.02
        assert abs(gradient[i]) > 1e-2
        assert gradient[i] == pytest.approx(difference, rel=1e-2, abs=2e-3), knob


# 10. Random weights accept no drafts; sampling


def test_random_weights_accept_few_drafts():
    decoder = tiny(decode.SelfSpeculative, "full", draft_recurrence=2, lookahead=3)
    rounds = (int(decode.run(decoder, tiny_params(), tiny_request(BUDGET)).network_calls.max()) - 1) / 4
    assert rounds > 0.8 * (BUDGET - 1), f"{rounds} rounds"


def test_draws_follow_the_filtered_distribution():
    draws, vocab = 4_000, 12
    logits = jnp.asarray(np.random.default_rng(0).normal(size=vocab) * 2, jnp.float32)
    knobs = SamplingKnobs(temperature=jnp.float32(0.8), top_k=jnp.int32(8), top_p=jnp.float32(0.9))
    keys = jax.random.split(jax.random.key(3), 4)
    positions = jnp.broadcast_to(jnp.arange(draws // 4), (4, draws // 4))
    drawn = jax.jit(sample)(jnp.broadcast_to(logits, (*positions.shape, vocab)), positions, keys, knobs)
    counts = np.bincount(np.asarray(drawn).ravel(), minlength=vocab)
    expected = draws * np.asarray(filtered_probabilities(logits, knobs), np.float64)
    assert (counts[expected == 0] == 0).all()
    kept = expected > 0
    chi_squared = np.sum((counts[kept] - expected[kept]) ** 2 / expected[kept])
    assert chi_squared < kept.sum() + 5 * math.sqrt(2 * kept.sum())


def test_draws_belong_to_position_and_purpose():
    logits = jnp.zeros((1, 6, 50))
    key, knobs = jax.random.split(jax.random.key(0), 1), SamplingKnobs(temperature=jnp.float32(1.0))
    positions = jnp.arange(6)[None]
    whole = sample(logits, positions, key, knobs)
    np.testing.assert_array_equal(sample(logits[:, 2:5], positions[:, 2:5], key, knobs), whole[:, 2:5])
    assert (sample(logits, positions, key, knobs, purpose=Purpose.DRAFT) != whole).any()
    assert len(set(whole[0].tolist())) > 1
