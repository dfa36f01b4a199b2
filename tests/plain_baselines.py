"""Prompt lookup, lookahead and drafts by masks in plain Python, one row and one call at a time, for
the counts of the laws.
"""

import jax
import jax.numpy as jnp
from stubs import PROMPTS, StubCausal, StubDrafter

from paradec_jax.decode.rules.randomness import Purpose, fold

Count = tuple[int, ...]  # calls, positions, and what the networks declare


def keep(pool: dict, ngram: list[int], places: int):
    """Puts an n-gram at the end of its key's list; the oldest goes where there are too many."""
    entries = pool.setdefault(ngram[0], [])
    if tuple(ngram[1:]) in entries:
        entries.remove(tuple(ngram[1:]))
    entries.append(tuple(ngram[1:]))
    del entries[:-places]


def draft_of(tokens: list[int], max_ngram: int, min_ngram: int, num_pred: int) -> list[int]:
    """What follows the first earlier occurrence of the longest tail, if all of it exists."""
    for n in range(max_ngram, min_ngram - 1, -1):
        for start in range(len(tokens) - n):
            end = start + n
            fits = end + num_pred <= len(tokens) and end < len(tokens) - n
            if fits and tokens[start:end] == tokens[-n:]:
                return tokens[end : end + num_pred]
    return []


def right(draft: list[int] | tuple[int, ...], truth: list[int]) -> int:
    """Length of the common prefix."""
    return next(
        (i for i, pair in enumerate(zip(draft, truth, strict=False)) if len({*pair}) > 1),
        len(draft),
    )


def text_of(stub: StubCausal, length: int, new: int) -> list[int]:
    """The prompt of `PROMPTS` that has a length, and what follows it, beyond the budget too."""
    prompt = next(list(p) for p in PROMPTS if len(p) == length)
    return prompt + stub.expected(prompt, new + 50)


def prompt_lookup_count(options: dict, stub: StubCausal, prompt: int, new: int) -> Count:
    """A call commits the right tokens of its draft and one more."""
    text, length, calls, positions = text_of(stub, prompt, new), prompt + 1, 1, prompt
    while length < prompt + new:
        done, most = text[:length], options["max_ngram"]
        few = draft_of(done, most, options["min_ngram"], 1)
        draft = draft_of(done, most, most, options["num_pred"]) or few
        length += right(draft, text[length:]) + 1
        calls, positions = calls + 1, positions + 1 + len(draft)
    return calls, positions


def guesses_of(drafter: StubDrafter, text: list[int]) -> list[int]:
    """Drafts after a text's newest token, of masks that stand where it stands and after it: a mask
    counts as token 0 to those after it, and knows the draft before its own.
    """
    known, stub, drafts = text[:-1], drafter.of, text[-1:]
    for _ in range(drafter.count):
        known = [*known, 0]
        wrong = drafter.errs and (len(known) - 1) % 3 == 0
        guess = stub.expected(known, 1)[0] + wrong + stub.weights[0] * drafts[-1]
        drafts.append(guess % stub.vocab_size)
    return drafts[1:]


def drafted_count(options: dict, stub: StubCausal, prompt: int, new: int) -> Count:
    """A call commits the right drafts and one token more; drafts are there where masks stood at the
    place where the text ended: after all drafts, which are equally sure, and after the fewest.
    """
    size, text = options["drafter"].count, text_of(stub, prompt, new)
    count = options.get("places") or size + 1
    places = {*range(count - 1), size}
    length, calls, positions, ready = prompt + 1, 1, prompt + size, True
    while length < prompt + new:
        drafts = guesses_of(options["drafter"], text[:length]) if ready else []
        accepted = right(drafts, text[length:])
        positions += 1 + size + (count * size if ready else 0)
        ready = not ready or accepted in places
        length, calls = length + accepted + 1, calls + 1
    return calls, positions


def first_window(prompt: list[int], ahead: int) -> list[int]:
    """Tokens of the prompt, drawn with the key of the row that `tiny_request` gives it."""
    key = jax.random.fold_in(jax.random.key(0), [list(p) for p in PROMPTS].index(prompt))
    keys = fold(key[None], Purpose.DRAFT, len(prompt) + jnp.arange(ahead)[None])[0]
    return [prompt[int(jax.random.randint(k, (), 0, len(prompt)))] for k in keys]


def lookahead_count(options: dict, stub: StubCausal, prompt: int, new: int) -> Count:
    """Rows of the window are the lists of the paper: level 0 without the newest token, then N - 2
    levels more.
    """
    level, width, places = options["level"], options["window"], options["guesses"]
    from_prompt = options.get("pool_from_prompt", False)
    text, length, pool = text_of(stub, prompt, new), prompt, {}
    if from_prompt:
        for start in range(prompt - level + 1):
            keep(pool, text[start : start + level], places)
    rows = [first_window(text[:prompt], width + level - 3)]
    calls, positions = 0, prompt - 1
    while length < prompt + new:
        committed, columns = text[:length], len(rows[0]) + 1
        full = len(rows) == level - 1
        guesses = list(pool.get(committed[-1], [])) if full else []
        calls += 1
        positions += columns * len(rows) + len(guesses) * (level - 1)

        heads = [committed[-1:] + rows[0], *rows[1:]]
        fresh = [
            stub.expected(committed + rows[0][:i] + [row[i] for row in rows[1:]], 1)[0]
            for i in range(columns)
        ]
        if full:
            for i in range(width):
                keep(pool, [row[i] for row in heads] + [fresh[i]], places)
            rows = [rows[1][1:], *rows[2:], fresh]
        else:
            rows = [row[1:] for row in rows] + [fresh[1:]]
        hit = max((right(guess[:-1], text[length:]) for guess in guesses), default=0)
        for _ in range(hit + 1):
            length += 1
            if from_prompt and length >= level:
                keep(pool, text[length - level : length], places)
    return calls, positions
