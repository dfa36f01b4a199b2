"""Multi-token residual prediction (MRP, arXiv 2605.18817), direct: its head corrects a call's
scores, so that more is revealed.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from paradec_jax.config import check_words
from paradec_jax.decode.block.denoising import Denoised
from paradec_jax.decode.block.head import (
    ZERO,
    HeadCanvas,
    HeadDecoder,
    HeadKnobs,
    ask_head,
    fresh_with_head,
)
from paradec_jax.decode.block.reading import read_block, read_prompt
from paradec_jax.decode.canvas import BlockRead
from paradec_jax.decode.machine import Request
from paradec_jax.records import choices

HEAD_RULES = ("static", "dynamic")
MIXES = ("sum", "none")


@choices
class Residual(HeadDecoder):
    """Denoises block after block; after each call a head corrects its scores K times, and more is
    revealed each time.

    ::

        call      z of   _ _ _ _        reveal b        the network's scores, by `rule`
        head      z + r1        _ b _ _    reveal c     corrected for b, by `head_rule`
        head      z + r1 + r2   _ b c _    reveal a     corrected for b and c
        call      z of   a b c _        ..

    With the head rule "static" a call reveals up to K positions more than that of `BlockDenoising`,
    whose fusions it shares; but what the head reveals no call has seen (Algorithm 2). The knobs
    `head_threshold` and `enough` are not in the paper. The steps of `rule` are those of calls: S
    quotas that the head's reveals do not count for. Draws of the head's steps have noise of their
    own.

    A row of n new positions ends within 1 + 2 (n + B) network calls.

    Attributes:
      head: network of the head; "zero" runs none, so that the network's own scores are taken K
        times more.
      head_steps: K, steps of the head after a call.
      length, rule, confidence, fuse_store, fuse_prompt, top_p_rule: choices of the steps of the
        network, which `BlockDenoising` explains; the head's steps have the same confidence.
      head_rule: "static", one position a step, as the released programs; or "dynamic", all above
        the threshold of `rule`, at least one, as the paper.
      mix: "sum" adds residuals up; "none" takes the head's answer for the scores, as heads without
        a base were trained (direct modelling).
    """

    head_steps: int = 1
    rule: str = "dynamic"
    head_rule: str = "static"
    mix: str = "sum"
    Knobs = HeadKnobs

    def __post_init__(self) -> None:
        super().__post_init__()
        check_words(self, head_rule=HEAD_RULES, mix=MIXES)
        if self.head_rule == "dynamic" and self.rule not in ("dynamic", "threshold"):
            raise ValueError(
                "head_rule 'dynamic' has the threshold of rule, which must be dynamic or threshold, "
                f"not {self.rule!r}"
            )
        if self.mix == "none" and self.head == ZERO:
            raise ValueError(
                "mix 'none' takes the head's answer for the scores, so head must not be 'zero'"
            )

    def init(self, params: Any, request: Request, knobs: HeadKnobs) -> HeadCanvas:
        """Network and head read the prompts' whole blocks; with `fuse_prompt` the same call does
        the first step.
        """
        state = fresh_with_head(self, request)
        state, call = read_prompt(self, params["network"], state, request, self.fuse_prompt)
        return self._denoise(params, state, call, knobs)[0]

    def step(self, params: Any, state: HeadCanvas, knobs: HeadKnobs) -> tuple[HeadCanvas, Denoised]:
        """One call of the network and K of the head: steps in each row's open block, or a store, or
        both.

        In the info `where`, `tokens` and `scores` are those of 1 + K rounds, [B, 1 + K, W].
        """
        state, call = read_block(self, params["network"], state, self.fuse_store)
        return self._denoise(params, state, call, knobs)

    def _denoise(
        self, params: Any, state: HeadCanvas, call: BlockRead, knobs: HeadKnobs
    ) -> tuple[HeadCanvas, Denoised]:
        """Algorithm 2: K + 1 rounds of reveals from one call of the network."""
        before, newest = state, call
        # Round 0, by the scores z of the network itself.
        state, _, choice = self.denoise(params["network"], state, call, knobs)
        state, rounds = state.with_choice(choice), [choice]
        going = call.reads & knobs.asks(choice.where)
        # A head's quota is one position, whatever the network's; its noise is that of steps that no
        # call has.
        alone = dataclasses.replace(knobs, steps=None)
        for k in range(1, self.head_steps + 1):
            # d <- MRP(cur, a): the head reads what was just revealed.
            masked, tokens = state.masked(going), None if k == 1 else state.text
            residual, state = ask_head(self, params, state, newest, jnp.any(masked, axis=1), tokens)
            # a <- a + d, or d alone.
            hidden = newest.hidden + residual if self.mix == "sum" else residual
            newest = dataclasses.replace(newest, hidden=hidden)
            # g = U a: logits of the corrected states, of which the rule reveals some.
            logits = self.network.logits(params["network"], state.aligned(hidden))
            step = before.step + k * self.block
            choice = knobs.sure(
                self.choose(
                    logits, masked, state.cached, step, state.rows, alone, rule=self.head_rule
                )
            )
            state, going = state.with_choice(choice), jnp.any(choice.where, axis=1)
            rounds.append(choice)
        info = Denoised.of(before, call, jax.tree.map(lambda *x: jnp.stack(x, axis=1), *rounds))
        return state, info
