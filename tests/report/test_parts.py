"""The parts at toy size: what they find, whatever the machine does."""

import dataclasses
import functools
import os
import statistics
import time
import types

import pytest
from toy_report import SIZES

from paradec_jax.decode import AutoRegressive, Jacobi
from paradec_jax.decode.machine.setting import Setting
from paradec_jax.families import FAMILIES
from paradec_jax.nn.backend import SWITCH
from paradec_jax.report import PARTS, Task, calls, compare, compiling, judging, layouts, pointers, timing
from paradec_jax.report import claims as claimed
from paradec_jax.report.claims import CLAIMS
from paradec_jax.report.judging import Figure
from paradec_jax.report.write import markdown

LOOKED_UP = "/jax/compilation_cache/compile_requests_use_cache"


def measured(name, seconds=600.0, sizes=SIZES):
    """The result of a part, and its task; its tables can be written."""
    task = Task(sizes, time.monotonic() + seconds)
    result = PARTS[name].measure(task)
    for table in PARTS[name].tables(result):
        assert all(len(row) == len(table.columns) for row in table.rows)
        assert len(markdown(table)) >= 4
    return result, task


def drawn(name, result):
    """Whether the part draws something of a result."""
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure = PARTS[name].picture(plt, result)
    if figure is not None:
        figure.canvas.draw()
        plt.close(figure)
    return figure is not None


def test_autoregressive_is_told_as_a_share_of_the_limits():
    result, task = measured("autoregressive")
    (row,) = result["rows"]
    a_step = statistics.median(row["a_step"])
    assert row["shape"] == "test-causal" and row["tokens"] == SIZES.tokens and len(row["a_step"]) == 2
    assert row["read_fraction"] == pytest.approx(row["step_bytes"] / 1e10 / a_step)
    assert row["limit_fraction"] < 0.5 and sum(cost["share"] for cost in row["costs"]) == pytest.approx(1)
    assert task.dtypes == {"float32"} and not task.cut


@pytest.mark.parametrize(
    "name", ["autoregressive", "wave", "calls", "layouts", "training", "compile", "compare"]
)
def test_without_time_nothing_is_measured_and_every_item_is_named(name):
    result, task = measured(name, seconds=-1.0)
    assert not result["rows"] and task.late
    items = {
        "wave": ["test-recurrent"],
        "compare": ["tiny-recurrent-distilled, batch 1", "tiny-jacobi, batch 2"],
        "compile": ["compiling jacobi"],
    }
    for item in items.get(name, ["test-causal"]):
        assert any(item in one.what and "no time" in one.why for one in task.cut)
    assert name != "compile" or {one.of for one in task.cut} == {"test-causal"}
    assert PARTS[name].picture is None or not drawn(name, result)


def test_without_memory_a_line_says_so(monkeypatch):
    monkeypatch.setattr("paradec_jax.facts.memory_left", lambda: 10)
    for name in ("calls", "training", "device"):
        result, task = measured(name)
        assert not result["rows"] and not task.late
        assert all("does not fit" in one.why for one in task.cut) and task.cut


@pytest.mark.slow
def test_waves_stand_beside_static_and_jacobi_decoding():
    result, _ = measured("wave")
    names = [row["name"] for row in result["rows"]]
    assert names == ["static, r = 2", "wave, r' = 1", "Jacobi, r = 2"]
    static, wave, jacobi = result["rows"]
    assert static["speedup"] == 1 and static["needed"] == 1
    assert wave["speedup"] == pytest.approx(
        statistics.median(static["a_token"]) / statistics.median(wave["a_token"])
    )
    assert jacobi["needed"] == pytest.approx(
        statistics.median(jacobi["a_step"]) / statistics.median(static["a_token"])
    )
    assert drawn("wave", result)


def test_a_call_is_timed_over_every_window():
    result, _ = measured("calls")
    one, two = result["rows"]
    assert (one["window"], two["window"]) == (1, 2) and one["needed"] == 1
    ratio = statistics.median(two["a_call"]) / statistics.median(one["a_call"])
    assert two["needed"] == pytest.approx(ratio)
    assert drawn("calls", result)


def test_a_slow_first_run_leaves_no_window_out():
    """What the next wider window takes is foretold from a second run."""

    class Slow(calls.Loop):
        runs = 0

        def __call__(self):
            self.runs += 1
            time.sleep(0.2 if self.runs == 1 else 0.001)

        def foretold(self):
            return 0.0

    task = Task(SIZES, time.monotonic() + 5)
    network = types.SimpleNamespace(counters=())
    found = calls.warmed([Slow(network, None, window, 8, 4) for window in (64, 1)], task, "made")
    assert [loop.window for loop in found.values()] == [1, 64] and not task.cut
    assert all(0 < loop.first < 0.1 for loop in found.values())


def test_slow_calls_are_timed_in_short_loops(monkeypatch):
    sizes = dataclasses.replace(SIZES, steps=32)
    for seconds, steps in ((0.001, 32), (0.1, 3), (10.0, 2)):
        monkeypatch.setattr(calls, "foretold", lambda *of, seconds=seconds: seconds)
        assert calls.steps_of(None, 1, sizes) == steps


def test_both_sides_of_every_choice_are_timed(monkeypatch):
    monkeypatch.setattr(layouts, "WINDOWS", (1,))
    monkeypatch.delenv(SWITCH, raising=False)
    result, _ = measured("layouts")
    sides = {(row["choice"], row["side"]) for row in result["rows"]}
    assert sides == {
        ("products", "layouts plain"),
        ("products", "layouts cpu"),
        ("keys", "columns"),
        ("keys", "rows"),
        ("attention", "einsum"),
        ("attention", "xla"),
    }
    assert SWITCH not in os.environ


def test_a_side_whose_first_is_missing_is_compared_with_no_other(monkeypatch):
    attention = layouts.attention

    def refusing(config, window, context, steps, side):
        if side == "columns":
            raise ValueError("no such shape")
        return attention(config, window, context, steps, side)

    monkeypatch.setattr(layouts, "WINDOWS", (1,))
    monkeypatch.setattr(layouts, "attention", refusing)
    monkeypatch.setattr(layouts, "whole", lambda *of: [])
    result, task = measured("layouts")
    assert {(row["choice"], row["side"]) for row in result["rows"]} == {
        ("attention", "einsum"),
        ("attention", "xla"),
    }
    told = {one.what: one.why for one in task.cut}
    assert "refused" in told["keys columns, 1 position"] and "is missing" in told["keys rows, 1 position"]


def test_a_layer_attends_alike_on_every_side():
    """Keys as columns and as rows, and the library, give the same: ones, of which any average is one."""
    config = layouts.with_dtype(layouts.PRESETS["test-causal"], "float32")
    for side in ("columns", "rows", "einsum", "xla"):
        out, keys, values = layouts.attention(config, 3, 5, 2, side)()
        assert out.shape == (1, config.heads, 3, config.head_dim)
        assert float(abs(out - 1).max()) < 1e-6 and float(keys.min()) == float(values.min()) == 1


def test_a_step_of_training_is_told_as_a_share_of_the_product_rate():
    result, _ = measured("training")
    (row,) = result["rows"]
    assert row["flops"] > 0 and len(row["seconds"]) == 2
    assert row["utilisation"] == pytest.approx(row["flops"] / statistics.median(row["seconds"]) / 1e11)
    low, high = row["utilisation_range"]
    assert low <= row["utilisation"] <= high


def test_compilation_is_timed_without_a_cache(monkeypatch):
    from jax import config

    seen = []

    def seconds_of(preset, name, task):
        seen.append((preset, name, config.jax_enable_compilation_cache))
        return 1.0

    before = config.jax_enable_compilation_cache
    monkeypatch.setattr(compiling, "seconds_of", seconds_of)
    result, _ = measured("compile")
    assert {name for _, name, _ in seen} == {
        "autoregressive",
        "jacobi",
        "multiblock",
        "prompt_lookup",
        "lookahead",
    }
    assert not any(cached for *_, cached in seen) and config.jax_enable_compilation_cache == before
    assert [row["seconds"] for row in result["rows"]] == [1.0] * len(seen)


def test_no_compiled_program_is_looked_up():
    """JAX decides at its first program whether it has a cache, which is long before."""
    import jax
    from jax import monitoring

    jax.jit(lambda x: x + 1).lower(1.0).compile()
    asked = []

    def record(event, **rest):
        asked.append(event)

    monitoring.register_event_listener(record)
    try:
        with compiling.uncached():
            jax.jit(lambda x: x + 2).lower(1.0).compile()
        assert LOOKED_UP not in asked
        jax.jit(lambda x: x + 3).lower(1.0).compile()
        assert LOOKED_UP in asked
    finally:
        monitoring.unregister_event_listener(record)


@pytest.mark.parametrize(("preset", "name"), [("test-causal", "autoregressive"), ("test-sdar", "residual")])
def test_seconds_of_compilation_need_no_weights(preset, name):
    assert compiling.seconds_of(preset, name, Task(SIZES, 0.0)) > 0


def test_larger_shapes_have_the_baseline_of_their_family():
    sizes = dataclasses.replace(SIZES, presets=("tiny-sdar", "sdar-1.7b", "tiny-causal", "test-causal"))
    pairs = compiling.programs(Task(sizes, 0.0))
    assert {name for preset, name in pairs if preset == "tiny-sdar"} == set(
        FAMILIES["block_diffusion"].decoders
    )
    assert [pair for pair in pairs if pair[0] in ("sdar-1.7b", "test-causal")] == [
        ("test-causal", "autoregressive"),
        ("sdar-1.7b", "block"),
    ]


def test_decoders_of_a_bundled_model_are_compared():
    rivals = [
        Setting("autoregressive", AutoRegressive(), baseline=True),
        Setting("jacobi", Jacobi(block=4)),
    ]
    task = Task(SIZES, time.monotonic() + 600)
    unit = compare.Unit("tiny-jacobi", 1, 2, rivals, functools.partial(compare.word_prompts, SIZES))
    base, jacobi = rows = compare.measure_unit(unit, task)
    assert base["speedup"] == 1 and base["tokens_per_call"] == 1 and jacobi["tokens_per_call"] > 1.5
    assert jacobi["equal_calls"] == 2 and jacobi["generated"] == base["generated"]
    low, high = jacobi["speedup_range"]
    assert low <= jacobi["speedup"] <= high and len(jacobi["each"]) == SIZES.passes and not task.cut
    (table,) = compare.tables({"rows": rows})
    assert table.note.startswith("2 unseen problems one by one, 2 passes in turns")
    assert drawn("compare", {"rows": rows}) and task.dtypes == {"float32"}


def compared(model, decoder, batch=1, *, fast=1.0, settings=None, baseline=False):
    """A row of the part that compares decoders; `fast` times as many tokens a second as one a second."""
    each = [[1.0 / fast, 1.0 / fast]] * 2
    row = {"model": model, "decoder": decoder, "batch": batch, "settings": settings or {}, "each": each}
    speed = {"tokens_per_second": fast, "speedup": fast, "speedup_range": [fast, fast]}
    return row | speed | {"generated": [1, 1], "baseline": baseline}


def test_claims_find_their_rows():
    model, jacobi = claimed.DISTILLED, {"block": 8}
    rows = [
        compared(model, "autoregressive", settings={"recurrence": 16}, baseline=True),
        compared(model, "autoregressive", fast=8.0, settings={"recurrence": 1}),
        compared(model, "wavefront", fast=13.0, settings={"window": 8, "warm_start": False}),
        compared(model, "jacobi", fast=6.0, settings={**jacobi, "running": False}),
        compared(claimed.CAUSAL, "autoregressive", baseline=True),
        compared(claimed.CAUSAL, "jacobi", fast=0.5),
    ]
    results = {"compare": {"rows": rows}}
    found = {one["name"]: one for one in judging.judged(CLAIMS, results)}
    assert found["forgetting wave / r = 16"]["figure"] == pytest.approx(13)
    assert found["forgetting wave / r = 1"]["verdict"] == "holds"
    assert found["r = 1 / r = 16"]["verdict"] == "does not hold"  # 8, above its upper bound
    for missing in (
        "forgetting wave, batch 4",
        "several tokens a call / r = 1",
        "undistilled",
        "running window 8",
    ):
        assert found[missing]["verdict"] == "not measured", missing  # a rival is missing, or all of it
    rows.append(compared(model, "jacobi", fast=9.0, settings={**jacobi, "running": True}))
    found = {one["name"]: one for one in judging.judged(CLAIMS, results)}
    assert found["several tokens a call / r = 1"]["figure"] == pytest.approx(13 / 8)
    assert found["forgetting wave / Jacobi"]["figure"] == pytest.approx(13 / 9)  # over the fastest


def test_a_ratio_over_several_rivals_has_the_range_of_the_fastest():
    rows = [compared("m", "a"), compared("m", "b", fast=2.0), compared("m", "c", fast=1.9)]
    rows[2]["each"] = [[1 / 4, 1 / 4], [1 / 1.9, 1 / 1.9], [1.0, 1.0]]  # perhaps faster than b
    for row in rows[:2]:
        row["each"] = row["each"][:1] * 3
    of = {name: judging.Row("m", name) for name in "abc"}
    results = {"compare": {"rows": rows}}
    value, low, high = judging.Ratio((of["b"], of["c"]), (of["a"],))(results)
    assert (value, low) == (2, 2) and high == pytest.approx(4)
    value, low, high = judging.ratio(of["a"], of["b"], of["c"])(results)
    assert (value, high) == (0.5, 0.5) and low == pytest.approx(0.25)


def test_every_claim_names_settings_that_are_measured():
    """Each row that a claim looks for is a row of the part that it looks in, so none stays unmeasured by a slip."""
    results = {"compare": {"rows": []}, "pointers": {"rows": []}}
    for part, model, batch, rivals in measured_rivals():
        for rival in rivals:
            row = compared(model, rival.name, batch, settings=rival.settings())
            results[part]["rows"].append(row | {"baseline": rival.baseline})
    missing = [
        one["name"]
        for one in judging.judged(CLAIMS, results)
        if one["verdict"] == "not measured" and one["name"] not in OTHER_PARTS
    ]
    assert not missing
    assert len({claim.name for claim in CLAIMS}) == len(CLAIMS)


def measured_rivals():
    """Part, model, batch and decoders of everything that is compared."""
    for family in FAMILIES.values():
        for model in () if family.texts else family.bundled:
            for batch in (1, 4, 16):
                yield "compare", model, batch, compare.rivals_of(family.name, model, batch)
    yield "pointers", pointers.MODEL, 1, pointers.RIVALS


def test_what_claims_are_about_is_measured_first():
    """So that a report of twenty minutes has it on two cores, where there is no time to compile all decoders."""
    for part, model, batch, rivals in measured_rivals():
        rows = judging.wanted(CLAIMS, part, model, batch)
        claimed_ones = [any(row.fits(rival.name, rival.settings()) for row in rows) for rival in rivals]
        assert rivals[0].baseline and sum(rival.baseline for rival in rivals) == 1
        assert claimed_ones[1:] == sorted(claimed_ones[1:], reverse=True), (model, batch)
    rows = judging.wanted(CLAIMS, "compare", claimed.DISTILLED, 16)
    assert {row.decoder for row in rows} == {"wavefront", "autoregressive"}


OTHER_PARTS = ("paced wave, tiny", "8 positions", "16 positions")


def test_lengthened_loops_take_long_enough(monkeypatch):
    monkeypatch.setattr(timing, "LEAST", 0.05)
    assert timing.lengthened(0.1, 32) == (0.1, 32)
    seconds, steps = timing.lengthened(0.001, 32)
    assert steps == 1600 and seconds == pytest.approx(0.05)


def test_a_figure_that_straddles_a_bound_is_open():
    claim = judging.Claim("x", "x is 1.5", "README.md", "a processor", lambda results: None, least=1.5)
    assert (
        claim.verdict(Figure(1.6, 1.55, 1.7)) == "holds"
        and claim.verdict(Figure(1.2, 1.1, 1.3)) == "does not hold"
    )
    assert claim.verdict(Figure(1.5, 1.4, 1.6)) == "open" and claim.verdict(None) == "not measured"
