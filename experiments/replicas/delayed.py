"""The schedule of d3LLM's released programs (arXiv 2601.07568): which blocks are open, and which
call renews or extends the cache.

Attention is full, so the cache is an approximation. A complete block waits a few calls before the
cache holds it; while one waits, calls read the whole canvas and renew what is cached.
"""

import dataclasses

import numpy as np

WHOLE, CACHED, APPENDS, RENEWS = range(4)


@dataclasses.dataclass
class DelayedBlocks:
    """Block 0 is the prompt.

    The program for Dream differs: it times all complete blocks, not only the first one; and a call
    that renews while several wait keeps the keys up to the last of them, so that calls after it see
    some keys twice.

    Attributes:
      begins: first position of each block, and the end of the last one.
      admit, activate: shares of a block that open the next one, and make it reveal in each call.
      delay: calls that a complete block waits; None for the programs without a cache.
      refresh: calls after which the cache is renewed.
      all_timed: whether all complete blocks are timed (Dream).
    """

    begins: np.ndarray
    admit: float
    activate: float
    delay: int | None
    refresh: int
    all_timed: bool

    def __post_init__(self) -> None:
        count = len(self.begins) - 1
        self.last, self.prefix, self.entries = 0, 0, 0
        self.full, self.cached = np.arange(count) == 0, np.zeros(count, bool)
        self.noticed, self.filled = np.full(count, -1), np.zeros(count, bool)
        self.noticed[0] = -1 if self.delay is None else 0

    def call(self, number: int, masked: np.ndarray) -> tuple[int, int, int, int]:
        """Opens a block, and says what call `number`, counted from 1, does, given the masks before it.

        Returns:
          Its kind, the first position that it is fed, the positions that it adds to the cache, and
          the keys that it finds there.
        """
        self.masks = np.add.reduceat(masked, self.begins[:-1])
        shown = 1 - self.masks / np.diff(self.begins)
        self.full[1 : self.last + 1] |= shown[: self.last] >= self.activate
        if self.last + 1 < len(shown) and shown[self.last] >= self.admit:
            self.last += 1
            self.full[self.last] = shown[self.last - 1] >= self.activate
        appended, waiting = 0, None
        for block in range(self.last + 1 if self.delay is not None else 0):
            if self.cached[block]:
                continue
            if self.masks[block] or (waiting is not None and not self.all_timed):
                break
            if self.noticed[block] < 0:
                self.noticed[block] = number
            if number - self.noticed[block] < self.delay:
                waiting = block
            else:
                self.cached[block] = True
                appended += self.begins[block + 1] - self.begins[block]
        kind = CACHED if self.prefix else WHOLE
        if appended:
            kind = APPENDS
        elif self.prefix and (waiting is not None or number % self.refresh == 0):
            kind = RENEWS
        fed = kind in (CACHED, APPENDS)
        start, entries = self.prefix * fed, self.entries * fed
        self.prefix, self.entries = self.prefix + appended, self.entries + appended
        if kind == RENEWS:
            several = waiting is not None and self.all_timed
            self.entries = int(self.begins[waiting]) if several else self.prefix
        return kind, start, appended, entries

    def ended(self, text: np.ndarray, at: int, eos: int) -> np.ndarray:
        """The canvas with stop tokens behind one at a position; blocks that are so completed count as
        open and fully active.
        """
        new = np.where(np.arange(len(text)) > at, eos, text)
        self.filled |= np.add.reduceat(new != text, self.begins[:-1]) > 0
        self.full |= self.filled
        return new
