"""Memory of gradients and of weights, at toy size."""

import json

import pytest

from experiments.systems import memory

TOY = {"width": 16, "feed_forward": 16, "vocab_size": 32, "layers": 1, "heads": 2}


def test_every_kind_in_this_process(tmp_path, capsys):
    config = memory.Weights(**TOY).config
    memory.do("make", config, tmp_path)
    rows = {kind: memory.do(kind, config, tmp_path) for kind in ("export", "import", "load")}
    assert memory.do("check", config, tmp_path) is True
    assert all(row["above_idle"] >= 0 and row["idle"] > 0 for row in rows.values())
    weights = (tmp_path / "model" / "network.safetensors").stat().st_size / 2**20
    assert 0 < rows["load"]["kept"] < weights and "exported" in capsys.readouterr().out


@pytest.mark.slow
def test_the_command_measures_every_kind(tmp_path):
    out = tmp_path / "rows.json"
    memory.main(memory.Weights(**TOY, folder=tmp_path, out=out))
    told = json.loads(out.read_text())
    assert [row["kind"] for row in told["rows"]] == list(memory.KINDS) and told["same"]
    rows = {row["kind"]: row for row in told["rows"]}
    assert rows["sharded load"]["kept"] >= rows["load"]["kept"] > 0
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]


def test_gradients_of_grouped_steps(tmp_path):
    out = tmp_path / "rows.json"
    memory.main(memory.Gradients("test-recurrent", steps=(4,), context=4, width=2, out=out))
    rows = json.loads(out.read_text())["rows"]
    assert [row["segment"] for row in rows] == [4, 2, 1] and all(row["temp_bytes"] > 0 for row in rows)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: memory.reading("VmNone"), "has no VmNone"),
        (lambda: memory.Gradients("tiny-causal"), "preset must be one of"),
        (lambda: memory.Gradients(steps=(5,)), "steps must be squares"),
    ],
)
def test_what_cannot_be_measured_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
