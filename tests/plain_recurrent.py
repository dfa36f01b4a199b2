"""Network calls, positions and recurrences of the recurrent decoders on their stub, in closed form."""

import math

from plain_baselines import Count
from stubs import StubCausal, StubNetwork


def one_by_one_count(stub: StubCausal, prompt: int, new: int) -> Count:
    """One call a token."""
    return new, prompt + new - 1


def static_count(stub: StubNetwork, prompt: int, new: int) -> Count:
    """One call a token, r recurrences each."""
    return new, prompt + new - 1, new * stub.recurrence


def latent_count(stub: StubNetwork, prompt: int, new: int) -> Count:
    """Each token leaves when its latent stands still, one recurrence after it arrived."""
    first = max(stub.needs(p) for p in range(prompt)) + 1
    later = sum(min(stub.needs(p) + 1, stub.recurrence) for p in range(prompt, prompt + new - 1))
    return new, prompt + new - 1, min(first, stub.recurrence) + later


def second_check_count(stub: StubNetwork, prompt: int, new: int) -> Count:
    """The entropy never changes, which the second check sees."""
    return new, prompt + new - 1, 2 * new


def speculative_count(
    draft: int, lookahead: int, stub: StubNetwork, prompt: int, new: int
) -> Count:
    """A round commits the drafts before the first position that needs more than the draft's
    recurrences.
    """
    length, rounds = prompt + 1, 0
    while length < prompt + new:
        good = [stub.needs(length - 1 + i) <= draft for i in range(lookahead)]
        length += lookahead if all(good) else good.index(False) + 1
        rounds += 1
    one_round = lookahead * draft + stub.recurrence
    return (
        1 + rounds * (lookahead + 1),
        prompt + rounds * 2 * lookahead,
        stub.recurrence + rounds * one_round,
    )


def wavefront_count(inner: int, stub: StubNetwork, prompt: int, new: int) -> Count:
    """k steps until a position stands still, then a token a step, with k positions on the way."""
    k = math.ceil(stub.needed[0] / inner) + 1
    steps = k + new - 2 if new > 1 else 0
    positions = prompt + sum(min(t, k) for t in range(1, steps + 1))
    return 1 + steps, positions, stub.recurrence + steps * inner
