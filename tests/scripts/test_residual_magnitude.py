"""The sizes of residuals: by hand on a few numbers, states of a decode, and the script at toy size."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from experiment import read

from experiments.block_diffusion import residual_magnitude, train
from experiments.block_diffusion.magnitudes import magnitudes, read_states, visited
from experiments.tasks import Followers
from paradec_jax import BlockDenoising, load, make_request, store, trace

RECIPE = train.Recipe(name="chain", ground="chains", init=None, preset="test-sdar", layers=1, blocks=(4,))
BLOCK = 4


@functools.cache
def chain():
    model = train.untrained(RECIPE, RECIPE.source())
    return dataclasses.replace(model, params=jax.tree.map(lambda x: 2 * x, dict(model.params)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("model") / "model"
    store.save(found, chain())
    return found


def test_magnitudes_by_hand():
    """Two blocks of two positions and one channel; every state of the second is twice that of the first."""
    first = np.asarray([[[3.0], [4.0]], [[3.0], [0.0]], [[0.0], [0.0]]])
    found = magnitudes(np.stack([first, 2 * first]))
    one = (np.sqrt(8) + np.sqrt(4.5)) / 2
    np.testing.assert_allclose(found.residual, 1.5 * np.asarray([one, np.sqrt(12.5)]))
    assert found.reference == pytest.approx(1.5 * (np.sqrt(12.5) + np.sqrt(4.5)) / 2)
    np.testing.assert_allclose(found.ratios, found.residual / found.reference)
    with pytest.raises(ValueError, match="at least two states"):
        magnitudes(np.zeros((1, 1, 2, 2)))


@functools.cache
def decoded():
    model = chain()
    decoder = BlockDenoising(rule="static", fuse_store=False, fuse_prompt=False).bind(
        model.network, 16, model.token_spec
    )
    request = make_request([[1, 2, 3, 0], [2, 3, 4, 1, 0]], max_new_tokens=11)
    return *trace(decoder, decoder.prepare(model.params), request, n=18), decoder


def test_states_are_those_that_the_decoder_read():
    """Block by block, and what it then said of each is what is read again."""
    result, steps, decoder = decoded()
    visits = list(visited(steps, np.asarray([4, 5]), decoder.mask))
    assert [(visit.row, visit.start) for visit in visits][:2] == [(0, 4), (0, 8)]
    assert (1, 4) not in [(visit.row, visit.start) for visit in visits]  # it holds the end of the prompt
    model, hidden, at = chain(), np.asarray(steps.hidden), np.asarray(steps.at)
    for visit in visits:
        masked = (visit.states == decoder.mask).sum(axis=1)
        np.testing.assert_array_equal(masked, [4, 3, 2, 1, 0])
        text = np.asarray(result.tokens)[visit.row]
        if visit.start + BLOCK <= np.asarray(result.lengths)[visit.row]:
            np.testing.assert_array_equal(visit.states[-1], text[visit.start : visit.start + BLOCK])
        context = text[: visit.start]
        found = read_states(model.network, model.params, context, visit.states[None], 16)
        mine = (at[:, visit.row] == visit.start) & np.asarray(steps.reads)[:, visit.row]
        np.testing.assert_allclose(found[0, :-1], hidden[mine, visit.row], atol=1e-4)
        plain = read_states(model.network, model.params, context, visit.states[None])
        np.testing.assert_allclose(plain, found, atol=1e-5)


def test_other_blocks_are_refused():
    model = chain()
    for context, width in ((np.arange(4), 2), (np.arange(3), BLOCK)):
        with pytest.raises(ValueError, match="must be those of blocks of 4 after whole blocks"):
            read_states(model.network, model.params, context, np.zeros((1, 2, width), int))


def test_the_script(folder, tmp_path, capsys):
    options = residual_magnitude.Options(
        str(folder), ground="chains", count=3, blocks=2, rows=2, out=tmp_path / "rows.json"
    )
    residual_magnitude.main(options)
    result, table = read(options.out)
    assert result["blocks"] == 6 and len(result["rows"]) == len(table) == BLOCK
    for row, line in zip(result["rows"], table, strict=True):
        assert row["hidden"] > 0 and float(line["logits"]) == pytest.approx(row["logits"])
    assert result["hidden"]["reference"] > 0 and result["model_sha256"] == store.fingerprint(folder)
    assert "6 blocks" in capsys.readouterr().out


def test_prompts_of_a_file(folder, tmp_path):
    path, model = tmp_path / "prompts.txt", load(folder)
    path.write_text("abc\n\nad\n" + "b" * 200 + "\n")
    options = residual_magnitude.Options(str(folder), prompts=path)
    assert residual_magnitude.prompts_of(model, options) == [model.tokenizer.encode(t) for t in ("abc", "ad")]
    path.write_text("b" * 200)
    with pytest.raises(ValueError, match="no prompt leaves room for 4 blocks in 128"):
        residual_magnitude.prompts_of(model, options)
    path.write_text("\n")
    with pytest.raises(ValueError, match="holds no prompt"):
        residual_magnitude.prompts_of(model, options)
    with pytest.raises(SystemExit, match="is of family causal"):
        residual_magnitude.main(residual_magnitude.Options("tiny-causal", out=tmp_path / "x.json"))
    with pytest.raises(ValueError, match="must be at least 1"):
        residual_magnitude.Options("model", rows=0)


def test_prompts_end_at_line_feeds_alone(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_bytes("\ufeffone\u2028two\r\n\nthree\x0c".encode())
    assert residual_magnitude.Options("model", prompts=path).texts() == ["one\u2028two", "three\x0c"]


def test_the_grounds_have_prompts():
    words, chains = (
        residual_magnitude.Options("model", ground=ground, count=2).texts() for ground in ("words", "chains")
    )
    assert len(words) == 2 and all(text.startswith("Question") for text in words)
    assert [len(text) for text in chains] == [8, 8] and Followers().symbols == 16
    assert jnp.asarray(RECIPE.source().tokenizer().encode(chains[0])).max() < 16
