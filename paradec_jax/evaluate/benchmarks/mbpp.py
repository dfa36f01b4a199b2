"""MBPP (Austin et al. 2021, arXiv 2108.07732): a function from a sentence and three asserts, three-shot.

The prompt is the paper's, with tasks 2, 3 and 4 of the same file as examples. Of the full file (JSON lines) tasks
11 to 510 are asked, of the sanitized one (a JSON list) those that it kept of them.
"""

import os

from paradec_jax.evaluate.benchmarks.items import Item, Record, Source, check_shots, distinct, read_records
from paradec_jax.evaluate.execution import Sample

EXAMPLES = (2, 3, 4)
TEST = range(11, 511)
STOP = ("[DONE]",)

PROMPT = (
    "You are an expert Python programmer, and here is your task: {task} "
    "Your code should pass these tests:\n\n{tests}\n[BEGIN]\n"
)
_SHOWN = 3  # asserts in a prompt; sanitized tasks may have more


def read(
    path: str | os.PathLike[str],
    *,
    shots: int = len(EXAMPLES),
    examples: str | os.PathLike[str] | None = None,
) -> Source:
    """Reads mbpp.jsonl ("text", "test_setup_code") or sanitized-mbpp.json ("prompt", "test_imports").

    Args:
      path: the tasks, those of the examples among them.
      shots: solved examples, 0 to 3.
      examples: must be None; examples come from the file itself.

    Raises:
      FileNotFoundError, ValueError: a file that cannot be read, or one without examples or test tasks.
    """
    check_shots(shots, len(EXAMPLES), "mbpp")
    if examples is not None:
        raise ValueError("mbpp takes its examples from the file itself: leave the file of examples out")
    rows = [(row.number("task_id"), row) for row in read_records(path)]
    known, wanted = dict(rows), EXAMPLES[:shots]
    missing = [str(number) for number in wanted if number not in known]
    if missing:
        raise ValueError(f"{os.fspath(path)} lacks task {', '.join(missing)}, an example of the prompt")
    before = "".join(f"{_prompt(known[i])}{_lines(known[i].text('code'))}\n[DONE]\n\n" for i in wanted)
    # The name under which judges of MBPP samples know a task.
    items = [
        Item(f"Mbpp/{number}", before + _prompt(row), STOP, _tests(row))
        for number, row in rows
        if number in TEST
    ]
    if not items:
        raise ValueError(f"{os.fspath(path)} holds no task from {TEST.start} to {TEST.stop - 1}")
    told = f"tasks {', '.join(map(str, wanted))} of the same file" if shots else "none"
    return Source(distinct(items), shots, told)


def program(item: Item, text: str) -> Sample:
    """What must run to its end for a function to be right."""
    return Sample(text, item.reference)


def _prompt(row: Record) -> str:
    task = row.text("text" if "text" in row.values else "prompt")
    return PROMPT.format(task=task, tests="\n".join(row.texts("test_list")[:_SHOWN]))


def _tests(row: Record) -> str:
    """The asserts after what they need, which may use the candidate's code and so comes after it."""
    full = "test_setup_code" in row.values
    setup = [row.text("test_setup_code")] if full else list(row.texts("test_imports"))
    return _lines("\n".join([*setup, *row.texts("test_list")])) + "\n"


def _lines(code: str) -> str:
    return code.replace("\r\n", "\n")
