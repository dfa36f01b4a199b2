"""A network that recites a text, whatever it reads, and a stand-in for lm-eval that asks it."""

import dataclasses
import importlib
import sys
from types import ModuleType

import jax
import jax.numpy as jnp
from stubs.base import CachedStub, TokenKV

from paradec_jax.config import RECURRENT_PRESETS
from paradec_jax.decode import Forward
from paradec_jax.text.tokenizer import Tokenizer

CONFIG = dataclasses.replace(RECURRENT_PRESETS["test-recurrent"], vocab_size=384, max_length=256)
SCALE = 50.0


@dataclasses.dataclass(frozen=True)
class Recital(CachedStub):
    """A network that recites: position p always predicts `script[p + 1 - start]`, whatever it
    reads.

    A call counts `recurrence` recurrences. With `flat`, all tokens of a few are equally likely and
    only the draw decides.
    """

    script: tuple[int, ...]
    start: int = 1
    flat: bool = False
    vocab_size: int = 384
    max_length: int = 256
    recurrence: int = 3
    counters: tuple[str, ...] = ("recurrences",)

    def forward(self, params, inputs, positions, prefix=None, mask=None):
        window = TokenKV(inputs, positions)
        return Forward(
            positions[..., None].astype(jnp.float32), window, {"recurrences": self.recurrence}
        )

    def logits(self, params, hidden):
        if self.flat:
            few = (jnp.arange(self.vocab_size) >= 40) & (jnp.arange(self.vocab_size) < 60)
            return jnp.broadcast_to(
                jnp.where(few, 0.0, -1e9), (*hidden.shape[:-1], self.vocab_size)
            )
        at = jnp.clip(hidden[..., 0].astype(jnp.int32) + 1 - self.start, 0, len(self.script) - 1)
        return SCALE * jax.nn.one_hot(jnp.asarray(self.script)[at], self.vocab_size)


def recite(tokenizer: Tokenizer, text: str, start: int = 1, end: bool = True) -> Recital:
    return Recital((*tokenizer.encode(text), *([2] if end else [])), start)


def stand_in_for_lm_eval(monkeypatch):
    """The adapter for lm-eval on a stand-in, whether or not that is installed."""
    module = ModuleType("lm_eval.api.model")
    module.LM = type("LM", (), {})
    for name in ("lm_eval", "lm_eval.api"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "lm_eval.api.model", module)
    monkeypatch.delitem(sys.modules, "paradec_jax.evaluate.harness", raising=False)
    return importlib.import_module("paradec_jax.evaluate.harness")
