"""The settings of decoders that the command line of `evaluate` takes."""

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True)
class Decoding:
    """Settings of decoders; what is left out is as in the decoder's paper.

    Attributes:
      recurrence: recurrences a token (autoregressive, speculative), at most (adaptive), of the prompt (released).
      prefill_recurrence: recurrences of the prompt (all but released).
      inner_recurrence: recurrences of a step (wavefront, released).
      draft_recurrence: recurrences of a draft (speculative).
      lookahead: drafts a round (speculative).
      headway: positions appended a step (wavefront, released).
      exit_threshold: below it a state has converged (adaptive, wavefront, released).
      momentum: of the conditioning (wavefront, released).
      noise: share mixed into the states (wavefront, released).
      block: tokens of a block (jacobi, multiblock).
      running: whether the window keeps its full width (jacobi).
      blocks: blocks in flight at most (multiblock).
      spawn: agreement of the newest block that spawns the next one (multiblock).
      pool: earlier iterates that are searched for candidates (jacobi, multiblock).
      candidates: candidates verified in a call, the draft among them (jacobi, multiblock, residual_speculative).
      rule: who is revealed in a block (block, residual, residual_speculative).
      steps: of a block (the same).
      threshold: confidence from which a position is revealed (the same, residual_veto).
      head: "zero" runs no residual head; that of the model's folder if left out (residual, residual_speculative).
      head_steps: steps of the head after a call (residual).
      head_threshold: confidence that the head's steps must reach (residual, residual_speculative).
      max_ngram: tokens that are looked up (prompt_lookup).
      num_pred: tokens copied (prompt_lookup).
      level: length of the n-grams (lookahead).
      window: positions of the wave at most (wavefront, released); positions ahead (lookahead).
      guesses: n-grams verified in a call (lookahead).
      temperature: 0 takes the most probable token.
      top_p: probability mass kept when sampling.
    """

    recurrence: int | None = None
    prefill_recurrence: int | None = None
    inner_recurrence: int | None = None
    draft_recurrence: int | None = None
    lookahead: int | None = None
    headway: int | None = None
    exit_threshold: float | None = None
    momentum: float | None = None
    noise: float | None = None
    block: int | None = None
    running: bool | None = None
    blocks: int | None = None
    spawn: float | None = None
    pool: int | None = None
    candidates: int | None = None
    rule: str | None = None
    steps: int | None = None
    threshold: float | None = None
    head: Literal["zero"] | None = None
    head_steps: int | None = None
    head_threshold: float | None = None
    max_ngram: int | None = None
    num_pred: int | None = None
    level: int | None = None
    window: int | None = None
    guesses: int | None = None
    temperature: float | None = None
    top_p: float | None = None
