"""A table of decoders on a stub network: the model's config, some settings, and the keys of a row."""

import dataclasses

import paradec_jax as pd
from paradec_jax.config import PRESETS
from paradec_jax.evaluate import (
    Setting,
)
from paradec_jax.testing import StubNetwork

CONFIG = dataclasses.replace(PRESETS["test-recurrent"], vocab_size=384, max_length=256)
STUB = StubNetwork(vocab_size=384, max_length=256)
KEYS = [
    "family",
    "model",
    "decoder",
    "settings",
    "problems",
    "exact",
    "interval",
    "tokens",
    "seconds",
    "tokens_per_second",
    "speedup",
    "network_calls_per_token",
    "tokens_per_network_call",
    "recurrences_per_token",
    "equals_greedy",
    "batch",
    "dtype",
    "device",
    "compile_seconds",
    "core_pass_microseconds",
]


def small_settings():
    wave = pd.Wavefront.Knobs(exit_threshold=1e9, momentum=0.0)
    return (
        Setting("autoregressive", pd.AutoRegressive(recurrence=2)),
        Setting(
            "autoregressive",
            pd.AutoRegressive(recurrence=4),
            baseline=True,
            half=pd.AutoRegressive(recurrence=2),
        ),
        Setting(
            "wavefront",
            pd.Wavefront(inner_recurrence=4, width=1),
            wave,
            half=pd.Wavefront(inner_recurrence=2, width=1),
        ),
    )
