"""Memory of weights and of half an hour of decoding, at toy size."""

import json
import types

import pytest
from experiment import read, script

from experiments.systems.memory import reading

TOY = {"width": 16, "feed_forward": 16, "vocab_size": 32, "layers": 1, "heads": 2}
TOY |= {"state_layers": 1, "state_vocab_size": 32}


def test_every_kind_in_this_process(tmp_path, capsys):
    parent = script("systems/weights_memory")
    config = parent["config_of"](parent["Options"](**TOY), 1, 32)
    shape, kinds = json.dumps(config.to_dict()), script("systems/weights_memory_child")["main"]
    assert kinds("make", shape, tmp_path) is None
    told = {kind: kinds(kind, shape, tmp_path) for kind in ("export", "import", "load")}
    assert kinds("check", shape, tmp_path) is True
    for row in told.values():
        assert row["above_idle"] >= 0 and row["idle"] > 0
    weights = (tmp_path / "model" / "network.safetensors").stat().st_size / 2**20
    assert 0 < told["load"]["kept"] < weights
    assert "exported" in capsys.readouterr().out


@pytest.mark.slow
def test_the_command_measures_every_kind(tmp_path):
    found = script("systems/weights_memory")
    out = tmp_path / "rows.json"
    found["main"](found["Options"](**TOY, folder=tmp_path, out=out))
    table, lines = read(out)
    assert [row["kind"] for row in table["rows"]] == list(found["KINDS"]) and len(lines) == 6
    rows = {row["kind"]: row for row in table["rows"]}
    assert table["same"] and 0.9 < rows["resume"]["states"] < 1.5
    mapped = rows["resume, large blocks mapped"]
    assert mapped["states"] > 0.9 and mapped["states_of_pages"] > 0.9
    assert rows["sharded load"]["kept"] >= rows["load"]["kept"] > 0
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]


@pytest.mark.parametrize(("kind", "wanted"), [("resume", None), ("resume, large blocks mapped", "1000000")])
def test_how_glibc_takes_blocks_is_said_to_the_child_alone(kind, wanted, monkeypatch, tmp_path):
    found, seen = script("systems/weights_memory"), {}

    def ran(words, env, **_):
        seen.update(env, kind=words[3])
        return types.SimpleNamespace(returncode=0, stdout="{}")

    monkeypatch.setattr("subprocess.run", ran)
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "7")
    found["child"](kind, found["config_of"](found["Options"](**TOY), 1, 32), tmp_path)
    assert seen["kind"] == "resume" and seen.get("MALLOC_MMAP_THRESHOLD_") == wanted


def test_a_soak_counts_compilations_and_growth(models, tmp_path, capsys):
    found = script("systems/soak")
    out = tmp_path / "soak.json"
    options = {"model": models[0], "batches": (1,), "buckets": 1, "max_new_tokens": 2, "every": 0.1}
    found["main"](found["Options"](**options, minutes=0.03, warm_up=0.01, out=out))
    table, lines = read(out)
    assert table["compiled"]["first pass"] > 0 and table["compiled"]["after"] == 0
    assert sum(table["calls"].values()) > 1 and table["tokens"] > 0 and len(lines) == len(table["rows"]) > 2
    assert isinstance(table["growth"], float) and "programs" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="warm_up must be less than the 1 minutes, not 2"):
        found["main"](types.SimpleNamespace(minutes=1, warm_up=2))


def test_growth_is_the_slope(tmp_path):
    rows = [{"minutes": x / 2, "mebibytes": 300 + 3 * x / 2 + (-1) ** x} for x in range(100)]
    assert script("systems/soak")["slope"](rows) == pytest.approx(3, abs=0.01)


def test_a_name_that_no_system_tells():
    with pytest.raises(ValueError, match="does not tell VmNone"):
        reading("VmNone")
