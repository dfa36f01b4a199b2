"""Fields of the rows that `compare` returns."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jaxtyping import Bool

from paradec_jax.decode.machine import NETWORK_CALLS, POSITIONS
from paradec_jax.evaluate.answers import Answers
from paradec_jax.evaluate.cases import Source
from paradec_jax.evaluate.intervals import bootstrap, ends, paired, ratio, speedup, wilson
from paradec_jax.evaluate.timing import Speed

Row = dict[str, Any]
RIGHT = (
    "exact",
    "interval",
    "difference",
    "difference_interval",
    "only_here_exact",
    "only_baseline_exact",
)


def source_fields(source: Source, device: Mapping[str, Any]) -> Row:
    """Names, size and choices of a row, its dtype, and the device in a few words; the facts say
    more.
    """
    cpu = f"cpu, {device['threads']} cores"
    model, decoder = source.model, source.setting.decoder
    beside = [name for name in decoder.further_networks if getattr(decoder, name) is None]
    parts = [model.params, *(getattr(model, name).params for name in beside)]
    return {
        "family": source.model.family,
        "model": source.name,
        "decoder": source.setting.name,
        "label": source.setting.label(),
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(parts)),
        "settings": source.setting.settings(),
        "dtype": source.model.config.dtype,
        "device": cpu if device["platform"] == "cpu" else device["kind"],
    }


def right_fields(exact: Bool[np.ndarray, "sources N"] | None, source: int, base: int) -> Row:
    """Right answers of a source, and how they differ from the baseline's; None each where no answer
    is right.
    """
    if exact is None:
        return dict.fromkeys(RIGHT)
    right, pair = int(exact[source].sum()), paired(exact[source], exact[base])
    shares = right, list(wilson(right, exact.shape[1])), pair.difference, list(pair.interval)
    return dict(zip(RIGHT, (*shares, pair.only_first, pair.only_second), strict=True))


def answer_fields(answers: Answers, base: Answers) -> Row:
    """What the batched pass over all problems says of one setting."""
    lengths, each = np.asarray([len(row) for row in answers.ids]), answers.counts[NETWORK_CALLS]
    tokens, calls = int(lengths.sum()), int(each.sum())
    row: Row = {"log_prob": None, "log_prob_interval": None}
    if answers.judged is not None:
        nats, count = answers.judged.T
        row = {
            "log_prob": float(nats.sum() / count.sum()),
            "log_prob_interval": ends(bootstrap(nats, count)),
        }
    return row | {
        "problems": len(answers.ids),
        "network_calls_per_token": calls / tokens,
        "tokens_per_network_call": tokens / calls,
        "tokens_per_network_call_interval": ends(ratio(lengths, each)),
        # A network without recurrences passes its layers once a call.
        "recurrences_per_token": int(answers.counts.get("recurrences", each).sum()) / tokens,
        "equals_greedy": float(
            np.mean([a == b for a, b in zip(answers.ids, base.ids, strict=True)])
        ),
    }


def work_fields(decoder: Any, answers: Answers, lengths: Any) -> Row:
    """Positions, calls of a residual head and floating-point operations per token.

    Operations are estimated (`work` of the networks): every position sees the prompt and half of
    the answer, and after the prompt's call passes the mean recurrences of the row's calls. A call
    of the head reads one block and asks the output matrix for its scores; the first one reads the
    prompt's whole blocks too. None of networks that do not say what a call costs.
    """
    network, tokens = decoder.network, sum(map(len, answers.ids))
    positions = answers.counts[POSITIONS]
    head_calls = answers.counts.get("head_calls", np.zeros_like(positions))
    row: Row = {
        "positions_per_token": int(positions.sum()) / tokens,
        "head_calls_per_token": int(head_calls.sum()) / tokens,
        "flops_per_token": None,
    }
    if not hasattr(network, "work"):
        return row
    flops = 0.0
    for i, (ids, length, calls) in enumerate(zip(answers.ids, lengths, head_calls, strict=True)):
        context = int(length) + len(ids) // 2
        for count, depth in _passes(decoder, answers, i):
            flops += count * _flops_of_a_position(network, context, depth)
        if calls:
            head, block = decoder.head, decoder.head.block
            scores = 2 * network.vocab_size * network.config.width * block
            flops += int(calls) * (head.work(1, block, context).flops + scores)
            flops += head.work(1, int(length) // block * block, 0).flops
    return row | {"flops_per_token": flops / tokens}


def _passes(decoder: Any, answers: Answers, row: int) -> list[tuple[int, float]]:
    """Positions of a row, those of its prompt apart where the network has recurrences, and the
    recurrences of each.
    """
    names = POSITIONS, NETWORK_CALLS, "recurrences"
    if not answers.reading:
        return [(int(answers.counts[POSITIONS][row]), 1)]
    whole, read = (
        [int(of[name][row]) for name in names] for of in (answers.counts, answers.reading)
    )
    later = [a - b for a, b in zip(whole, read, strict=True)]
    depths = [recurrences / max(calls, 1) for _, calls, recurrences in (read, later)]
    if (draft := getattr(decoder, "draft_recurrence", None)) is not None:
        # Half of the positions are drafts, which have most of the calls.
        depths[1] = (draft + decoder.network.at(decoder.recurrence).recurrence) / 2
    return [(read[0], depths[0]), (later[0], depths[1])]


def _flops_of_a_position(network: Any, context: int, depth: float) -> float:
    """Operations of a position, at so many recurrences where the network has any."""
    if "recurrences" not in network.counters:
        return network.work(1, 1, context).flops
    once, twice = (network.at(n).work(1, 1, context).flops for n in (1, 2))
    return once + (depth - 1) * (twice - once)


def speed_fields(speed: Speed, baseline: Speed) -> Row:
    """What the timed calls say of one setting, and the ratios to the baseline that was timed in
    turns with it.
    """
    whole, interval = speedup(speed.generated, speed.each, baseline.generated, baseline.each)
    # Without the prompts, and without the token that each of them predicts.
    later, base_later = (np.subtract(one.generated, one.batch) for one in (speed, baseline))
    reading = {"less": speed.each_reading, "base_less": baseline.each_reading}
    decoding, decoding_interval = speedup(later, speed.each, base_later, baseline.each, **reading)
    return {
        "tokens": speed.tokens,
        "seconds": speed.seconds,
        "quickest_seconds": min(speed.passes),
        "slowest_seconds": max(speed.passes),
        "prompt_seconds": speed.init_seconds,
        "passes": list(speed.passes),
        "generated": list(speed.generated),
        "each": [list(seconds) for seconds in speed.each],
        "tokens_per_second": speed.tokens_per_second,
        "baseline_tokens_per_second": baseline.tokens_per_second,
        "speedup": whole,
        "speedup_interval": ends(interval),
        "decode_tokens_per_second": speed.decode_tokens_per_second,
        "decode_speedup": decoding,
        "decode_speedup_interval": ends(decoding_interval),
        "batch": speed.batch,
        "timed_problems": len(speed.decoded),
        "timed_passes": len(speed.passes),
        "compile_seconds": speed.compile_seconds,
    }
