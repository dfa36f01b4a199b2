"""Word problems filled by a denoiser of random weights, beside a causal model: the rows that the script writes."""

import dataclasses

import jax
import pytest
from experiment import read

from experiments.block_diffusion import train
from experiments.masked_diffusion import infilling
from paradec_jax import Model, store
from paradec_jax.families import PRESETS, init_params

RECIPE = train.Recipe(name="toy", preset="test-sdar", init=None, blocks=(16,), alignment="next")


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """A denoiser and a causal model."""
    folder = tmp_path_factory.mktemp("models")
    filler = train.untrained(RECIPE, RECIPE.source())
    filler = dataclasses.replace(filler, config=dataclasses.replace(filler.config, max_length=256))
    shape = dataclasses.replace(PRESETS["test-causal"], vocab_size=384, max_length=256, layers=1)
    causal = Model(shape, init_params(shape, jax.random.key(0)), filler.token_spec, filler.tokenizer)
    for name, model in (("filler", filler), ("causal", causal)):
        store.save(folder / name, model)
    return {"model": str(folder / "filler"), "causal": str(folder / "causal")}


def test_rows_of_each_number_of_steps_and_of_the_causal_model(places, tmp_path):
    options = infilling.Options(**places, steps=(4, 8), problems=3, out=tmp_path / "rows.json")
    infilling.main(options)
    table, lines = read(options.out)
    names = [(row["model"], row["decoder"]) for row in table["rows"]]
    fills = ["one a step", "4 steps a block", "8 steps a block"]
    assert names == [("filler", name) for name in fills] + [("causal", "from left to right")]
    assert len(lines) == 4 and [row["baseline"] for row in table["rows"]] == [True, False, False, True]
    assert table["models_sha256"].keys() == {"filler", "causal"}
    calls = [row["tokens_per_network_call"] for row in table["rows"][:3]]
    assert calls[0] < calls[2] < calls[1]


def test_what_is_refused(places):
    with pytest.raises(ValueError, match="numbers of at least 1"):
        infilling.Options(steps=(0,))
    with pytest.raises(ValueError, match="at most the block's length 16"):
        infilling.main(infilling.Options(**places, steps=(32,)))
    with pytest.raises(ValueError, match="causal a causal one"):
        infilling.main(infilling.Options(**places | {"model": places["causal"]}))
