"""Where time went, and who else is told: lines that sum to the wall time, writers, a trace, operations a second."""

import json
import sys
import time
import types

import jax
import jax.numpy as jnp
import noisy_regression
import numpy as np
import pytest
from noisy_regression import STEPS, Batches, train

from paradec_jax.train import adamw, fit, writers
from paradec_jax.train.clock import PURPOSES, Clock


def test_every_nanosecond_has_one_purpose():
    begun = time.perf_counter()
    clock = Clock("restore")
    with clock.on("evaluate"):
        time.sleep(0.02)
        with clock.on("log"):
            time.sleep(0.01)
    first = clock.lap()
    clock.switch("steps")
    second, total = clock.lap(), clock.total()
    elapsed = time.perf_counter() - begun
    assert first["seconds/evaluate"] >= 0.02 and first["seconds/log"] >= 0.01 and second["seconds/log"] == 0
    assert set(first) == {f"seconds/{name}" for name in PURPOSES}
    wall = total.pop("wall_s")
    np.testing.assert_allclose(sum(total.values()), wall, atol=1e-9)
    assert sum((*first.values(), *second.values())) <= wall + 1e-9 <= elapsed + 2e-9


def test_the_log_of_a_run_sums_to_its_wall_time(tmp_path):
    seen = []

    def evaluate(state):
        time.sleep(0.05)
        return {"one": 1.0}

    begun = time.perf_counter()
    train(
        tmp_path,
        Batches(delay=0.01),
        evaluate=evaluate,
        evaluate_every=6,
        flops=lambda batch, metrics: 7.0,
        peak_flops=2.0,
        writers=[lambda step, values: seen.append({"step": step, **values})],
        profile=(2, 3),
    )
    elapsed = time.perf_counter() - begun
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines == seen
    *before, last = lines
    spent = {name: last[f"total_seconds/{name}"] for name in PURPOSES}
    np.testing.assert_allclose(sum(spent.values()), last["wall_s"], atol=1e-9)
    assert last["step"] == STEPS and last["wall_s"] <= elapsed
    assert spent["data"] >= 0.01 * STEPS and spent["evaluate"] >= 0.1 and min(spent.values()) > 0
    laps = [line for line in before if "loss" in line]
    for name in PURPOSES:
        assert sum(line[f"seconds/{name}"] for line in laps) <= spent[name] + 1e-9
    assert laps[0]["seconds/restore"] == spent["restore"] and laps[0]["seconds/compile"] == spent["compile"]
    for line in laps[1:]:
        np.testing.assert_allclose(line["flops_per_s"] * line["step_s"], 7.0)
        np.testing.assert_allclose(line["utilisation"], line["flops_per_s"] / 2.0)
    assert list((tmp_path / "profile").rglob("*.xplane.pb"))


class OfTwoShapes(Batches):
    """Batches of four rows, but from the sixth on every third has six."""

    def __next__(self):
        wide = self.position >= 5 and self.position % 3 == 2
        batch = super().__next__()
        return {name: np.tile(x, (2, 1))[:6] for name, x in batch.items()} if wide else batch


def test_every_shape_of_batch_compiles_apart(tmp_path, monkeypatch):
    compiling, plain = 0.4, noisy_regression.loss

    def slow(params, frozen, batch, key):
        time.sleep(compiling)  # while it is traced
        return plain(params, frozen, batch, key)

    def flops(batch, metrics):
        assert np.isfinite(metrics["loss"]) and batch["tokens"].dtype == np.int64
        return float(batch["tokens"].shape[0])

    monkeypatch.setattr(noisy_regression, "loss", slow)
    train(tmp_path, OfTwoShapes(), flops=flops, checkpoint_every=STEPS)
    *lines, last = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    compiled = [line["seconds/compile"] for line in lines]
    assert min(compiled[0], compiled[1]) >= compiling and max(compiled[2:]) == 0  # updates 1 and 6 of 12
    assert all(line["step_s"] < compiling / 2 for line in lines)
    assert last["total_seconds/steps"] < compiling
    np.testing.assert_allclose(sum(last[f"total_seconds/{name}"] for name in PURPOSES), last["wall_s"])
    # Of updates 4 to 6 the last compiled and is in no rate; 9 and 12 have six rows.
    tokens = [line["tokens_per_s"] * line["step_s"] for line in lines]
    np.testing.assert_allclose(tokens, [12, 12, 14, 14])
    rows = [line["flops_per_s"] * line["step_s"] for line in lines]
    np.testing.assert_allclose(rows, [4, 4, 14 / 3, 14 / 3])


class Nested(OfTwoShapes):
    """The same batches beside some of one shape, as a loss of two parts takes them."""

    def __next__(self):
        return {"pairs": super().__next__(), "fresh": {"weights": np.ones((4, 2))}}


def test_a_batch_may_hold_others(tmp_path):
    def of_parts(params, frozen, batch, key):
        value, metrics = noisy_regression.loss(params, frozen, batch["pairs"] | {"step": batch["step"]}, key)
        return value * jnp.mean(batch["fresh"]["weights"]), metrics

    options = {"optimizer": adamw(1e-2, STEPS), "steps": STEPS, "key": jax.random.key(1), "log_every": 3}
    fit(of_parts, noisy_regression.initial_params(), Nested(), folder=tmp_path, progress=False, **options)
    *lines, _ = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    compiled = [line["seconds/compile"] > 0 for line in lines]
    assert compiled == [True, True, False, False]  # updates 1 and 6 of 12
    tokens = [line["tokens_per_s"] * line["step_s"] for line in lines]
    np.testing.assert_allclose(tokens, [20, 20, 22, 22])


def test_what_cannot_be_told_is_refused_before_anything_is_written(tmp_path):
    cases = ({"peak_flops": 1e12}, "give flops"), ({"profile": (3, 2)}, "profile must be")
    for given, sentence in cases:
        with pytest.raises(ValueError, match=sentence):
            train(tmp_path, **given)
    assert not list(tmp_path.iterdir())


def test_writers_get_what_is_finite(monkeypatch):
    told = []
    events = types.SimpleNamespace(add_scalar=lambda *scalar: told.append(scalar), flush=lambda: None)
    fake = types.SimpleNamespace(SummaryWriter=lambda folder: events)
    monkeypatch.setitem(sys.modules, "tensorboardX", fake)
    logged = types.SimpleNamespace(log=lambda values, step: told.append((step, values)))
    fake = types.SimpleNamespace(init=lambda **options: told.append(options) or logged)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    for write in (writers.tensorboard("runs"), writers.wandb("mine", mode="offline")):
        write(3, {"loss": 1.5, "ratio": float("nan")})
    assert [one for one in told if not isinstance(one, dict)] == [("loss", 1.5, 3), (3, {"loss": 1.5})]
