"""Decoding with a residual head, written a second time from its description: direct, speculative, as a veto.

Each returns what is recorded of a text, and the calls that it took; see `plain_sdar` for how calls are read.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from plain_sdar import Reader, canvas

Found = tuple[dict[str, np.ndarray], dict[str, int]]
Pi = Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]  # state, logits -> reveals, tokens


def choice(reader: Reader, tau: float | None) -> Pi:
    """What a base decoder does of a state: the best position, or all above a threshold, at least one."""

    def pi(state: np.ndarray, logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        masked = state == reader.sizes.mask
        tokens, c, _ = reader.candidates(logits)
        return (reader.largest(masked, c, 1) if tau is None else reader.above(masked, c, tau)), tokens

    return pi


def stacked(steps: list[dict[str, Any]], text: np.ndarray) -> dict[str, np.ndarray]:
    return {name: np.stack([np.asarray(own[name]) for own in steps]) for name in steps[0]} | {"tokens": text}


def blocks_of(reader: Reader, prompt: np.ndarray, new: int) -> tuple[np.ndarray, range]:
    """The canvas, and where its unfinished blocks begin."""
    text = canvas(reader.sizes, prompt, new)
    block = reader.sizes.block
    return text, range(len(prompt) // block * block, len(text), block)


def base(reader: Reader, prompt: np.ndarray, new: int, tau: float | None) -> Found:
    (text, starts), block, pi = blocks_of(reader, prompt, new), reader.sizes.block, choice(reader, tau)
    steps: list[dict[str, Any]] = []
    for at in starts:
        cur, step = text[at : at + block].copy(), 0
        while (cur == reader.sizes.mask).any():
            shown, tokens = pi(cur, reader.logits(reader.hidden(text[:at], cur)))
            steps.append({"block": at // block, "step": step, "before": cur, "reveal": shown})
            cur, step = np.where(shown, tokens, cur), step + 1
        text[at : at + block] = cur
    return stacked(steps, text), {"target_denoise": len(steps)}


def direct(
    reader: Reader,
    prompt: np.ndarray,
    new: int,
    k: int,
    tau: float | None,
    own_tau: float | None,
    mix: str,
    scale: float,
) -> Found:
    """K steps of the head after each call; `own_tau` is their threshold, the best position alone where None."""
    (text, starts), block = blocks_of(reader, prompt, new), reader.sizes.block
    of_backbone, of_head = choice(reader, tau), choice(reader, own_tau)
    steps: list[dict[str, Any]] = []
    calls = head_calls = 0
    for at in starts:
        cur, step = text[at : at + block].copy(), 0
        while (cur == reader.sizes.mask).any():
            a = reader.hidden(text[:at], cur)
            calls += 1
            for it in range(k + 1):
                g = reader.logits(a)
                _, c, _ = reader.candidates(g)
                shown, tokens = (of_backbone if it == 0 else of_head)(cur, g)
                own = {"block": at // block, "step": step, "it": it, "before": cur, "tok": tokens, "conf": c}
                steps.append(own | {"reveal": shown})
                cur = np.where(shown, tokens, cur)
                if it == k or not (cur == reader.sizes.mask).any():
                    break
                d = reader.added(text[:at], cur, a)
                head_calls += 1
                a = a + scale * d if mix == "sum" else d
            step += 1
        text[at : at + block] = cur
    return stacked(steps, text), {"target_denoise": calls, "mrp_forwards": head_calls}


def drafts_of(
    reader: Reader, before: np.ndarray, cur: np.ndarray, h: np.ndarray, k: int, pi: Pi, context: bool
) -> Any:
    """States C_0..C_K and the drafts between them, the first from `h` itself, the others with the head's sums."""
    states, shown, tokens, a = [cur], [], [], h
    for j in range(k):
        if j and (states[-1] == reader.sizes.mask).any():
            a = a + reader.added(before, states[-1], a, context)
        reveal, said = pi(states[-1], reader.logits(a))
        shown.append(reveal)
        tokens.append(said)
        states.append(np.where(reveal, said, states[-1]))
    return states, shown, tokens


def agrees(drafted: tuple[np.ndarray, np.ndarray], chosen: tuple[np.ndarray, np.ndarray]) -> bool:
    """Whether two choices are the same positions and the same tokens there."""
    return bool((drafted[0] == chosen[0]).all() and (drafted[1] == chosen[1])[drafted[0]].all())


def speculative(
    reader: Reader,
    prompt: np.ndarray,
    new: int,
    k: int,
    tau: float | None,
    *,
    released: bool = False,
    context: bool = True,
) -> Found:
    """Rounds of drafts and one call that verifies them; `released` seeds a round with scores of one reveal before."""
    (text, starts), s, pi = blocks_of(reader, prompt, new), reader.sizes, choice(reader, tau)
    rounds: list[dict[str, Any]] = []
    counts = dict.fromkeys(("seed_forwards", "verify_forwards", "rounds", "drafts", "accepted"), 0)
    for at in starts:
        cur = text[at : at + s.block].copy()
        if not (cur == s.mask).any():
            continue
        h = reader.hidden(text[:at], cur)
        counts["seed_forwards"] += 1
        while (cur == s.mask).any():
            states, shown, tokens = drafts_of(reader, text[:at], cur, h, k, pi, context)
            own = {"block": at // s.block, "start": cur, "cands": np.stack(states)}
            own |= {"draft_reveal": np.stack(shown), "draft_tok": np.stack(tokens)}
            n = 0 if released else 1
            if released or (states[1] == s.mask).any():
                counts["verify_forwards"] += 1
                while n < k and (states[n] == s.mask).any():
                    h = reader.hidden(text[:at], states[n])
                    if not agrees((shown[n], tokens[n]), pi(states[n], reader.logits(h))):
                        break
                    n += 1
            cur = states[n]
            if (cur == s.mask).any():
                h = reader.hidden(text[:at], cur)
                if released:
                    reveal, said = pi(cur, reader.logits(h))
                    cur = np.where(reveal, said, cur)
            rounds.append(own | {"accepted": n, "end": cur})
            counts["accepted"] += n if released else n - 1
            counts["drafts"] += int(np.stack(shown).any(axis=1).sum())
        text[at : at + s.block] = cur
    counts["rounds"] = len(rounds)
    return stacked(rounds, text), counts


def veto(reader: Reader, prompt: np.ndarray, new: int, tau: float, delta: float | None) -> Found:
    """The dynamic rule, and the head against what it proposes.

    With `delta` the head reads the block as it was, without context, and a token is dropped whose score it would
    change by more; without, it reads the revealed block, and a token is dropped that is no longer above `tau`.
    """
    (text, starts), s, pi = blocks_of(reader, prompt, new), reader.sizes, choice(reader, tau)
    steps: list[dict[str, Any]] = []
    for at in starts:
        cur, step = text[at : at + s.block].copy(), 0
        while (cur == s.mask).any():
            h = reader.hidden(text[:at], cur)
            _, c, _ = reader.candidates(reader.logits(h))
            proposed, tokens = pi(cur, reader.logits(h))
            places = np.arange(s.block), tokens
            if delta is not None:
                gate = np.abs(reader.logits(reader.added(text[:at], cur, h, context=False)))[places]
                kept, best = proposed & (gate <= delta), reader.largest(proposed, -gate, 1)
                reader.near(gate[proposed] - delta)
            else:
                after = np.where(proposed, tokens, cur)
                _, _, p = reader.candidates(reader.logits(h + reader.added(text[:at], after, h)))
                gate = p[places]
                kept, best = proposed & (gate > tau), reader.largest(proposed, gate, 1)
                reader.near(gate[proposed] - tau)
            shown = kept if kept.any() else best
            own = {"block": at // s.block, "step": step, "before": cur, "tok": tokens, "conf": c}
            steps.append(own | {"proposed": proposed, "gate": gate, "reveal": shown})
            cur, step = np.where(shown, tokens, cur), step + 1
        text[at : at + s.block] = cur
    return stacked(steps, text), {"target_denoise": len(steps)}
