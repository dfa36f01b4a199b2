"""What studies of masked diffusion compute: perplexity at equal entropy, jackknives, latency by formula."""

import math

import numpy as np
import pytest

from experiments.masked_diffusion import frontier, latency
from experiments.masked_diffusion.texts import left_out
from paradec_jax import load
from paradec_jax.evaluate.judge import judge_ids
from paradec_jax.evaluate.text_measures import entropy

pytestmark = pytest.mark.slow


def row_of(line, steps, log_perplexity, entropy, temperature=1.0, spread=0.0):
    return {
        "line": line,
        "steps": steps,
        "temperature": temperature,
        "judge_perplexity": math.exp(log_perplexity),
        "fourgram_entropy": entropy,
        "left_out": {
            "log_perplexity": [log_perplexity - g * spread for g in range(4)],
            "fourgram_entropy": [entropy] * 4,
        },
    }


def test_a_curve_is_read_at_an_entropy():
    curve = [row_of("teacher, 8 steps", 8, 2 * h, h) for h in (3.0, 1.0, 2.0)]
    assert frontier.at_entropy(curve, 1.25, None) == pytest.approx(2.5)
    better = frontier.compared(row_of("5 rounds", 8, 2.5 - math.log(2), 1.25), curve)
    assert better["ratio"] == pytest.approx(0.5) and better["ratio_interval"] == pytest.approx([0.5, 0.5])
    assert better["perplexity_at_equal_entropy"] == pytest.approx(math.exp(2.5))
    wide = frontier.compared(row_of("5 rounds", 8, 2.5, 1.25, spread=0.01), curve)
    assert wide["ratio"] == pytest.approx(1) and wide["ratio_interval"][0] < 1 < wide["ratio_interval"][1]
    assert frontier.compared(row_of("5 rounds", 8, 2.5, 3.5), curve)["ratio"] is None


@pytest.mark.parametrize("definition", ["sdtt", "mdlm"])
def test_rows_know_what_they_would_be_without_some_samples(toys, definition):
    judge = load(str(toys / "tiny-judge" / "model"))
    ids = np.random.default_rng(0).integers(0, judge.config.vocab_size - 1, (7, 12)).tolist()
    found = left_out(ids, judge_ids(judge, ids, definition=definition, begin=True), groups=3)
    for group in range(3):
        rest = [row for i, row in enumerate(ids) if i % 3 != group]
        again = judge_ids(judge, rest, definition=definition, begin=True)
        assert found["log_perplexity"][group] == pytest.approx(math.log(again.perplexity), rel=1e-5)
        assert found["fourgram_entropy"][group] == pytest.approx(entropy(rest, 4))


def test_latency_by_formula():
    """Of the 1.3B shape at the rates of an H200: about 7 and 3.5 times at batch 1, 1.1 and 0.6 times at batch 8."""
    sizes = {"steps": (16, 32), "batches": (1, 8), "rates": (4.8e12, 9.9e14)}
    options = latency.Options(preset="mdlm-1.3b", dtype="bfloat16", **sizes)
    rows = latency.with_ratios(latency.predicted(latency.denoiser_of(options), options))
    found = {(row["steps"], row["batch"]): row["speedup"] for row in rows if row["steps"]}
    wanted = {(16, 1): 7, (32, 1): 3.5, (16, 8): 1.1, (32, 8): 0.6}
    assert found == {key: pytest.approx(value, rel=0.2) for key, value in wanted.items()}
    crossed = latency.crossovers(rows)
    assert crossed[16] is None and 1 < crossed[32] < 8
