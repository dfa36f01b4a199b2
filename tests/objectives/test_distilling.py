"""`paradec train jacobi` on a tiny model of random weights: rounds, a stopped collection, what it
is measured by.
"""

import dataclasses
import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_tokenizers import byte_level
from stubs.tiny import drawn

import paradec_jax as pd
from paradec_jax.config import CausalConfig, TokenSpec
from paradec_jax.data.trajectories import Trajectories
from paradec_jax.evaluate.cases import Prompts
from paradec_jax.evaluate.timing import Case
from paradec_jax.families import init_params
from paradec_jax.io import hold
from paradec_jax.objective import Objective, weighted
from paradec_jax.objectives import answers, jacobi
from paradec_jax.objectives.options import Run
from paradec_jax.objectives.run import train

JACOBI = jacobi.Jacobi(block=(4, 4), new_tokens=8, rows=4, rehearse=0.5)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The options of a run: of a tiny model, on ten lines of nine prompts."""
    root, words = tmp_path_factory.mktemp("jacobi"), byte_level()
    shape = {
        "width": 16,
        "layers": 1,
        "heads": 2,
        "kv_heads": 2,
        "feed_forward": 24,
        "max_length": 64,
    }
    config = CausalConfig(vocab_size=words.vocab_size, **shape)
    pd.save(
        root / "start", pd.Model(config, drawn(init_params, config, 0), TokenSpec(stop=(3,)), words)
    )
    lines = (json.dumps({"prompt": f"x {i % 9} ", "response": f"is {i}"}) + "\n" for i in range(10))
    (root / "data").write_text("".join(lines))
    options = {"updates": 2, "batch_tokens": 512, "learning_rate": 1e-2, "out": root / "run"}
    return Run(
        model=str(root / "start"), data=str(root / "data"), held_out=str(root / "data"), **options
    )


@pytest.mark.slow
def test_a_stopped_collection_asks_no_prompt_twice(run, monkeypatch, capsys):
    """Out of time before it begins, killed after its first shard, ended, and read again."""
    asked, collect = [], jacobi.collect

    def recorded(decoder, params, request, ids):
        if len(asked) == 1:
            asked.append("killed")
            raise KeyboardInterrupt
        asked.append(sorted({*ids}))
        if len(asked) == 1:
            with pytest.raises(OSError, match="is writing to"), hold(run.out / "round-0"):
                pass
        return collect(decoder, params, request, ids)

    with pytest.raises(SystemExit) as ended:
        train(JACOBI, dataclasses.replace(run, minutes=0.0))
    assert ended.value.code == 0 and "command goes on" in capsys.readouterr().out
    monkeypatch.setattr(jacobi, "collect", recorded)
    with pytest.raises(KeyboardInterrupt):
        train(JACOBI, run)
    train(JACOBI, run)
    first, _, *others = asked
    assert (
        sorted(first + others[0] + others[1])
        == sorted(others[2] + others[3] + others[4])
        == [*range(9)]
    )
    assert len(Trajectories(run.out / "round-1" / "trajectories")) == 9
    train(JACOBI, run)  # parts that are done are read
    assert len(asked) == 7 and pd.load(run.out / "model").config.layers == 1
    *_, last = map(json.loads, (run.out / "metrics.jsonl").read_text().splitlines())
    assert last["after"]["nats a token"] < last["before"]["nats a token"]
    assert last["after"]["equal to one by one, running window 4"] == 1


def test_lines_say_how_far_the_answers_are_and_what_memory_they_take(monkeypatch, capsys):
    clock, at = iter([0, 0, 20, 40, 40, *[41] * 9]), np.arange(9)
    monkeypatch.setattr(answers, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    monkeypatch.setattr(answers, "planned_bytes", lambda case, request: 6_000 * request.batch)
    keys = jax.random.split(jax.random.key(0), 9)
    asked = "x", Case(None, None), Prompts(at[:, None], at * 0 + 1, keys, 4), at, 4
    *_, (batch, request) = answers.batches(*asked)
    assert (len(batch), request.batch) == (1, 4)
    out = capsys.readouterr().out
    assert (
        out.count("x: 4 rows together, of 4 asked, take 2.4e-05 of ") == 2
        and "8 of 9 prompts are done" in out
    )
    monkeypatch.setattr(answers.os, "sysconf", lambda name: 120)
    assert (
        len([*answers.batches(*asked)]) == 5
        and "x: 2 rows together, of 4" in capsys.readouterr().out
    )


def test_rehearsal_adds_its_loss():
    one = Objective(lambda params, frozen, batch, key: {"loss": weighted(batch["x"], jnp.ones(2))})
    both = jacobi.rehearsing(one, one, 10.0)
    batch = {
        "pairs": {"x": jnp.array([1.0, 3.0])},
        "fresh": {"x": jnp.array([0.5, 0.7])},
        "step": 0,
    }
    value, metrics = both(None, None, batch, jax.random.key(0))
    np.testing.assert_allclose([value, metrics["rehearsal_loss"]], [2 + 10 * 0.6, 0.6], rtol=1e-6)
