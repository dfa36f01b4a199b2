"""What result files say of their machine."""

import json
import subprocess

import jax.numpy as jnp
import numpy as np

from experiments.common.record import difference
from experiments.systems.machine import in_words
from paradec_jax import facts


def test_facts_are_json_and_name_the_machine():
    found = facts.facts()
    assert json.loads(json.dumps(found)) == found
    device = found["device"]
    assert (
        device["platform"] == "cpu"
        and device["kind"] == device["processor"]
        and device["threads"] >= 1
    )
    assert found["versions"]["jax"] and difference(found, facts.facts()) is None
    assert device["kind"] in in_words(found) and found["versions"]["jax"] in in_words(found)


def test_dtypes_are_those_of_the_arrays():
    tree = {"a": jnp.ones(2, jnp.bfloat16), "b": np.ones(2, np.float32), "n": np.ones(2, np.int32)}
    assert facts.dtypes(tree, tree["b"]) == ["bfloat16", "float32"]


def test_commit_is_that_of_a_checkout_with_a_mark_where_it_was_changed(tmp_path):
    assert facts.commit(tmp_path) is None

    def git(*words):
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        told = subprocess.run(
            ["git", "-C", tmp_path, *identity, *words], check=True, capture_output=True, text=True
        )
        return told.stdout.strip()

    git("init", "-q")
    (tmp_path / "paradec_jax").mkdir()
    file = tmp_path / "paradec_jax" / "a.py"
    file.write_text("1")
    git("add", "-A")
    git("commit", "-qm", "first")
    head = git("rev-parse", "HEAD")
    (tmp_path / "results.json").write_text("what is written beside the package changes nothing")
    assert facts.commit(tmp_path) == head
    file.write_text("2")
    assert facts.commit(tmp_path) == head + "+"
    assert facts.commit(tmp_path, ("experiments",)) == head


def test_memory_may_differ_between_runs_and_nothing_else():
    now = facts.facts()
    before = json.loads(json.dumps(now))
    before["device"]["memory_bytes"] = 1
    before["date"] = "before"
    assert difference(before, now) is None
    before["environment"]["XLA_FLAGS"] = "others"
    assert "environment (XLA_FLAGS)" in difference(before, now)
