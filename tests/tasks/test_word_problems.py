"""The word-problem generator."""

import itertools
import operator
import re

import pytest

from experiments.tasks import auxiliary, vocabulary
from experiments.tasks import words as wp
from experiments.tasks.__main__ import Options, drawn, main
from paradec_jax.data.problems import ASSETS, exact_answers, extract_answer, read_problems

EQUATION = re.compile(r"(\d+) ([+*/-]) (\d+) = (\d+)")
OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}
ALL_STEPS = range(wp.MIN_STEPS, wp.MAX_STEPS + 1)


@pytest.fixture(scope="module")
def tokenizer():
    return vocabulary.build_tokenizer()


@pytest.fixture(scope="module")
def sample():
    return [wp.problem(3, i, "train", steps) for steps in ALL_STEPS for i in range(150)]


def question(item):
    return item.prompt.removeprefix("Question: ").removesuffix("\nAnswer:\n")


# A reader of its own: it solves the question from the story and knows nothing of how the story was
# made.


def solve(question, items):
    held = {}
    *story, asked = re.split(r"(?<=[.]) ", question)
    for sentence in story:
        read(sentence.rstrip("."), items, held)
    names = re.findall(r"[A-Z][a-z]+", asked.removeprefix("How"))
    if "together" in asked:
        return held[names[0]] + held[names[1]]
    return held[names[0]] - held[names[1]] if "more" in asked else held[names[0]]


def read(sentence, items, held):
    subject, verb, *rest = sentence.split()
    numbers = [int(word) for word in rest if word.isdigit()]
    source = rest[-1]
    if items not in rest or subject == "Each":
        return
    if "half of the" in sentence:
        held[subject] //= 2
    elif verb in ("buys", "finds"):
        held[subject] += numbers[0]
    elif verb in ("loses", "gives"):
        held[subject] -= numbers[0]
    elif "together" in rest:
        held[subject] = held[rest[-4]] + held[rest[-2]]
    elif "more" in rest:
        held[subject] = held[source] + numbers[0]
    elif "fewer" in rest:
        held[subject] = held[source] - numbers[0]
    elif "half" in rest:
        held[subject] = held[source] // 2
    elif "twice" in rest or "times" in rest:
        held[subject] = held[source] * (numbers[0] if numbers else 2)
    else:
        held[subject] = numbers[0]


def test_equations_hold(sample):
    for item in sample:
        *lines, last = item.solution.split("\n")
        assert len(lines) == item.steps
        for line in lines:
            (found,) = EQUATION.findall(line)
            left, right, result = int(found[0]), int(found[2]), int(found[3])
            assert OPERATORS[found[1]](left, right) == result
            assert {left, right, result} <= set(range(wp.MAX_VALUE + 1))
        assert last == f"#### {result}"


def test_story_alone_gives_the_answer(sample):
    for item in sample:
        items = re.search(r"How many (?:more )?(\w+)", question(item))[1]
        assert solve(question(item), items) == extract_answer(item.solution), item


def test_every_wording_and_distractor_appears(sample):
    text = "\n".join(question(item) for item in sample)
    templates = [relation.sentence for relation in wp.RELATIONS]
    templates += [*wp.DISTRACTORS, wp.ASK_VALUE, wp.ASK_MORE, wp.ASK_TOTAL]
    for template in templates:
        assert re.search(re.sub(r"\\\{\w+\\\}", r"\\w+", re.escape(template)), text), template
    prices = sum("costs" in question(item) or "years old" in question(item) for item in sample)
    assert 0.2 < prices / len(sample) < 0.8


@pytest.mark.slow
def test_splits_are_disjoint_across_seeds():
    questions = {split: set() for split in wp.SPLITS}
    for split, seed in itertools.product(wp.SPLITS, (0, 11)):
        questions[split] |= {question(wp.problem(seed, i, split, (2, 4))) for i in range(1000)}
    for one, other in itertools.combinations(wp.SPLITS, 2):
        assert not questions[one] & questions[other]
    assert all(wp.split_of(text) == split for split, texts in questions.items() for text in texts)
    assert min(len(texts) for texts in questions.values()) > 1990


@pytest.mark.parametrize(
    ("name", "count", "split"), [("unseen", 1000, "test"), ("tuning", 200, "tune")]
)
def test_the_problems_of_the_package_are_those_of_seed_1(name, count, split, tmp_path):
    """Byte for byte, as its command writes them; the first of them are those of a smaller number."""
    written, bundled = tmp_path / "problems.jsonl", ASSETS / f"{name}.jsonl"
    main(Options("words", written, count=count, seed=1, split=split))
    assert written.read_bytes() == bundled.read_bytes()
    assert read_problems(name)[:50] == wp.word_problems(50, seed=1, split=split)
    assert len({item.prompt for item in read_problems(name)}) == count


@pytest.mark.parametrize("task", ["pointers", "chains", "sums", "steps", "recalls"])
def test_every_task_is_written_as_problems(task, tmp_path):
    main(Options(task, tmp_path / "task.jsonl", count=3, seed=2))
    items = read_problems(tmp_path / "task.jsonl")
    assert items == drawn(Options(task, tmp_path, count=3, seed=2)) and len(items) == 3
    assert exact_answers(items, [item.solution for item in items]).all()
    assert not exact_answers(items, ["#### 3"] * 3).any()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 0, "dev", 3), "split must be one of train, tune, test"),
        ((0, 0, "train", 9), "steps must lie in 2..8"),
        ((0, 0, "train", (5, 4)), "steps must lie in 2..8"),
        ((-1, 0, "train", 3), "must not be negative"),
    ],
)
def test_bad_arguments_of_problem(arguments, message):
    with pytest.raises(ValueError, match=message):
        wp.problem(*arguments)


@pytest.mark.parametrize("kind", ["sums", "steps"])
def test_auxiliary_tasks_compute_right_and_count_their_numbers(kind):
    for index in range(50):
        item = auxiliary.auxiliary_task(3, index, kind)
        assert (
            item
            == auxiliary.auxiliary_task(3, index, kind)
            != auxiliary.auxiliary_task(4, index, kind)
        )
        equations = EQUATION.findall(item.answer)
        assert len(equations) == len(item.answer.splitlines())
        for left, operation, right, result in equations:
            assert OPERATORS[operation](int(left), int(right)) == int(result)
        counted = [item.answer[low:high].strip() for low, high in item.spans]
        wanted = [(e[3],) if kind == "sums" else (e[0], e[2], e[3]) for e in equations]
        assert counted == list(itertools.chain(*wanted))
    with pytest.raises(ValueError, match="kind must be one of sums, steps, recalls"):
        auxiliary.auxiliary_task(0, 0, "songs")


def test_recalls_are_of_the_newest_amount():
    for index in range(50):
        item = auxiliary.auxiliary_task(3, index, "recalls")
        held, starts, said = {}, dict(item.spans), 0
        for told in re.finditer(r"([A-Z]\w+)( now)? has (\d+) \w+\.", item.answer):
            name, now, amount = told.groups()
            assert (now is not None) <= (name in held)
            assert (told.start(3) in starts) == (name in held and now is None)
            if told.start(3) in starts:
                assert held[name] == amount and starts[told.start(3)] == told.end(3) + 1
            held[name], said = amount, said + 1
        assert said == 4 * auxiliary.MAX_STEPS and len(starts) > said / 2


def test_the_mask_comes_after_all_other_tokens(tokenizer):
    masked, text = vocabulary.build_tokenizer(mask=True), wp.problem(0, 0, "train", 4).prompt
    spec = vocabulary.denoising_spec(masked)
    assert masked.vocab_size == tokenizer.vocab_size + 1 == spec.mask + 1
    assert masked.encode(text) == tokenizer.encode(text)
    assert masked.encode("<|mask|>") == [spec.mask] and masked.decode([spec.mask]) == "<|mask|>"
    assert (spec.bos, spec.stop, spec.pad) == (1, (2,), 0) and spec.alignment == "own"
    assert vocabulary.denoising_spec(masked, "next").alignment == "next"
