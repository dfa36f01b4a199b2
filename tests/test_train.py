"""Train step, optimizer, checkpoints, log, loop: resumption to the bit, what survives when things break."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from paradec_jax.train import (
    Checkpoints,
    NonFiniteLoss,
    TrainState,
    adamw,
    decay_mask,
    fit,
    make_train_step,
    muon,
    trapezoid,
    update_ema,
)
from paradec_jax.train.log import Log

STEPS = 12

# When one array of a damaged checkpoint fails, Orbax leaves the other reads running; their late answers find
# its event loop closed, which Python reports as unraisable.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


class Batches:
    """Resumable batches whose state is bytes; from batch `bad` on, one input is NaN."""

    def __init__(self, bad: int | None = None, delay: float = 0.0) -> None:
        self.position, self.bad, self.delay = 0, bad, delay

    def __next__(self) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(self.position)
        inputs = rng.normal(size=(4, 3)).astype(np.float32)
        if self.bad is not None and self.position >= self.bad:
            inputs[0, 0] = np.nan
        self.position += 1
        time.sleep(self.delay)
        return {"inputs": inputs, "tokens": rng.integers(5, size=(4, 3))}

    def get_state(self) -> bytes:
        return json.dumps(self.position).encode()

    def set_state(self, state: bytes) -> None:
        self.position = json.loads(state)


def initial_params() -> dict:
    w = jax.random.normal(jax.random.key(7), (3, 5))
    return {"embedding": w, "mlp": {"kernel": w.T, "bias": jnp.zeros(3)}, "norm": {"scale": jnp.ones(3)}}


def loss(params, frozen, batch, key):
    """Noisy denoising regression whose noise needs the key and whose scale needs the step number."""
    x = batch["inputs"] * params["norm"]["scale"]
    noise = jax.random.normal(key, ()) / (1 + batch["step"])
    y = jnp.tanh(x @ params["embedding"]) @ params["mlp"]["kernel"] + params["mlp"]["bias"]
    rows = jnp.mean((y - batch["inputs"] + noise) ** 2, axis=-1)
    return jnp.mean(rows), {"noise": noise}


def quiet_loss(params, frozen, batch, key):
    return loss(params, frozen, batch, jax.random.key(0))


def train(folder: Path | None, data: Batches | None = None, **changes) -> TrainState:
    """Twelve updates, a checkpoint every four, unless told otherwise."""
    options = {
        "optimizer": adamw(1e-2, STEPS, warmup=3, cooldown=4),
        "steps": STEPS,
        "key": jax.random.key(1),
        "checkpoint_every": 4,
        "log_every": 3,
        "ema_decay": 0.9,
        "progress": False,
    }
    return fit(loss, initial_params(), data or Batches(), folder=folder, **options | changes)


def assert_same(a: TrainState, b: TrainState) -> None:
    for state in (a, b):
        assert state.step == STEPS
    jax.tree.map(
        np.testing.assert_array_equal, *(s.__dict__ | {"key": jax.random.key_data(s.key)} for s in (a, b))
    )


def log_lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def losses_by_step(folder: Path) -> list[tuple[int, float]]:
    return [(line["step"], line["loss"]) for line in log_lines(folder) if "loss" in line]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> tuple[Path, TrainState]:
    """An uninterrupted run, left alone by the tests."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, train(folder)


def python(code: str, **environment: str) -> subprocess.Popen:
    """A process that runs code with this module as `t`."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | environment
    command = [sys.executable, "-c", f"import test_train as t; {code}"]
    return subprocess.Popen(command, cwd=Path(__file__).parent, env=environment)


def test_resume_after_an_exception_is_bitwise(tmp_path, whole):
    folder, expected = whole
    with pytest.raises(NonFiniteLoss):
        train(tmp_path, Batches(bad=6))
    assert_same(train(tmp_path), expected)
    assert losses_by_step(tmp_path) == losses_by_step(folder)


def test_resume_after_sigkill_is_bitwise(tmp_path, whole):
    folder, expected = whole
    process = python(f"t.train(t.Path({str(tmp_path)!r}), t.Batches(delay=0.3))")
    try:
        deadline = time.monotonic() + 120
        while not (tmp_path / "checkpoints" / "4").exists():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        time.sleep(0.4)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert not (tmp_path / "checkpoints" / str(STEPS)).exists()
    assert_same(train(tmp_path), expected)
    assert losses_by_step(tmp_path) == losses_by_step(folder)


def test_finished_run_returns_its_state(tmp_path, whole):
    _, expected = whole
    train(tmp_path)
    before = (tmp_path / "metrics.jsonl").read_text()
    assert_same(train(tmp_path, Batches(bad=0)), expected)
    assert (tmp_path / "metrics.jsonl").read_text() == before


def damage(folder: Path, how: str) -> None:
    """Halves, clears or alters every file of the folder that is large enough to hold arrays or metadata."""
    for file in [f for f in folder.rglob("*") if f.is_file() and f.name != "_CHECKPOINT_METADATA"]:
        content = bytearray(file.read_bytes())
        if how == "half":
            content = content[: len(content) // 2]
        elif how == "empty":
            content = b""
        elif "state" in file.parts and "d" in file.parts and content:
            content[len(content) // 2] ^= 0x10
        file.write_bytes(content)


@pytest.mark.parametrize("how", ["half", "empty", "altered"])
def test_damaged_newest_checkpoint_falls_back(tmp_path, whole, how):
    _, expected = whole
    train(tmp_path)
    newest = tmp_path / "checkpoints" / str(STEPS)
    damage(newest, how)
    with pytest.warns(RuntimeWarning, match="cannot read checkpoint") as caught:
        state = train(tmp_path)
    assert [str(newest) in str(w.message) for w in caught if w.category is RuntimeWarning] == [True]
    assert_same(state, expected)
    assert newest.with_name(f"{STEPS}.unreadable").is_dir()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same(train(tmp_path), expected)
    assert [line["step"] for line in log_lines(tmp_path)] == [3, 4, 6, 8, 9, 12]


def test_one_altered_byte_is_noticed(tmp_path):
    """Whatever byte of the array files changes, restoring gives the saved values or raises."""
    state = TrainState.create(initial_params(), optax.sgd(0.1), jax.random.key(0))
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(state)
        checkpoints.steps()
    for file in sorted((tmp_path / "0" / "state").rglob("d/*")):
        content = file.read_bytes()
        for at in (len(content) // 3, len(content) // 2, len(content) - 5):
            altered = bytearray(content)
            altered[at] ^= 0x10
            file.write_bytes(altered)
            with Checkpoints(tmp_path, read_only=True) as checkpoints, warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    restored, _ = checkpoints.restore(state)
                except RuntimeError:
                    continue
                jax.tree.map(np.testing.assert_array_equal, restored.params, state.params)
        file.write_bytes(content)


def test_no_readable_checkpoint(tmp_path):
    train(tmp_path)
    for step in (8, 12):
        damage(tmp_path / "checkpoints" / str(step), "half")
    with (
        pytest.warns(RuntimeWarning),
        pytest.raises(RuntimeError, match=r"none of the checkpoints in .* can be read"),
    ):
        train(tmp_path)
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["12", "8"]


def test_checkpoint_of_another_model_is_refused(tmp_path):
    train(tmp_path)
    with pytest.raises(ValueError, match=r"another ema: ema/embedding is .* there and missing in this run"):
        train(tmp_path, ema_decay=None)
    with pytest.raises(ValueError, match="resume is false"):
        train(tmp_path, resume=False)
    with pytest.raises(ValueError, match="is beyond steps=8"):
        train(tmp_path, steps=8)


def test_restore_errors_and_round_trip(tmp_path):
    state = TrainState.create(initial_params(), optax.adam(1e-3), jax.random.key(5), ema=True)
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        with pytest.raises(FileNotFoundError, match="no checkpoint"):
            checkpoints.restore(state)
        checkpoints.save(state, {"index": np.int64(3), "rows": np.arange(2)})
        restored, data_state = checkpoints.restore(state)
        later = dataclasses.replace(state, step=state.step + 2)
        checkpoints.save(later)
        with pytest.raises(ValueError, match="step 1 is not beyond the newest checkpoint"):
            checkpoints.save(dataclasses.replace(state, step=state.step + 1))
        assert checkpoints.steps() == [2]
    with Checkpoints(tmp_path, read_only=True) as reader, pytest.raises(ValueError, match="opened read-only"):
        reader.save(later)
    assert data_state == {"index": 3, "rows": [0, 1]}
    assert jax.random.key_data(restored.key).tolist() == jax.random.key_data(state.key).tolist()
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    with pytest.raises(ValueError, match="keep must be at least 1"):
        Checkpoints(tmp_path, keep=0)


def train_on_meshes(folder: Path) -> None:
    """Saves on four devices, goes on with the same numbers on two and on one."""
    optimizer = optax.adam(0.1)
    step = make_train_step(loss, optimizer, ema_decay=0.9)

    def run(devices: int) -> None:
        mesh = jax.make_mesh((devices,), ("data",), devices=jax.devices()[:devices])
        rows = jax.NamedSharding(mesh, jax.P("data"))
        params = jax.device_put(initial_params(), jax.NamedSharding(mesh, jax.P()))
        state = TrainState.create(params, optimizer, jax.random.key(0), ema=True)
        batch = jax.device_put(next(Batches()), rows)
        with Checkpoints(folder) as checkpoints:
            if checkpoints.steps():
                state, _ = checkpoints.restore(state)
                assert state.params["embedding"].sharding.device_set == set(mesh.devices.flat)
            else:
                state, _ = step(state, None, batch)
                checkpoints.save(state)
        state, metrics = step(state, None, batch)
        assert state.step == 2 and metrics["finite"]
        results.append(jax.device_get((metrics["loss"], state.params)))

    results: list = []
    for devices in (4, 2, 1):
        run(devices)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), results[0], results[-1]
        )


def test_restore_on_another_mesh(tmp_path):
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
    process = python(f"t.train_on_meshes(t.Path({str(tmp_path)!r}))", XLA_FLAGS=flags, JAX_PLATFORMS="cpu")
    assert process.wait(120) == 0


def test_nan_stops_and_keeps_the_last_good_checkpoint(tmp_path):
    with pytest.raises(
        NonFiniteLoss, match=r"update 7 had loss nan .* last good checkpoint is .*/4"
    ) as caught:
        train(tmp_path, Batches(bad=6), log_every=100)
    assert caught.value.step == 7
    assert caught.value.checkpoint == (tmp_path / "checkpoints" / "4").resolve()
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["4"]
    with pytest.raises(NonFiniteLoss, match="there is no checkpoint"):
        train(None, Batches(bad=0))


def test_non_finite_update_is_not_applied():
    optimizer = optax.adam(0.1)
    state = TrainState.create(initial_params(), optimizer, jax.random.key(0), ema=True)
    before = jax.tree.map(np.array, (state.params, state.ema, state.opt_state, state.step))
    state, metrics = make_train_step(loss, optimizer, ema_decay=0.9)(state, None, next(Batches(bad=0)))
    assert not metrics["finite"]
    jax.tree.map(
        np.testing.assert_array_equal, before, (state.params, state.ema, state.opt_state, state.step)
    )


def test_step_donates_its_state_and_nothing_else():
    optimizer, params, key = optax.adam(0.1), initial_params(), jax.random.key(0)
    state = TrainState.create(params, optimizer, key, ema=True)
    step = make_train_step(loss, optimizer, ema_decay=0.9)
    old = state.params["embedding"]
    for _ in range(2):
        state, metrics = step(state, None, next(Batches()))
    assert old.is_deleted() and not params["embedding"].is_deleted() and not key.is_deleted()
    assert (
        state.step == 2 and metrics["finite"] and metrics.keys() == {"loss", "noise", "grad_norm", "finite"}
    )
    assert step._cache_size() == 1


def test_accumulation_equals_the_full_batch():
    batch, results = next(Batches()), []
    for accumulate in (1, 2, 4):
        state = TrainState.create(initial_params(), optax.sgd(0.1), jax.random.key(0))
        step = make_train_step(quiet_loss, optax.sgd(0.1), accumulate=accumulate)
        state, metrics = step(state, None, batch)
        results.append((state.params, metrics))
    for result in results[1:]:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), results[0], result)


def test_micro_batches_draw_different_noise():
    state = TrainState.create(initial_params(), optax.sgd(0.0), jax.random.key(0))
    _, metrics = make_train_step(loss, optax.sgd(0.0), accumulate=2)(state, None, next(Batches()))
    key = jax.random.fold_in(jax.random.key(0), 0)
    draws = [jax.random.normal(jax.random.fold_in(key, i), ()) for i in range(2)]
    np.testing.assert_allclose(metrics["noise"], np.mean(draws), rtol=1e-6)


def test_step_refuses_bad_input():
    with pytest.raises(ValueError, match="accumulate must be at least 1"):
        make_train_step(loss, optax.sgd(0.1), accumulate=0)
    with pytest.raises(ValueError, match="ema_decay must be in"):
        make_train_step(loss, optax.sgd(0.1), ema_decay=1.0)
    state = TrainState.create(initial_params(), optax.sgd(0.1), jax.random.key(0))
    with pytest.raises(ValueError, match=r"batch\['inputs'\] has shape \(4, 3\); its first axis must be"):
        make_train_step(loss, optax.sgd(0.1), accumulate=3)(state, None, next(Batches()))
    with pytest.raises(ValueError, match="the state has no ema"):
        make_train_step(loss, optax.sgd(0.1), ema_decay=0.5)(state, None, next(Batches()))
    with pytest.raises(TypeError, match="typed PRNG key"):
        TrainState.create(initial_params(), optax.sgd(0.1), jax.random.PRNGKey(0))
    with pytest.raises(ValueError, match="log_every must be at least 1"):
        train(None, log_every=0)


def test_ema_formula():
    ema, average = {"w": jnp.zeros(2)}, 0.0
    for t, value in enumerate([1.0, 2.0, 3.0]):
        ema = update_ema(ema, {"w": jnp.full(2, value, jnp.bfloat16)}, jnp.int32(t), 0.15)
        d = min(0.15, (1 + t) / (10 + t))
        average = d * average + (1 - d) * value
    np.testing.assert_allclose(ema["w"], average, rtol=1e-6)
    assert ema["w"].dtype == jnp.float32


def test_decay_spares_norms_and_biases():
    params = initial_params()
    mask = decay_mask(params)
    assert mask == {"embedding": True, "mlp": {"kernel": True, "bias": False}, "norm": {"scale": False}}
    optimizer = adamw(0.5, 10, weight_decay=0.1)
    updates, _ = optimizer.update(jax.tree.map(jnp.zeros_like, params), optimizer.init(params), params)
    jax.tree.map(
        lambda u, p, m: np.testing.assert_allclose(u, -0.05 * p if m else 0 * p, atol=1e-7),
        updates,
        params,
        mask,
    )


def test_muon_orthogonalises_named_matrices_apart():
    rng = np.random.default_rng(0)
    shapes = {"pair": (6, 2, 4), "square": (8, 8), "norm": (8,)}
    params = {name: jnp.asarray(rng.normal(size=shape), jnp.float32) for name, shape in shapes.items()}
    gradients = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), jnp.float32), params)
    axes = {"pair$": ((0,), (2,)), "square$": ((0,), (1,))}
    options = {"warmup": 2, "cooldown": 2, "clip": None}
    optimizer = muon(0.5, 10, axes=axes, weight_decay=0.0, adam_learning_rate=0.1, **options)
    updates, _ = optimizer.update(gradients, optimizer.init(params), params)
    for update, gradient, larger in (
        (updates["pair"][:, 0], gradients["pair"][:, 0], 6),
        (updates["pair"][:, 1], gradients["pair"][:, 1], 6),
        (updates["square"], gradients["square"], 8),
    ):
        singular = np.linalg.svd(update, compute_uv=False)
        wanted = 0.25 * 0.2 * larger**0.5  # the first update has half the peak
        assert 0.6 * wanted < singular.min() <= singular.max() < 1.3 * wanted
        assert np.sum(np.asarray(update) * np.asarray(gradient)) < 0
    adam = optax.nadam(0.05, b2=0.95)
    alone, _ = adam.update(gradients["norm"], adam.init(params["norm"]))
    np.testing.assert_allclose(updates["norm"], alone, rtol=1e-5)

    decaying = muon(0.5, 10, axes=axes, weight_decay=0.1, **options)
    zeros = jax.tree.map(jnp.zeros_like, params)
    updates, _ = decaying.update(zeros, decaying.init(params), params)
    np.testing.assert_allclose(updates["square"], -0.025 * params["square"], rtol=1e-5)
    assert not updates["norm"].any()


def test_trapezoid():
    schedule = trapezoid(2.0, 10, warmup=4, cooldown=2)
    np.testing.assert_allclose([schedule(t) for t in range(11)], [0.5, 1, 1.5, 2, 2, 2, 2, 2, 2, 1, 0])
    np.testing.assert_allclose([trapezoid(2.0, 3)(t) for t in range(3)], 2)
    with pytest.raises(ValueError, match="must fit into steps 5"):
        trapezoid(1.0, 5, warmup=3, cooldown=3)


def test_log_resumes_without_duplicates(tmp_path, capsys):
    path = tmp_path / "run" / "metrics.jsonl"
    with Log(path, step=0, steps=9) as log:
        for step in (2, 4, 6):
            log.write(step, {"loss": step / 2, "tokens_per_s": 1500.0, "step_s": 60.0})
    with path.open("a") as file:
        file.write('{"step": 4, "lo')
    with Log(path, step=4, steps=9) as log:
        log.write(6, {"loss": float("inf")})
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["step"], line["loss"]) for line in lines] == [(2, 1.0), (4, 2.0), (6, None)]
    assert "step 4/9  loss 2  1,500 tokens/s  ETA 0:05:00\n" in capsys.readouterr().out


def test_fit_logs_evaluations_and_rates(tmp_path):
    train(tmp_path, evaluate=lambda state: {"copies": state.step}, evaluate_every=5)
    lines = log_lines(tmp_path)
    assert [(line["step"], line["eval/copies"]) for line in lines if "eval/copies" in line] == [
        (5, 5),
        (10, 10),
        (12, 12),
    ]
    first, second, *_ = (line for line in lines if "loss" in line)
    assert first["compile_s"] > 0 and "compile_s" not in second
    np.testing.assert_allclose(second["tokens_per_s"] * second["step_s"], 12)
    with pytest.raises(ValueError, match="the data ended after 2 batches"):
        train(None, data=Short())


class Short(Batches):
    """Two batches."""

    def __next__(self) -> dict[str, np.ndarray]:
        if self.position == 2:
            raise StopIteration
        return super().__next__()


def test_grain_iterator_resumes(tmp_path, whole):
    grain = pytest.importorskip("grain")
    source = [next(batches) for batches in [Batches()] for _ in range(STEPS)]

    def data():
        return iter(grain.MapDataset.source(source).to_iter_dataset())

    with pytest.raises(ValueError, match="the data ended after 12 batches"):
        train(tmp_path, data(), steps=STEPS + 4)
    (tmp_path / "checkpoints" / "12").rename(tmp_path / "lost")
    assert_same(train(tmp_path, data()), whole[1])
