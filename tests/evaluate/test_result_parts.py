"""Results of several processes: parts, restarts with other numbers, the merge."""

import contextlib
import json
import random
from types import SimpleNamespace

import pytest

from paradec_jax.evaluate.parts import Parts, parts_of, results_of
from paradec_jax.evaluate.results import Results

SETTINGS = {"task": "sums", "seed": 0}
ITEMS = [SimpleNamespace(id=f"sums/{i}") for i in range(11)]


def line_of(item):
    return {"id": item.id, "score": int(item.id[5:])}


def done(line):
    return line["score"] is not None


def lines_of(path):
    header, *lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert header["settings"] == SETTINGS
    return header, lines


def opened(path, process, processes, facts=None):
    return contextlib.closing(results_of(path, SETTINGS, facts, process=process, processes=processes))


def test_each_adds_to_its_part_and_the_last_merges(tmp_path):
    path = tmp_path / "out.jsonl"
    for process in range(2):
        with opened(path, process, 2, {"process": process}) as results:
            assert [item.id for item in results.mine(ITEMS)] == [item.id for item in ITEMS[process::2]]
            for item in results.mine(ITEMS):
                results.add([line_of(item)])
            assert not path.exists() and len(parts_of(path)) == process + 1
            assert results.merge(ITEMS, done) == (process == 1)
    header, lines = lines_of(path)
    assert lines == [line_of(item) for item in ITEMS] and len(header["facts"]) == 2
    assert [file.name for file in tmp_path.iterdir()] == ["out.jsonl"]
    with opened(path, 1, 3) as results:
        assert len(results.lines) == 11 and results.merge(ITEMS, done) and not parts_of(path)
    with opened(path, 0, 1) as results:
        assert isinstance(results, Results)


def test_restarts_with_any_number_lose_and_double_nothing(tmp_path):
    """Processes take turns, some die in the middle of a line, and the next ones are more or fewer."""
    for seed in range(30):
        rng, path, written = random.Random(seed), tmp_path / f"{seed}.jsonl", []
        merged = False
        while not merged:
            processes = rng.randint(1, 4)
            with contextlib.ExitStack() as stack:
                living = [stack.enter_context(opened(path, i, processes)) for i in range(processes)]
                plans = [[x for x in part.mine(ITEMS) if x.id not in part.lines] for part in living]
                for which, plan in enumerate(plans):
                    plans[which] = plan if rng.random() < 0.3 else plan[: rng.randint(0, 2)]
                for _ in range(max(map(len, plans))):
                    for part, plan in zip(living, plans, strict=True):
                        if plan:
                            written.append(plan[0].id)
                            part.add([line_of(plan.pop(0))])
                for file in parts_of(path):
                    if rng.random() < 0.3:
                        with file.open("a") as torn:
                            torn.write('{"id": "sums/3", "sco')
                merged = rng.choice(living).merge(ITEMS, done)
                assert not merged or all(part.merge(ITEMS, done) for part in living)
                if processes == 1 and isinstance(living[0], Results):
                    merged = len(living[0].lines) == len(ITEMS)
        assert sorted(written) == sorted(item.id for item in ITEMS), seed
        _, lines = lines_of(path)
        assert sorted(line["score"] for line in lines) == list(range(11)) and not parts_of(path)


def test_a_score_that_comes_later_takes_the_place_of_none(tmp_path):
    path = tmp_path / "out.jsonl"
    with opened(path, 0, 1) as results:
        results.add([line_of(item) | {"score": None} for item in ITEMS])
    with opened(path, 0, 2) as first, opened(path, 1, 2) as second:
        first.change([line_of(item) for item in first.mine(ITEMS)])
        assert not first.merge(ITEMS, done)
        second.change([line_of(item) for item in second.mine(ITEMS)])
        assert second.merge(ITEMS, done) and first.merge(ITEMS, done)
    assert lines_of(path)[1] == [line_of(item) for item in ITEMS]


def test_a_merge_leaves_the_parts_of_the_living(tmp_path):
    path, facts = tmp_path / "out.jsonl", {"machine": "one"}
    with opened(path, 0, 3, facts) as dead:
        dead.add([line_of(item) for item in dead.mine(ITEMS)])
    with opened(path, 1, 3, facts) as first, opened(path, 2, 3, facts) as second:
        for part in (first, second):
            part.add([line_of(item) for item in part.mine(ITEMS)])
        assert first.merge(ITEMS, done)
        assert [part.name for part in parts_of(path)] == ["out.jsonl.part-2"]
        second.add([{"id": "sums/11", "score": 11}])
        assert second.merge(ITEMS, done) and not parts_of(path)
    header, lines = lines_of(path)
    assert [line["score"] for line in lines] == list(range(12)) and header["facts"] == [facts]
    assert [file.name for file in tmp_path.iterdir()] == ["out.jsonl"]


def test_parts_are_of_the_items_that_were_asked_for(tmp_path):
    path = tmp_path / "out.jsonl"
    for process in range(2):
        with contextlib.closing(
            Parts(path, SETTINGS, process=process, processes=2, asked={"limit": 3})
        ) as part:
            part.add([line_of(item) for item in part.mine(ITEMS[:3])])
            if process == 0:
                with pytest.raises(ValueError, match="limit is 11 and was 3; name another file"):
                    Parts(path, SETTINGS, process=1, processes=2, asked={"limit": 11})
                with pytest.raises(ValueError, match="limit is None and was 3"):
                    results_of(path, SETTINGS, process=2, processes=3)
            assert part.merge(ITEMS[:3], done) == (process == 1)
    with contextlib.closing(Parts(path, SETTINGS, process=1, processes=2, asked={"limit": 11})) as part:
        assert len(part.lines) == 3  # a file that is whole may grow


def test_what_is_refused(tmp_path):
    path = tmp_path / "out.jsonl"
    with pytest.raises(ValueError, match="--process must be from 0 to 1 of --processes 2, not 2"):
        results_of(path, SETTINGS, process=2, processes=2)
    with pytest.raises(FileNotFoundError):
        results_of(tmp_path / "none" / "out.jsonl", SETTINGS, process=1, processes=2)
    with opened(path, 0, 2) as results:
        results.add([line_of(ITEMS[0])])
        with pytest.raises(ValueError, match="--process 0 runs already"):
            results_of(path, SETTINGS, process=0, processes=3)
    with pytest.raises(ValueError, match="seed is 1 and was 0"):
        results_of(path, SETTINGS | {"seed": 1}, process=1, processes=2)
    (tmp_path / "out.jsonl.part-1").write_text("no lines\n")
    with pytest.raises(ValueError, match="is no file of results"):
        Parts(path, SETTINGS, process=0, processes=2)
