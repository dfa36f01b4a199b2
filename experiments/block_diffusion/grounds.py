"""The chain language that block diffusion is trained on beside word problems: its law is known
exactly.
"""

import dataclasses

from experiments.tasks.chains import SYMBOLS, Followers
from paradec_jax.data.text import character_tokenizer
from paradec_jax.text.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class Chains:
    """Texts of a chain, whose first symbols are given.

    Attributes:
      law: of the texts.
      prompt: symbols that are given.
    """

    law: Followers = Followers()  # noqa: RUF009
    prompt: int = 8

    def tokenizer(self) -> Tokenizer:
        """A letter a symbol, and the mask."""
        return character_tokenizer(self.text())

    def text(self) -> str:
        """All symbols, by whose ids tokenizers are compared."""
        return SYMBOLS[: self.law.symbols]
