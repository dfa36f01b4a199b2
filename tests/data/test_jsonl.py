"""Lines of JSON as examples: which tokens count, what is refused, batches that have every example
once.
"""

import dataclasses
import itertools
import json
import string
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from small_tokenizers import letters
from stubs import tiny_causal, tiny_causal_params

from paradec_jax.config import TokenSpec
from paradec_jax.data import jsonl
from paradec_jax.data.batches import example_batches
from paradec_jax.losses import next_token_loss

WORDS = letters("?", *string.ascii_lowercase, *":;<>")
EACH = "{% for m in messages %}{{ m.role[0] + ':' }}"
PREFIXES = EACH + "{{ m.content }};{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
MARKS = EACH + "{% if m.role[0] == 'u' %}{{ m.content }}{% else %}{%- generation %}{{ m.content }}"
MARKS += "{% endgeneration %}{% endif %};{% endfor %}"
NEITHER = (
    "{% for m in messages %}{{ m.role[0] + m.content if loop.last else m.content }}{% endfor %}"
)
TURNS = zip(itertools.cycle(["user", "assistant"]), ["ab", "cd", "e", "f"], strict=False)
TALK = {"messages": [{"role": role, "content": text} for role, text in TURNS]}
PAIR = {"prompt": "ab", "response": "cd"}


def read(folder, *lines, template=None, length=64, stop=">", **options):
    spec = TokenSpec(bos=WORDS.id_of("<"), stop=tuple(map(WORDS.id_of, stop)))
    model = SimpleNamespace(
        tokenizer=WORDS, token_spec=spec, chat_template=template, special_tokens={}
    )
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    if texts:
        (folder / "lines.jsonl").write_text("\n".join(texts))
    return jsonl.read_examples(folder, model, folder=folder / "kept", length=length, **options)


def shown(examples):
    """The texts of examples, with brackets around what counts."""
    found = []
    for i in range(len(examples)):
        groups = itertools.groupby(zip(*examples[i], strict=True), key=lambda pair: bool(pair[1]))
        parts = [(WORDS.decode(token for token, _ in group), counts) for counts, group in groups]
        found.append("".join(f"[{text}]" if counts else text for text, counts in parts))
    return found


WANTED = [
    (TALK, PREFIXES, "u:ab;a:[cd;]u:e;a:[f;]", "prefixes"),
    (TALK, MARKS, "u:ab;a:[cd];u:e;a:[f]", "generation marks"),
    (PAIR, MARKS, "<ab[cd>]", "generation marks"),
    ({"prompt": "ab", "answer": "cd>", "steps": 2}, None, "<ab[cd>]", ""),
    ({"text": "abc"}, None, "<[abc>]", ""),
    ({"prompt": "ab"}, None, "<ab", ""),
    ({"messages": TALK["messages"][:3]}, PREFIXES, "u:ab;a:cd;u:e;a:", "prefixes"),
]


@pytest.mark.parametrize(("line", "template", "want", "rule"), WANTED)
def test_what_counts(line, template, want, rule, tmp_path):
    examples = read(tmp_path, line, "", line, template=template, prompts="[" not in want)
    assert shown(examples) == [want, want] and examples.rule.endswith(rule)
    assert WORDS.decode(examples.prompt(1)) == want.partition("[")[0]


BAD = [
    ("{", None, "line 2 of .*lines.jsonl is not JSON"),
    ("[1]", None, "line 2 of .* is .*, not an object"),
    ({"prompt": "a"}, None, 'line 2 of .*: "response" must be a string, not None'),
    ({"text": "a", "prompt": "a"}, None, "one of .* is needed, and this line has prompt and text"),
    ({"text": "\ud800"}, None, "line 2 of .*no text in Unicode"),
    (TALK, None, '"messages" need a chat template, and the model has none'),
    (TALK, NEITHER, "has no {% generation %} marks, and its text of the messages before message 1"),
    ({"messages": TALK["messages"][:1]}, PREFIXES, '"messages" has no turn of an assistant'),
    ({"messages": "ab"}, PREFIXES, "messages must be a list"),
]


@pytest.mark.parametrize(("line", "template", "reason"), BAD)
def test_bad_lines(line, template, reason, tmp_path):
    with pytest.raises(ValueError, match=reason):
        read(tmp_path, PAIR, line, template=template)
    assert read(tmp_path, PAIR, line, template=template, skip_bad=True).counts["skipped"] == 1
    with pytest.raises(ValueError, match=r"gives no example \(1 lines, 1 skipped"):
        read(tmp_path, line, template=template, skip_bad=True)


def test_long_lines_are_dropped_or_cut_and_all_tokenised_once(tmp_path, monkeypatch):
    lines = [PAIR, {"prompt": "a", "response": "bcdefg"}, {"prompt": "abcdef", "response": "a"}]
    dropped = read(tmp_path, *lines, length=6)
    assert shown(dropped) == ["<ab[cd>]"] and dropped.counts["dropped"] == 2
    cut = read(tmp_path, length=6, long="cut")
    assert shown(cut) == ["<ab[cd>]", "<a[bcde]"] and "3 lines, 1 cut, 1 dropped" in str(cut)
    monkeypatch.setattr(jsonl, "_write", None)
    assert read(tmp_path, *lines, length=6).digest == dropped.digest
    for change in ({"length": 7}, {"stop": ""}, {"template": MARKS}):
        with pytest.raises(TypeError):
            read(tmp_path, **({"length": 6} | change))
    with pytest.raises(TypeError):
        read(tmp_path, *lines[:2], length=6)


@pytest.mark.parametrize("file", ["ids", "counted", "starts.npy", "about.json"])
@pytest.mark.parametrize("damage", [lambda x: x[:-1] + bytes([x[-1] ^ 1]), lambda x: x[:4], None])
def test_damaged_arrays_are_made_again(file, damage, tmp_path, capsys):
    before = shown(read(tmp_path, PAIR, TALK, template=PREFIXES))
    (path,) = tmp_path.glob(f"kept/*/{file}")
    content = path.read_bytes()
    path.write_bytes(damage(content)) if damage else path.unlink()
    assert shown(read(tmp_path, template=PREFIXES)) == before and path.read_bytes() == content
    assert f"{path.parent} is not as it was written" in capsys.readouterr().out
    read(tmp_path, template=PREFIXES)
    assert not capsys.readouterr().out


@pytest.fixture
def examples(tmp_path):
    rng = np.random.default_rng(0)
    texts = ["".join(rng.choice(list("abcdefgh"), size)) for size in rng.integers(1, 30, 41)]
    return read(tmp_path, *({"prompt": text[:3], "response": text[3:]} for text in texts))


@pytest.mark.parametrize("packed", [False, True])
def test_batches_have_every_example_once_an_epoch(examples, packed):
    def batches(seed=3):
        sizes = {"batch_tokens": 128, "length": 40, "multiple": 2}
        return example_batches(examples, seed=seed, packed=packed, **sizes)

    data, moved, fresh = batches(), batches(), batches()
    n, wanted = data.make.batches, sorted(examples[i][0][1:].tolist() for i in range(len(examples)))
    epochs = [[next(data) for _ in range(n)] for _ in range(2)]
    for epoch in epochs:
        found = []
        for batch in epoch:
            segments = batch.get("segments", batch["targets"] > 0)
            pairs = zip(batch["targets"], segments, strict=True)
            found += [row[own == i].tolist() for row, own in pairs for i in range(1, own.max() + 1)]
        assert sorted(found) == wanted
    assert [a["tokens"].tolist() for a in epochs[0]] != [b["tokens"].tolist() for b in epochs[1]]
    shapes = {batch["tokens"].shape for batch in epochs[0]}
    assert all(rows % 2 == 0 and rows * width <= 128 and width <= 40 for rows, width in shapes)
    assert 1 + (not packed) <= len({width for _, width in shapes}) <= 1 + 4 * (not packed)
    list(itertools.islice(moved, 3))
    fresh.set_state(json.loads(json.dumps(moved.get_state())))
    fresh.take(lambda count: (count // 2, count))
    for want, part in zip((epochs[0] + epochs[1])[3:], fresh, strict=False):
        assert part.count == len(want["tokens"])
        jax.tree.map(
            lambda x, y: np.testing.assert_array_equal(x, y[len(y) // 2 :]), part.rows, want
        )
    with pytest.raises(ValueError, match="begun with another"):
        batches(seed=4).set_state(moved.get_state())


@pytest.mark.parametrize("packed", [False, True])
def test_with_blocks_examples_are_whole_and_fill_their_last_one(examples, packed):
    options = {"batch_tokens": 128, "length": 34, "block": 4, "filler": 9}
    data, found, wanted = example_batches(examples, seed=3, packed=packed, **options), [], []
    for _ in range(data.make.batches):
        batch = next(data)
        for tokens, labelled, positions in zip(*batch.values(), strict=True):
            end = int(np.argmax(np.cumsum(tokens > 0))) + 1
            starts = [*np.flatnonzero((positions == 0) & (tokens > 0)), end]
            for low, high in itertools.pairwise(starts):
                assert positions[low:high].tolist() == list(range(high - low))
                found.append((tokens[low:high].tolist(), labelled[low:high].tolist()))
    for i in range(len(examples)):
        ids, counted = (row.tolist() for row in examples[i])
        extra = min(-len(ids) % 4, 34 - len(ids))
        wanted.append((ids + [9] * extra, counted + [True] * extra))
    assert sorted(found) == sorted(wanted)


def test_rows_are_filled_with_tokens_that_count(examples):
    """After the last token of an example that counts, so that its end is not seen."""
    counted = examples.counted.copy()
    ends = [end for i, end in enumerate(examples.starts[1:]) if sum(examples[i][1]) > 1]
    counted[np.asarray(ends[::2]) - 1] = False  # as what a template writes after an answer
    examples = dataclasses.replace(examples, counted=counted)
    data = example_batches(examples, seed=3, batch_tokens=128, length=34, filler=9, filled=True)
    found, widths = [], set()
    for batch in itertools.islice(data, data.make.batches):
        widths.add(batch["tokens"].shape[1])
        for tokens, labelled, weights in zip(*batch.values(), strict=True):
            end = int(np.argmax(np.cumsum(tokens != 9))) + 1
            assert labelled[end:].all() or not tokens.any()
            np.testing.assert_allclose(weights, labelled / max(labelled.sum(), 1), rtol=1e-6)
            found += [(tokens[:end].tolist(), labelled[:end].tolist())] * bool(tokens.any())
    wanted = []
    for ids, counts in (examples[i] for i in range(len(examples))):
        end = len(ids) - (not counts[-1])
        wanted.append((ids[:end].tolist(), counts[:end].tolist()))
    assert sorted(found) == sorted(wanted) and len(widths) > 1


def test_packed_rows_have_the_loss_of_rows_of_their_own(examples):
    loss, found = next_token_loss(tiny_causal()), []
    sums = jax.jit(lambda batch: loss.sums(tiny_causal_params(), None, batch, None))
    for packed in (False, True):
        data = example_batches(examples, seed=0, batch_tokens=256, length=64, packed=packed)
        parts = [sums(next(data)) for _ in range(data.make.batches)]
        value, metrics = loss.value(jax.tree.map(lambda *each: sum(each), *parts))
        found.append([value, metrics["accuracy"]])
    assert np.allclose(*found, rtol=0, atol=1e-6)
