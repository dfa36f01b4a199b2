"""What studies read, at toy size: models of random weights in the folders that trainings leave, and
a text.
"""

import dataclasses
from pathlib import Path

import jax
import numpy as np

from experiments.recurrent_depth import pointers
from experiments.tasks import build_tokenizer, start, token_spec
from paradec_jax.config import ResidualHeadConfig
from paradec_jax.data.text import character_spec, character_tokenizer
from paradec_jax.families import PRESETS, init_params, parameter_shapes
from paradec_jax.models import ResidualHeadNetwork
from paradec_jax.store import Model, ResidualHead, save

TEXT = "To be, or not to be:\nthat is the question.\n" * 40
POINTERS = dataclasses.replace(pointers.RECIPES["tiny-pointers"], width=16, heads=2)


def of_words(preset: str, seed: int, max_length: int = 512) -> Model:
    """A model of the word problems' tokens."""
    config = dataclasses.replace(PRESETS[preset], vocab_size=384, max_length=max_length)
    params = jax.tree.map(lambda x: 2 * x, init_params(config, jax.random.key(seed)))
    return Model(config, params, token_spec(), build_tokenizer())


def of_characters(preset: str, seed: int) -> Model:
    """A model of the text's characters."""
    tokenizer, draw = character_tokenizer(TEXT), np.random.default_rng(seed)
    size = {"vocab_size": tokenizer.vocab_size, "max_length": 32, "layers": 1}
    config = dataclasses.replace(PRESETS[preset], **size)
    params = jax.tree.map(
        lambda x: draw.normal(0, 0.3, x.shape).astype(np.float32), parameter_shapes(config)
    )
    spec = character_spec(tokenizer, "own" if "mdlm" in preset else "next")
    return Model(config, params, spec, tokenizer)


def of_chains() -> Model:
    model = start.begun(start.Options("test-sdar", Path(), chains=True, layers=1, block=4))
    return dataclasses.replace(model, params=jax.tree.map(lambda x: 2 * x, dict(model.params)))


def with_head(model: Model) -> Model:
    shape = ResidualHeadConfig.of(model.config, 1)
    head = ResidualHeadNetwork.init_params(shape, jax.random.key(1), "normal_0.2")
    return dataclasses.replace(model, head=ResidualHead(shape, head))


def of_pointers() -> Model:
    params = init_params(POINTERS.shape, jax.random.key(0))
    return Model(POINTERS.shape, params, token_spec(), pointers.build_tokenizer())


def make(folder: Path) -> Path:
    chain = of_chains()
    models = {
        "causal": of_words("test-causal", 0),
        "other": of_words("test-causal", 1),
        "recurrent": of_words("test-recurrent", 0),
        "pointers": of_pointers(),
        "chains/model": chain,
        "chains-head/model": with_head(chain),
        "tiny-mdlm/model": of_characters("test-mdlm", 0),
        "halves/round-0/model": of_characters("test-mdlm", 1),
        "halves/round-1/model": of_characters("test-mdlm", 2),
        "tiny-judge/model": of_characters("test-causal", 3),
        "tiny-rival/model": of_characters("test-causal", 4),
    }
    for name, model in models.items():
        save(folder / name, model)
    (folder / "text.txt").write_text(TEXT)
    save(folder / "halves" / "model", models["halves/round-1/model"])
    return folder
