"""What masked diffusion costs, and all its trainings in one command: at toy size, or by formula."""

import dataclasses

import pytest
from experiment import options_of, read, script

from experiments.common import precision
from experiments.masked_diffusion import train
from experiments.systems.report import Rates


def test_the_precision_follows_the_processor(tmp_path):
    for name, flags, wanted in (
        ("amx", "flags\t: avx2 amx_bf16 amx_tile", "BF16_BF16_F32"),
        ("avx", "flags\t: avx2 avx512_bf16", "float32"),
    ):
        (tmp_path / name).write_text(flags)
        assert precision.natural(tmp_path / name) == wanted
    assert precision.natural(tmp_path / "none") == "float32"
    recipe = train.Recipe()
    assert recipe.settled().matmul_precision == precision.natural()
    assert dataclasses.replace(recipe, matmul_precision="highest").settled().matmul_precision == "highest"
    with pytest.raises(ValueError, match="cooldown must be a share"):
        train.Recipe(cooldown=4000)


@pytest.fixture(scope="module")
def latency():
    found = script("masked_diffusion/latency", rates=lambda dtype: Rates({"sum": 1e9}, 1e9, {}))
    presets = found["MASKED_DIFFUSION_PRESETS"]
    small = {"test-mdlm": dataclasses.replace(presets["test-mdlm"], layers=1)}
    found["main"].__globals__["MASKED_DIFFUSION_PRESETS"] = presets | small
    return found


def test_latency_of_both_sides(latency, tmp_path):
    pytest.importorskip("matplotlib")
    options = options_of(latency, tmp_path, preset="test-mdlm", length=8, steps=(2,), batches=(2,))
    latency["main"](options)
    result, table = read(options.out)
    rows = result["rows"]
    assert [(row["decoder"], row["steps"], row["batch"]) for row in rows] == [
        ("autoregressive", None, 2),
        ("masked", 2, 2),
    ]
    assert len(table) == 2 and set(result["crossovers"]) == {"2"} and options.figure.stat().st_size > 1000
    for row in rows:
        assert row["tokens"] == 7 * row["batch"] and row["limit_seconds"] > 0
        assert row["network_calls"] <= (2 if row["steps"] else 7) * row["batch"]
    assert rows[0]["speedup"] == rows[0]["speedup_at_limits"] == 1
    assert rows[1]["speedup"] == rows[0]["seconds"] / rows[1]["seconds"]


def test_latency_by_formula(latency):
    """Of the 1.3B shape at the rates of an H200: about 7 and 3.5 times at batch 1, 1.1 and 0.6 times at batch 8."""
    options = latency["Options"](
        preset="mdlm-1.3b", dtype="bfloat16", rates=(4.8e12, 9.9e14), steps=(16, 32), batches=(1, 8)
    )
    rows = latency["with_ratios"](latency["predicted"](latency["denoiser_of"](options), options))
    found = {(row["steps"], row["batch"]): row["speedup"] for row in rows if row["steps"]}
    wanted = {(16, 1): 7, (32, 1): 3.5, (16, 8): 1.1, (32, 8): 0.6}
    assert found == {key: pytest.approx(value, rel=0.2) for key, value in wanted.items()}
    crossed = latency["crossovers"](rows)
    assert crossed[16] is None and 1 < crossed[32] < 8


def test_crossovers(latency):
    rows = [{"steps": 4, "batch": batch, "speedup": 8 / batch} for batch in (1, 4, 16)]
    rows += [{"steps": 2, "batch": batch, "speedup": 3.0} for batch in (1, 4, 16)]
    assert latency["crossovers"](rows) == {4: pytest.approx(8), 2: None}


def test_what_cannot_be_timed_is_refused(latency, tmp_path):
    for wrong, message in (
        ({"preset": "tiny-causal"}, "preset must be one of"),
        ({"length": 2}, "length must be from 3"),
        ({"steps": (0,)}, "at least 1"),
        ({"rates": (0.0, 1.0)}, "rates and shares must be above 0"),
    ):
        with pytest.raises(ValueError, match=message):
            latency["main"](options_of(latency, tmp_path, **wrong))
