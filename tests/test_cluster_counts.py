"""The table of `make cluster`: what was run takes the place of what was counted before, and of nothing else."""

import json
import types

from cluster_counts import joined, rows_of, table


def report(test, passed, **row):
    return types.SimpleNamespace(
        when="call", nodeid=test, passed=passed, user_properties=[("cluster", row), ("other", 1)]
    )


def test_rows_of_tests_that_were_not_run_stay(tmp_path):
    stats = {
        "passed": [report("b", True, part="loop", what="kills", cases=3, held=3)],
        "failed": [report("a", False, part="input", what="import", cases=2, held=1, seconds=4)],
    }
    rows = rows_of(types.SimpleNamespace(stats=stats))
    assert [(row["test"], row["passed"]) for row in rows] == [("a", False), ("b", True)]
    path = tmp_path / "cluster.json"
    assert joined(rows, path) == rows
    former = [rows[1] | {"held": 0}, rows[0] | {"test": "c", "part": "zz"}]
    path.write_text(json.dumps({"rows": former}))
    assert joined(rows, path) == [*rows, former[1]]
    assert table(rows)[2] == "| input | import | 2 | 1 | seconds 4 |"
