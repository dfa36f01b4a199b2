"""Benchmark files: prompts, references, scores, and a sentence for every file that cannot be read."""

import operator
import os
import re
from pathlib import Path

import pytest
from benchmark_files import FUNCTIONS, SUMS, TASKS, needs_linux, task, write

from paradec_jax.evaluate.benchmarks import BENCHMARKS, Item, gsm8k, humaneval, mbpp
from paradec_jax.evaluate.benchmarks.items import read_records
from paradec_jax.evaluate.execution import execute

DATA = os.environ.get("PARADEC_DATA")
needs_data = pytest.mark.skipif(DATA is None, reason="PARADEC_DATA names no folder of benchmark files")

SIGNS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}


class TestFiles:
    def test_lines_a_list_and_gzip_hold_the_same(self, tmp_path):
        files = [write(tmp_path / f"f{ending}", SUMS) for ending in (".jsonl", ".jsonl.gz", ".json")]
        assert [[row.values for row in read_records(path)] for path in files] == [SUMS] * 3

    @pytest.mark.parametrize("name", BENCHMARKS)
    def test_what_cannot_be_read(self, tmp_path, name):
        read = BENCHMARKS[name].read
        with pytest.raises(FileNotFoundError, match="there is no file"):
            read(tmp_path / "none.jsonl")
        cases = [
            ("", "holds no item"),
            ("\n\n", "holds no item"),
            ('{"question": \n', "line 1: not valid JSON"),
            ("\n[1]\n", "line 2: expected an object, not a list"),
        ]
        for text, message in cases:
            (tmp_path / "bad.jsonl").write_text(text)
            with pytest.raises(ValueError, match=message):
                read(tmp_path / "bad.jsonl")
        (tmp_path / "bad.jsonl.gz").write_bytes(b"no gzip")
        with pytest.raises(ValueError, match="cannot be read"):
            read(tmp_path / "bad.jsonl.gz")
        (tmp_path / "bad.json").write_text("{}")
        with pytest.raises(ValueError, match="expected a list of objects, not an object"):
            read(tmp_path / "bad.json")

    @pytest.mark.parametrize(
        ("name", "rows", "field"),
        [
            ("gsm8k", SUMS, "answer"),
            ("gsm8k", SUMS, "question"),
            *(("humaneval", FUNCTIONS, field) for field in ("task_id", "prompt", "entry_point", "test")),
            *(("mbpp", TASKS[1:], field) for field in ("task_id", "test_list")),
        ],
    )
    def test_a_missing_field_is_named_with_its_line(self, tmp_path, name, rows, field):
        rows = [*rows[:-1], {key: value for key, value in rows[-1].items() if key != field}]
        if name == "mbpp":
            rows[-1] = rows[-1] | ({} if field == "task_id" else {"task_id": 20})
        path = write(tmp_path / "f.jsonl", rows)
        with pytest.raises(ValueError, match=f'line {len(rows)}: the field "{field}" is missing'):
            BENCHMARKS[name].read(path)

    def test_fields_of_another_kind(self, tmp_path):
        path = write(tmp_path / "f.jsonl", [{"question": 1, "answer": "#### 1"}])
        with pytest.raises(ValueError, match='line 1: "question" must be a text, not a number'):
            gsm8k.read(path)
        path = write(tmp_path / "f.jsonl", [{"question": "?", "answer": "four"}])
        with pytest.raises(ValueError, match='line 1: "answer" must end in "#### number"'):
            gsm8k.read(path)
        path = write(tmp_path / "f.jsonl", [*TASKS, task(13) | {"test_list": "assert"}])
        with pytest.raises(ValueError, match='line 10: "test_list" must be a list of texts, not a text'):
            mbpp.read(path)
        path = write(tmp_path / "f.jsonl", [TASKS[0] | {"task_id": "11"}])
        with pytest.raises(ValueError, match='"task_id" must be a whole number, not a text'):
            mbpp.read(path)

    def test_an_item_twice(self, tmp_path):
        with pytest.raises(ValueError, match="item Own/0 stands in the file more than once"):
            humaneval.read(write(tmp_path / "f.jsonl", [*FUNCTIONS, FUNCTIONS[0]]))
        with pytest.raises(ValueError, match="item Mbpp/11 stands in the file more than once"):
            mbpp.read(write(tmp_path / "f.jsonl", [*TASKS, task(11)]))


class TestGsm8k:
    def test_prompts(self, tmp_path):
        path = write(tmp_path / "f.jsonl", SUMS)
        source = gsm8k.read(path, shots=2, examples=path)
        first = "Q: What is 2 + 3?\nA: It is 2 + 3 = 5. The answer is 5.\n\n"
        second = "Q: What is 1,000 + 1?\nA: Add one. The answer is 1,001.\n\n"
        assert source.items[2].prompt == f"{first}{second}Q: What is 3 - 7?\nA:"
        assert [item.reference for item in source.items] == ["5", "1,001", "-4"]
        assert [item.id for item in source.items] == ["gsm8k/0", "gsm8k/1", "gsm8k/2"]
        assert source.items[0].stop == ("Q:",) and "rows of the file" in source.examples
        assert gsm8k.read(path, shots=0).items[0].prompt == "Q: What is 2 + 3?\nA:"

    def test_own_examples(self, tmp_path):
        source = gsm8k.read(write(tmp_path / "f.jsonl", SUMS))
        assert source.shots == 8 and "written for this library" in source.examples
        assert source.items[0].prompt.count("The answer is") == 8
        for _, steps, answer in gsm8k.EXAMPLES:
            assert gsm8k.score(Item("", "", (), answer), steps).flexible
            sums = re.findall(r"(\d+) ([-+*/]) (\d+) = (\d+)", steps)
            assert sums and all(SIGNS[sign](int(x), int(y)) == int(z) for x, sign, y, z in sums)

    def test_examples_are_enough_or_refused(self, tmp_path):
        path = write(tmp_path / "f.jsonl", SUMS)
        with pytest.raises(ValueError, match="holds 3 items, fewer than the 4 examples"):
            gsm8k.read(path, shots=4, examples=path)
        with pytest.raises(ValueError, match="shots must be 0 to 8 for gsm8k, not 9"):
            gsm8k.read(path, shots=9)

    @pytest.mark.parametrize(
        ("right", "text", "flexible", "strict"),
        [
            ("72", " 48 / 2 = 24. 48 + 24 = 72. The answer is 72.", True, True),
            ("72", " The answer is 72", True, True),
            ("1,001", " The answer is 1001.", True, True),
            ("1001", " It costs $1,001.", True, False),
            ("72", " The answer is $72.", True, False),
            ("-4", " The answer is -4.", True, True),
            ("4", " The answer is -4.", False, False),
            ("72", " The answer is 72. That is 3 more.", False, True),
            ("72", " #### 72", True, False),
            ("5", " so 5 it is", True, False),
            ("0.5", " The answer is 0.5.", True, True),
            ("72", " I do not know", False, False),
            ("72", "", False, False),
            ("5", " The answer is 50.", False, False),
        ],
    )
    def test_extractions(self, right, text, flexible, strict):
        found = gsm8k.score(Item("", "", (), right), text)
        assert (found.flexible, found.strict) == (flexible, strict)


class TestCode:
    def test_humaneval_programs(self, tmp_path):
        plain, packed = (write(tmp_path / f"f{ending}", FUNCTIONS) for ending in (".jsonl", ".jsonl.gz"))
        source = humaneval.read(plain)
        assert source == humaneval.read(packed)
        program = humaneval.program(source.items[0], "    return 2 * x\n")
        assert program.code == FUNCTIONS[0]["prompt"] + "    return 2 * x\n"
        assert program.tests.endswith("assert candidate(2) == 4\n\ncheck(double)\n")
        with pytest.raises(ValueError, match="shots must be 0 for humaneval"):
            humaneval.read(plain, shots=1)

    def test_mbpp_prompts_and_splits(self, tmp_path):
        source = mbpp.read(write(tmp_path / "f.jsonl", TASKS))
        assert [item.id for item in source.items] == ["Mbpp/11", "Mbpp/12", "Mbpp/510"]
        prompt = source.items[0].prompt
        assert prompt.count("[BEGIN]") == 4 and prompt.count("[DONE]") == 3 and prompt.endswith("[BEGIN]\n")
        assert "def add(x):\n    return x + 2\n[DONE]\n\nYou are" in prompt and "\r" not in prompt
        assert "assert add(2) == 13" in prompt and "assert add(3) == 14" not in prompt  # three are shown
        assert "assert add(3) == 14" in source.items[0].reference  # and all are run
        assert mbpp.read(tmp_path / "f.jsonl", shots=0).items[0].prompt.count("[BEGIN]") == 1

    def test_mbpp_needs_its_examples_and_tests(self, tmp_path):
        with pytest.raises(ValueError, match="lacks task 2, 4, an example"):
            mbpp.read(write(tmp_path / "f.jsonl", [task(3), task(11)]))
        with pytest.raises(ValueError, match="holds no task from 11 to 510"):
            mbpp.read(write(tmp_path / "f.jsonl", [task(2), task(3), task(4)]))

    def test_sanitized(self, tmp_path):
        rows = []
        for row in TASKS:
            new = {key: row[key] for key in ("task_id", "code", "test_list")}
            rows.append(new | {"prompt": row["text"], "test_imports": ["import math"]})
        full = mbpp.read(write(tmp_path / "f.jsonl", TASKS))
        sanitized = mbpp.read(write(tmp_path / "f.json", rows))
        assert [item.prompt for item in full.items] == [item.prompt for item in sanitized.items]
        assert sanitized.items[0].reference.startswith("import math\nassert add(0)")

    @needs_linux
    def test_right_code_passes_and_wrong_code_fails(self, tmp_path):
        source = humaneval.read(write(tmp_path / "h.jsonl", FUNCTIONS))
        codes = [row["canonical_solution"] for row in FUNCTIONS]
        for texts, expected in ((codes, [True, True]), (codes[::-1], [False, False])):
            programs = [humaneval.program(*pair) for pair in zip(source.items, texts, strict=True)]
            assert [execute(program, allow=True).passed for program in programs] == expected
        source = mbpp.read(write(tmp_path / "m.jsonl", TASKS))
        for item, text, expected in [
            (source.items[1], task(12)["code"], True),
            (source.items[1], task(11)["code"], False),
        ]:
            assert execute(mbpp.program(item, text), allow=True).passed is expected


@pytest.mark.peers
@needs_data
class TestRealFiles:
    def test_gsm8k(self):
        folder = Path(DATA) / "gsm8k"
        source = gsm8k.read(folder / "test.jsonl", examples=folder / "train.jsonl")
        assert len(source.items) == 1319 and "<<" not in source.items[0].prompt
        solutions = [row.text("answer") for row in read_records(folder / "test.jsonl")]
        scores = [gsm8k.score(*pair) for pair in zip(source.items, solutions, strict=True)]
        assert all(score.flexible for score in scores) and not any(score.strict for score in scores)

    @needs_linux
    def test_humaneval(self):
        path = Path(DATA) / "humaneval" / "HumanEval.jsonl.gz"
        source = humaneval.read(path)
        assert len(source.items) == 164
        rows = read_records(path)
        for i in range(0, 164, 20):
            program = humaneval.program(source.items[i], rows[i].text("canonical_solution"))
            assert execute(program, allow=True).passed, source.items[i].id

    @needs_linux
    @pytest.mark.parametrize(("name", "count"), [("mbpp.jsonl", 500), ("sanitized-mbpp.json", 257)])
    def test_mbpp(self, name, count):
        path = Path(DATA) / "mbpp" / name
        source = mbpp.read(path)
        assert len(source.items) == count
        codes = {f"Mbpp/{row.number('task_id')}": row.text("code") for row in read_records(path)}
        # Every fiftieth, and the one whose setup needs the candidate's code.
        for item in [*source.items[::50], *(item for item in source.items if item.id == "Mbpp/367")]:
            assert execute(mbpp.program(item, codes[item.id]), allow=True).passed, item.id
