"""A table of decoders on a stub network: the model's config and folder, some settings, and the keys
of a row.
"""

import dataclasses
import json

import jax
import numpy as np
from stubs import StubCausal, StubDenoiser, StubNetwork

import paradec_jax as pd
from experiments.tasks import build_tokenizer, token_spec
from paradec_jax.config import RECURRENT_PRESETS, TokenSpec
from paradec_jax.data.text import character_tokenizer
from paradec_jax.decode.machine.setting import Setting
from paradec_jax.evaluate.tables import SHORT, TABLES
from paradec_jax.families import EVERY_STEP, FAMILIES, parameter_shapes
from paradec_jax.store import Model, save

CONFIG = dataclasses.replace(RECURRENT_PRESETS["test-recurrent"], vocab_size=384, max_length=256)
STUB = StubNetwork(vocab_size=384, max_length=256)
# Models of ten characters and the mask; their stop tokens end no text.
ALPHABET = " abcdefghi"
PRESETS = {"masked_diffusion": "test-mdlm", "causal": "test-causal"}
LETTERED = {
    "masked_diffusion": StubDenoiser(max_length=16),
    "causal": StubCausal(max_length=16, sharpness=2.0),
}
SPECS = {
    "masked_diffusion": TokenSpec(mask=10, alignment="own", stop=(2, 4)),
    "causal": TokenSpec(bos=10, pad=10, stop=(2, 4)),
}
KEYS = "family model decoder settings problems exact interval tokens seconds tokens_per_second speedup "
KEYS += "network_calls_per_token tokens_per_network_call recurrences_per_token positions_per_token "
KEYS += "head_calls_per_token flops_per_token equals_greedy batch dtype device compile_seconds"


def strict(text):
    """Parsed JSON; NaN and infinities, which the standard does not know, are refused."""

    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refuse)


def zeros(config):
    return jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), parameter_shapes(config))


def saved(folder, config=CONFIG, spec=None, **more):
    """A model folder with parameters of zero where none are given, whose network a test replaces."""
    more = {"params": zeros(config), "tokenizer": build_tokenizer()} | more
    save(folder, Model(config, token_spec=token_spec() if spec is None else spec, **more))
    return folder


def lettered(folder, family):
    """The folder of such a model."""
    config = dataclasses.replace(
        FAMILIES[family].presets[PRESETS[family]], vocab_size=11, max_length=16
    )
    return str(saved(folder, config, SPECS[family], tokenizer=character_tokenizer(ALPHABET)))


def put_settings(monkeypatch, family, settings):
    """Gives a family another table for the rest of a test."""
    for tables in (TABLES, SHORT):
        monkeypatch.setitem(tables, family, settings)


def small_settings():
    few, base = (
        Setting("autoregressive", pd.Static(recurrence=r), baseline=baseline)
        for r, baseline in ((2, False), (4, True))
    )
    knobs = pd.Wavefront.Knobs(exit_threshold=EVERY_STEP, momentum=0.0)
    return few, base, Setting("wavefront", pd.Wavefront(inner_recurrence=4, window=1), knobs)
