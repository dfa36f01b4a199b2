"""Texts of generated tokens, and where a stop string ends them."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from paradec_jax.config import TokenSpec
from paradec_jax.text.tokenizer import BROKEN, GrowingText, Tokenizer


def text_of(
    tokenizer: Tokenizer, spec: TokenSpec, ids: Sequence[int], prompt: Sequence[int] = ()
) -> str:
    """Text that generated tokens add to a prompt's: special tokens and the stop token that ended
    them have none.
    """
    return tokenizer.decode_after(prompt, _without_stop(spec, ids), skip_special=True)


def _without_stop(spec: TokenSpec, ids: Sequence[int]) -> Sequence[int]:
    return ids[:-1] if len(ids) and ids[-1] in spec.stop else ids


class StopStrings:
    """Looks at the text of growing rows and says which of them have come to a stop string.

    A row has come to one with the first token after which its text holds it, so what is found
    depends on a row's tokens alone and not on how often one looks. Broken characters at the end of
    a text do not count. Strings are looked for in two texts, without special tokens and with them.
    An instance serves one run of `stream`.

    Args:
      tokenizer, spec: tokenizer and special tokens of the model.
      strings: the stop strings, perhaps none.
      prompts: ids of the text that each row follows.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        spec: TokenSpec,
        strings: Sequence[str],
        prompts: Sequence[Sequence[int]],
    ) -> None:
        self._spec = spec
        self._rows = [_Row(tokenizer, prompt, strings) for prompt in prompts]
        self._longest = max(map(len, strings), default=1)

    def __call__(self, state: Any) -> Any:
        """Rows [B] in which a stop string was found just now, given a decoder's state."""
        running = np.asarray([row.stopped is None for row in self._rows])
        self._look(state.rows.completions())
        return running & np.asarray([row.stopped is not None for row in self._rows])

    def visible(self, row: int, *, done: bool) -> str:
        """Text of a row that later tokens cannot take back: cut, or short of what may begin a stop
        string.
        """
        seen = self._rows[row]
        if seen.stopped is not None:
            return seen.stopped[1]
        text = seen.shown.text
        return text if done else text[: max(len(text) - self._longest + 1, 0)]

    def finish(self, tokens: Sequence[Sequence[int]]) -> dict[int, tuple[int, str]]:
        """For each row with a stop string: how many tokens stay, and the text before the string."""
        self._look(tokens)
        for row in self._rows:
            row.finish()
        return {i: row.stopped for i, row in enumerate(self._rows) if row.stopped is not None}

    def _look(self, tokens: Sequence[Sequence[int]]) -> None:
        """Reads the new tokens of rows that have not stopped."""
        for row, ids in zip(self._rows, tokens, strict=True):
            shown = len(_without_stop(self._spec, ids))
            for place in range(len(row.ids), len(ids)):
                if row.stopped is None:
                    row.push(int(ids[place]), stops=place >= shown)


class _Row:
    """The texts of one row, read token by token, and the stop string that it has come to.

    Attributes:
      ids: tokens read.
      shown, spelled: text without special tokens, and with them.
      stopped: how many tokens stay and the text before the stop string, or None.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], strings: Sequence[str]) -> None:
        self._tokenizer, self._strings = tokenizer, strings
        # The prompt's own special tokens are written out in neither, so that both texts begin
        # alike.
        self._prompt = [token for token in prompt if not tokenizer.is_special(token)]
        self.ids: list[int] = []
        self.shown = GrowingText(tokenizer, skip_special=True, before=self._prompt)
        self.spelled = GrowingText(tokenizer, before=self._prompt)
        self.stopped: tuple[int, str] | None = None

    def push(self, token: int, *, stops: bool) -> None:
        """Reads a token; one that stops the row is no part of the shown text."""
        self.ids.append(token)
        ends = [] if stops else self._grown(self.shown, token)
        if places := self._grown(self.spelled, token):
            ends.append(self._shown_before(min(places)))
        self._cut(ends, stops)

    def finish(self) -> None:
        """Looks at what no later token completes."""
        if self.stopped is None:
            self._cut(self._places(self.shown.whole, len(self.shown.text)), False)

    def _grown(self, text: GrowingText, token: int) -> list[int]:
        """Adds a token to a text; places of strings that it holds now and did not hold before."""
        seen = len(text.text)
        text.push(token)
        return self._places(text.whole.rstrip(BROKEN), seen)

    def _places(self, text: str, seen: int) -> list[int]:
        """The first place of each string that may end after so many characters."""
        start = max(seen - max(map(len, self._strings), default=1) + 1, 0)
        return [place for string in self._strings if (place := text.find(string, start)) >= 0]

    def _cut(self, ends: list[int], stops: bool) -> None:
        """Cuts the text at the first of those places; a stop token needs no string that cuts
        nothing.
        """
        text = self.shown.whole
        if ends and (min(ends) < len(text) or not stops):
            self.stopped = len(self.ids), text[: min(ends)]

    def _shown_before(self, place: int) -> int:
        """How many characters of the shown text lie before a place of the spelled one."""
        decode, text = self._tokenizer.decode_after, self.spelled.whole[:place]
        count = next(
            n
            for n in range(len(self.ids) - 1, -1, -1)
            if text.startswith(decode(self._prompt, self.ids[:n]))
        )
        start, former = (
            decode(self._prompt, self.ids[:count], skip_special=skip) for skip in (False, True)
        )
        special = self._tokenizer.is_special(self.ids[count])
        return len(former) + (0 if special else place - len(start))
