"""A network that recites a text, whatever it reads."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp

from paradec_jax.config import PRESETS
from paradec_jax.tokenizer import Tokenizer

CONFIG = dataclasses.replace(PRESETS["test-recurrent"], vocab_size=384, max_length=256)
SCALE = 50.0


@dataclasses.dataclass(frozen=True)
class Recital:
    """A network that recites: position p always predicts `script[p + 1 - start]`, whatever it reads.

    With `flat`, all tokens of a few are equally likely and only the draw decides.
    """

    script: tuple[int, ...]
    start: int = 1
    flat: bool = False
    vocab_size: int = 384
    max_length: int = 256
    recurrence: int = 3

    def prepare(self, params: Any) -> Any:
        return params

    def init_cache(self, batch: int, size: int) -> Any:
        return jnp.zeros((batch, size))

    def write(self, cache: Any, window: Any, at: Any) -> Any:
        return cache

    def initial_state(self, keys: Any, scale: Any) -> Any:
        return jnp.zeros((*keys.shape, 1))

    def forward(
        self, params, tokens, positions, cache=None, visible=None, state=None, recurrence=None
    ) -> Any:
        hidden = positions[..., None].astype(jnp.float32)
        return SimpleNamespace(hidden=hidden, latent=hidden, kv=None)

    def logits(self, params: Any, hidden: Any) -> Any:
        if self.flat:
            few = (jnp.arange(self.vocab_size) >= 40) & (jnp.arange(self.vocab_size) < 60)
            return jnp.broadcast_to(jnp.where(few, 0.0, -1e9), (*hidden.shape[:-1], self.vocab_size))
        at = jnp.clip(hidden[..., 0].astype(jnp.int32) + 1 - self.start, 0, len(self.script) - 1)
        return SCALE * jax.nn.one_hot(jnp.asarray(self.script)[at], self.vocab_size)


def recite(tokenizer: Tokenizer, text: str, start: int = 1, end: bool = True) -> Recital:
    return Recital((*tokenizer.encode(text), *([2] if end else [])), start)
