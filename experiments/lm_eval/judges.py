"""Judges that lm-eval calls for the tasks beside this file: code is run, and answers in `\\boxed{}`
are compared.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from experiments.lm_eval.execution import execute

# of MBPP: solved ones of the prompt, and those that are asked
EXAMPLES, TASKS = (
    (2, 3, 4),
    range(11, 511),
)
SHOWN = 3  # asserts in a prompt; tasks of the sanitized file may have more
PROMPT = (
    "You are an expert Python programmer, and here is your task: {task} "
    "Your code should pass these tests:\n\n{tests}\n[BEGIN]\n"
)
Doc = Mapping[str, Any]


def humaneval(doc: Doc, results: Sequence[str]) -> dict[str, float]:
    """Whether the prompt and its completion pass the item's tests."""
    tests = f"{doc['test']}\ncheck({doc['entry_point']})\n"
    return {"pass@1": float(execute(doc["prompt"] + results[0], tests).passed)}


def mbpp(doc: Doc, results: Sequence[str]) -> dict[str, float]:
    """Whether the code passes the asserts."""
    return {"pass@1": float(execute(results[0], doc["tests"]).passed)}


def mbpp_docs(rows: Any) -> Any:
    """The tasks that are asked, a dataset with "prompt" and "tests".

    Args:
      rows: a dataset of mbpp.jsonl ("text", "test_setup_code") or sanitized-mbpp.json ("prompt",
        "test_imports").
    """
    solved = {row["task_id"]: row for row in rows if row["task_id"] in EXAMPLES}
    before = "".join(
        f"{_asked(solved[i])}{_lines(solved[i]['code'])}\n[DONE]\n\n" for i in EXAMPLES
    )

    def item(row: Doc) -> dict[str, str]:
        setup = [row["test_setup_code"]] if "test_setup_code" in row else list(row["test_imports"])
        # The setup may use the candidate's code, so it comes after it.
        return {
            "prompt": before + _asked(row),
            "tests": _lines("\n".join([*setup, *row["test_list"]])) + "\n",
        }

    asked = rows.filter(lambda row: row["task_id"] in TASKS)
    return asked.map(item, remove_columns=asked.column_names)


def math500(doc: Doc, results: Sequence[str]) -> dict[str, float]:
    """Whether the last boxed answer is the reference, by lm-eval's own normal form of answers."""
    from lm_eval.tasks.hendrycks_math.utils import is_equiv, last_boxed_only_string, remove_boxed

    boxed = last_boxed_only_string(results[0])
    return {
        "exact_match": float(boxed is not None and is_equiv(remove_boxed(boxed), doc["answer"]))
    }


def _asked(row: Doc) -> str:
    task = row["text"] if "text" in row else row["prompt"]
    return PROMPT.format(task=task, tests="\n".join(row["test_list"][:SHOWN]))


def _lines(code: str) -> str:
    return code.replace("\r\n", "\n")
