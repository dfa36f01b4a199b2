"""A report of made-up parts: what is measured, once, inside its time, and what is refused."""

import json
import re
import sys
import time

import pytest
from toy_report import SIZES

from paradec_jax import cli, facts
from paradec_jax.report import Claim, Figure, Part, Table, Task, report
from paradec_jax.report.judging import FAILS, HOLDS, MISSING, OPEN
from paradec_jax.report.parts import Cut
from paradec_jax.report.write import NO_PICTURES, left_out


class Made:
    """A part that counts how often it is measured, and that is late where it is told to be."""

    def __init__(self, name, late=False):
        self.count, self.late, self.left = 0, late, []
        self.part = Part(name, f"Part {name}", 1.0, self.measure, self.tables, self.draw)

    def measure(self, task):
        self.count += 1
        self.left.append(task.left())
        if self.late:
            assert not task.has(1e9, f"the long half of {self.part.name}")
        return {"rows": [{"x": 2.0, "x_range": [1.5, 2.5]}]}

    def tables(self, result):
        return [Table(f"Table of {self.part.name}", ("x",), [[f"{result['rows'][0]['x']}"]], "A note.")]

    def draw(self, plt, result):
        figure, panel = plt.subplots()
        panel.plot([0, result["rows"][0]["x"]])
        return figure


def claim(least, part="one"):
    def figure(results):
        rows = results.get(part, {"rows": []})["rows"]
        return Figure(rows[0]["x"], *rows[0]["x_range"]) if rows else None

    return Claim(
        f"at least {least}", f"x is at least {least}", "README.md", "a processor", figure, least=least
    )


CLAIMS = (claim(1.0), claim(2.0), claim(3.0), claim(1.0, "absent"))


def measure(out, made, **options):
    parts = {one.part.name: one.part for one in made}
    return report(out, sizes=SIZES, parts=parts, claims=CLAIMS, **options)


def test_a_report_is_written_and_nothing_is_measured_twice(tmp_path):
    made = Made("one"), Made("two", late=True)
    stages = []
    found = measure(tmp_path / "r", made, progress=lambda *told: stages.append(told))
    assert [one["verdict"] for one in found] == [HOLDS, OPEN, FAILS, MISSING]
    assert stages[-1] == ("parts", 2, 2)
    text = (tmp_path / "r" / "report.md").read_text()
    assert "x is at least 3.0" in text and "## Part two" in text and "![Part one](one.png)" in text
    assert "| x is at least 3.0 | README.md | a processor | at least 3 |" in text
    assert re.search(r"Left out, there was too little time:\n\n- the long half of two \(needs about", text)
    assert (tmp_path / "r" / "two.png").stat().st_size
    whole = json.loads((tmp_path / "r" / "report.json").read_text())
    assert whole["claims"] == found and set(whole["parts"]) == {"one", "two"}
    assert whole["parts"]["one"]["facts"]["device"] == facts.device()
    assert measure(tmp_path / "r", made) == found
    assert [one.count for one in made] == [1, 1]


def test_more_minutes_mend_what_was_late_alone(tmp_path):
    made = Made("one"), Made("two", late=True)
    measure(tmp_path, made, minutes=1.0)
    measure(tmp_path, made, minutes=2.0)
    assert [one.count for one in made] == [1, 2]


def test_a_part_that_was_late_is_measured_anew_where_its_share_is_more_seconds(tmp_path):
    """By itself it gets all the minutes; but a part that had them is not measured again beside others."""
    made = Made("one"), Made("two", late=True)
    measure(tmp_path, made, minutes=2.0)
    measure(tmp_path, made, minutes=2.0, names=["two"])
    assert made[1].count == 2
    measure(tmp_path, made, minutes=2.0, names=["two"])
    measure(tmp_path, made, minutes=3.0)
    assert [one.count for one in made] == [1, 2]
    record = json.loads((tmp_path / "parts" / "two.json").read_text())
    assert record["due"] == 120 and 100 < record["given"] <= 120


def test_each_part_gets_its_share_and_what_others_left(tmp_path):
    made = Made("one"), Made("two")
    measure(tmp_path, made, minutes=2.0)
    (first,), (second,) = made[0].left, made[1].left
    assert 50 < first <= 60 and first < second <= 120


def test_parts_are_chosen_by_name_and_added_to_those_that_are_there(tmp_path):
    made = Made("one"), Made("two")
    measure(tmp_path, made, names=["two"])
    assert "Not measured yet: one." in (tmp_path / "report.md").read_text()
    measure(tmp_path, made, names=["one"])
    text = (tmp_path / "report.md").read_text()
    assert "## Part one" in text and "## Part two" in text and "Not measured yet" not in text
    assert [one.count for one in made] == [1, 1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda record: record["facts"]["device"].update(kind="another"),
            "device .kind. is .* and was 'another'",
        ),
        (lambda record: record["facts"].update(commit="0" * 40), "commit is .* and was '0000"),
        (lambda record: record["facts"]["versions"].update(jax="0.0"), "versions .jax. is .* and was '0.0'"),
        (lambda record: record["sizes"].update(steps=7), "steps is 2 and was 7"),
        (lambda record: record.pop("facts"), "is no part of a report"),
    ],
)
def test_what_was_measured_under_other_conditions_is_refused(tmp_path, change, message):
    made = Made("one"), Made("two")
    measure(tmp_path, made, names=["one"])
    path = tmp_path / "parts" / "one.json"
    record = json.loads(path.read_text())
    change(record)
    path.write_text(json.dumps(record))
    before = path.read_text(), (tmp_path / "report.md").read_text()
    with pytest.raises(ValueError, match=message):
        measure(tmp_path, made)
    assert before == (path.read_text(), (tmp_path / "report.md").read_text())
    assert made[1].count == 0


@pytest.mark.parametrize("error", [KeyboardInterrupt, KeyError])
def test_a_part_that_fails_leaves_the_others(tmp_path, error):
    def broken(task):
        raise error

    made = Made("one"), Made("two")
    parts = {"one": made[0].part, "broken": Part("broken", "", 1.0, broken, lambda result: [])}
    parts["two"] = made[1].part
    with pytest.raises(KeyboardInterrupt if error is KeyboardInterrupt else RuntimeError):
        report(tmp_path, sizes=SIZES, parts=parts, claims=CLAIMS)
    text = (tmp_path / "report.md").read_text()
    assert "## Part one" in text and not (tmp_path / "parts" / "broken.json").exists()
    assert ("## Part two" in text) == (error is KeyError)  # who stops the command stops all


def test_without_matplotlib_a_line_says_so(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    measure(tmp_path, [Made("one")])
    assert NO_PICTURES in (tmp_path / "report.md").read_text()
    assert not list(tmp_path.glob("*.png"))


def test_bad_requests_end_in_one_sentence(tmp_path, capsys):
    for words, message in (
        (["--parts", "nothing"], "there is no part nothing; the parts are device, compare"),
        (["--minutes", "0"], "minutes must be above 0, not 0.0"),
    ):
        assert cli.main(["report", "--out", str(tmp_path / "r"), *words]) == 1
        assert message in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert cli.main(["report", "--out", str(tmp_path / "file")]) == 1
    assert "is a file; --out is a folder" in capsys.readouterr().err
    assert not (tmp_path / "r").exists()


def test_a_task_says_what_did_not_fit_and_what_the_device_refused(monkeypatch):
    task = Task(SIZES, time.monotonic() + 100)
    monkeypatch.setattr(facts, "memory_left", lambda: 2**30)
    assert task.fits(2**29, "half") and not task.fits(2**31, "twice") and not task.cut[1:]
    with task.survives("a program"):
        raise RuntimeError("RESOURCE_EXHAUSTED: no room\nmore")
    assert task.cut == [
        Cut("twice (needs about 2.0 GiB, 1.0 GiB are left)", "it does not fit the memory"),
        Cut("a program", "the device refused it (RESOURCE_EXHAUSTED: no room)"),
    ]
    assert not task.late
    own = [own for _, own in task.each(["a", "b"], [3.0, 1.0])]
    assert 70 < own[0].left() <= 75 and own[0].cut is task.cut


def test_the_command_prints_the_claims(tmp_path, capsys, monkeypatch):
    from paradec_jax.report import run

    monkeypatch.setattr(run, "sizes_here", lambda: SIZES)
    assert cli.main(["report", "--out", str(tmp_path / "r"), "--parts", "device", "--minutes", "1"]) == 0
    told = capsys.readouterr()
    assert "not measured" in told.out and "report.md" in told.out
    record = json.loads((tmp_path / "r" / "parts" / "device.json").read_text())
    assert record["result"]["rows"][0]["presets"] == ["test-causal"]


def test_passes_that_time_does_not_suffice_for_are_told():
    task = Task(SIZES, time.monotonic() + 100)
    task.passed(SIZES.passes, "a")
    assert not task.cut and not task.late
    task.passed(1, "b")
    assert task.cut == [Cut("passes 2 to 2", "no time was left", "b")] and task.late


@pytest.mark.slow
def test_the_whole_command_at_toy_size_and_again(tmp_path, capsys, monkeypatch):
    from paradec_jax.report import PARTS, compare, pointers, run

    every, two = compare.rivals_of, pointers.RIVALS[:2]
    monkeypatch.setattr(run, "sizes_here", lambda: SIZES)
    monkeypatch.setattr(compare, "rivals_of", lambda *of: every(*of)[:2])
    monkeypatch.setattr(pointers, "RIVALS", two)
    words = ["report", "--out", str(tmp_path / "r"), "--minutes", "10"]
    assert cli.main(words) == 0
    assert "report.md" in capsys.readouterr().out
    whole = json.loads((tmp_path / "r" / "report.json").read_text())
    assert set(whole["parts"]) == set(PARTS) and not any(part["late"] for part in whole["parts"].values())
    found = {claim["name"]: claim["verdict"] for claim in whole["claims"]}
    assert found["r = 1 / r = 16"] != MISSING and found["wave that holds an answer"] != MISSING
    assert found["carried states"] == MISSING  # without Jacobi decoding
    text = (tmp_path / "r" / "report.md").read_text()
    assert all(f"## {part.title}" in text for part in PARTS.values()) and "Not measured yet" not in text
    before = {path.name: path.read_text() for path in (tmp_path / "r" / "parts").iterdir()}
    assert cli.main(words) == 0
    assert before == {path.name: path.read_text() for path in (tmp_path / "r" / "parts").iterdir()}


def test_jobs_that_time_does_not_suffice_for_are_left_out():
    task = Task(SIZES, time.monotonic() + 0.5)
    jobs = {f"job {i}": lambda: time.sleep(0.2) or "done" for i in range(40)}
    done = task.ready(jobs, "made")
    assert done["job 0"] == "done" and 0 < len(task.cut) < 40 and len(done) + len(task.cut) == 40
    assert task.late and {one.why for one in task.cut} == {"no time was left to compile it"}
    late = Task(SIZES, time.monotonic() - 1)
    assert "job 0" in late.ready(jobs, "made") and len(late.cut) > 20


def test_what_was_left_out_for_one_reason_stands_together():
    found = [("a", "x", ""), ("b", "y", "M"), ("c", "x", ""), ("d", "x", "M")]
    cut = [{"what": what, "why": why, "of": of} for what, why, of in found]
    x, y = ["", "Left out, x:", "", "- a; c", "- M: d"], ["", "Left out, y:", "", "- M: b"]
    assert left_out(cut) == x + y
