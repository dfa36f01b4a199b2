"""The scripts of `experiments/` at toy size: what they write, and what must hold of it whatever the machine does."""

import dataclasses

import pytest
from experiment import options_of, read, script
from jax import numpy as jnp

from paradec_jax.data import build_tokenizer, token_spec
from paradec_jax.families import PRESETS
from paradec_jax.store import Model
from paradec_jax.testing import StubNetwork
from paradec_jax.timing.bench import Limits

STUB = StubNetwork(vocab_size=384, max_length=512, recurrence=4, needed=(3, 1, 2))


@pytest.fixture(scope="module")
def stub_model():
    """A model whose answers follow from its prompts, and whose stop token is one that it happens to write."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Model, "network", STUB)
        config = dataclasses.replace(PRESETS["test-recurrent"], vocab_size=384, max_length=512)
        spec = dataclasses.replace(token_spec(), stop=tuple(range(0, 384, 7)))
        yield Model(config, {}, spec, build_tokenizer())


@pytest.fixture(scope="module")
def refill(stub_model):
    found = script("systems/refill", load=lambda name: stub_model)
    found["main"].__globals__["CHOSEN"] = found["CHOSEN"][-1:]  # the wavefront
    return found


def test_refill_finds_every_answer_where_it_belongs(refill, tmp_path):
    options = options_of(refill, tmp_path, problems=7, rows=(1, 3), every=2, max_new_tokens=20)
    refill["main"](options)
    result, table = read(options.out)
    rows = result["rows"]
    assert result["options"]["problems"] == 7 and len(table) == len(rows) == 6
    assert options.figure.stat().st_size > 1000
    for row in rows:
        assert (row["lost"], row["doubled"], row["changed"]) == (0, 0, 0)
        assert 0 < row["occupancy"] <= 1 and row["tokens_per_second"] > 0 and len(row["passes"]) == 1
        assert row["rows"] > 1 or row["occupancy"] == 1
    for label in {row["label"] for row in rows}:
        mine = {(row["way"], row["rows"]): row for row in rows if row["label"] == label}
        assert set(mine) == {(way, size) for way in ("run", "fixed", "queue") for size in (1, 3)}
        assert len({row["tokens"] for row in mine.values()}) == 1
        assert mine["run", 1]["against_one_by_one"] == mine["fixed", 3]["against_fixed"] == 1
        assert mine["queue", 3]["against_run_interval"] == [0, None]  # a single pass
        assert mine["run", 3]["steps"] == mine["fixed", 3]["steps"] >= mine["queue", 3]["steps"]
        assert mine["run", 3]["occupancy"] == mine["fixed", 3]["occupancy"] < mine["queue", 3]["occupancy"]


def test_refill_reads_the_occupancy_that_serve_reports(refill, stub_model):
    decoder = refill["Static"]().bind(STUB, 40)
    request = refill["make_request"]([[1, 2], [3], [4, 5, 6], [7], [8]], max_new_tokens=[9, 2, 5, 7, 3])
    served = refill["serve"](decoder, {}, request, rows=2, every=3)
    found = refill["answers"]([refill["Part"](served.decoded, 5, served.steps)])
    way = refill["Way"]("queue", 2, lambda: [])
    row = refill["describe"](way, found, found, 1.0, [1.0])
    assert row["occupancy"] == pytest.approx(served.occupancy, abs=0.02)


def test_refill_counts_what_is_lost_doubled_or_changed(refill):
    answers, way = refill["Answers"], refill["Way"]("queue", 2, lambda: [])
    alone = answers([(1,), (2,), (3,)], [[5], [6], [7]], 6, 3)
    wrong = answers([(1,), (2,), (2,)], [[5], [9], [6]], 6, 3)
    row = refill["describe"](way, wrong, alone, 1.0, [1.0])
    assert (row["lost"], row["doubled"], row["changed"]) == (1, 1, 2)


def test_rates_of_refill_have_a_range_over_passes(refill):
    rows = [
        {"way": way, "rows": size, "tokens": 8, "passes": passes}
        for way, size, passes in (
            ("run", 1, [4.0, 5.0, 4.5]),
            ("run", 3, [2.0, 2.5, 2.0]),
            ("queue", 3, [1.0, 1.0, 2.0]),
        )
    ]
    refill["compare_rates"](rows)
    alone, _, queue = rows
    assert alone["against_one_by_one_interval"] == [1, 1] and queue["against_one_by_one"] == 4.5
    low, high = queue["against_run_interval"]
    assert queue["against_run"] == 2 and 1 <= low < 2 < high <= 2.5
    assert queue["against_fixed"] is None and queue["against_fixed_interval"] == [None, None]


@pytest.mark.slow
def test_refill_ends_in_an_error_when_an_answer_is_changed(refill, tmp_path, monkeypatch):
    honest = refill["main"].__globals__["by_serve"]

    def lossy(*arguments):
        (part,) = honest(*arguments)
        return [
            dataclasses.replace(
                part, decoded=dataclasses.replace(part.decoded, tokens=part.decoded.tokens[::-1])
            )
        ]

    monkeypatch.setitem(refill["main"].__globals__, "by_serve", lossy)
    options = options_of(refill, tmp_path, problems=3, rows=(2,), max_new_tokens=5)
    with pytest.raises(SystemExit, match="lost, doubled or changed"):
        refill["main"](options)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [({"rows": (0,)}, "at least 1"), ({"rows": (9,)}, "must not exceed"), ({"passes": 0}, "at least 1")],
)
def test_refill_refuses(refill, tmp_path, wrong, message):
    with pytest.raises(SystemExit, match=message):
        refill["main"](options_of(refill, tmp_path, problems=4, **wrong))


@pytest.fixture(scope="module")
def bench():
    return script("systems/bench", limits_of=lambda network, params: Limits(1e9, 1e9, 1e9, 1e9))


def test_bench_writes_a_row_for_every_point(bench, tmp_path):
    small = dataclasses.replace(PRESETS["test-recurrent"], max_length=8)
    options = options_of(
        bench,
        tmp_path,
        shapes=("large",),
        decoders=("clean",),
        contexts=(6, 9),
        widths=(3,),
        batches=(1,),
        context=6,
        width=3,
        tokens=7,
        large=small,
    )
    bench["main"](options)
    result, table = read(options.out)
    rows = result["rows"]
    assert len(rows) == len(table) == 2 + 1 + 1 and options.figure.stat().st_size > 1000
    assert {row["axis"] for row in rows} == {"context", "width", "batch"}
    for row in rows:
        assert row["tokens"] == 7 and row["peak_bytes"] > 0 and row["compile_seconds"] > 0
        assert row["limit_fraction"] == max(row["read_fraction"], row["flops_fraction"])
        # The prompt and its token, the steps in which the wave grows, and one for each of the other tokens.
        assert row["network_calls"] == 1 + 2 + 6
    shared = [row for row in rows if row["context"] == 6]
    assert len({row["microseconds_per_step"] for row in shared}) == 1  # measured once
    (turned,) = result["knobs"]
    assert turned["compiled"] == 0 and {"temperature", "exit_threshold"} <= set(turned["knobs"])


@pytest.mark.slow
def test_a_profile_has_every_operation_of_a_step(tmp_path):
    found = script("systems/step_profile")
    options = found["Options"](
        shape="test-recurrent", widths=(2,), context=4, tokens=6, passes=2, out=tmp_path / "rows.json"
    )
    found["main"](options)
    result, table = read(options.out)
    assert len(result["rows"]) == len(table)
    for name in ("static", "clean"):
        rows = [row for row in result["rows"] if row["decoder"] == name]
        assert sum(row["share"] for row in rows) == pytest.approx(1)
        (products,) = (row for row in rows if row["kind"] == "products")
        # A layer has four products of weights and two of attention, which a window does apart from the cache; then
        # there are the adapter and the head.
        config, recurrences = PRESETS["test-recurrent"], {"static": 2, "clean": 1}[name]
        a_layer = {"static": 6, "clean": 8}[name]
        layers = config.prelude_layers + config.coda_layers + recurrences * config.core_layers
        assert products["operations_per_step"] == a_layer * layers + recurrences + 1


def test_bench_turns_every_knob_to_another_value(bench):
    for decoder in bench["Static"], bench["ReleasedWavefront"], bench["Wavefront"]:
        for field in dataclasses.fields(decoder.Knobs):
            assert bench["TURNED"][field.name] != field.default


@pytest.mark.parametrize("name", ["static", "released", "clean"])
def test_bench_paces_every_decoder(bench, name):
    decoder, knobs = bench["paced"](name, 5, 2)
    request = bench["make_request"]([[1, 2, 3]], max_new_tokens=8)
    stub = StubNetwork(needed=(2,))
    decoded = bench["drive"].run(decoder.bind(stub, 11), {}, request, knobs)
    steps = {"static": 7, "released": 7 + 3, "clean": 7 + 4}[name]
    assert int(decoded.network_calls[0]) == 1 + steps
    assert int(jnp.sum(decoded.generated)) == 8


def test_bench_refuses(bench, tmp_path):
    for wrong, message in (
        ({"batches": (0,)}, "batches must be at least 1"),
        ({"tokens": 1}, "tokens must be at least 2"),
        ({"decoders": ("released",), "width": 3, "widths": (1, 2)}, "nothing to measure"),
        ({"shapes": ()}, "nothing to measure"),
    ):
        with pytest.raises(SystemExit, match=message):
            bench["main"](options_of(bench, tmp_path, **wrong))
