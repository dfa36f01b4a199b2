"""Requests "generate until", as lm-eval makes them, through any decoder."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from paradec_jax.data.problems import encode_prompts
from paradec_jax.decode.machine import Setting
from paradec_jax.generate import generate, tokenizer_of
from paradec_jax.store import Model

MAX_GEN_TOKS = 256  # lm-eval's own default
SAMPLING = ("temperature", "top_p", "top_k", "min_p")


class Until(NamedTuple):
    """Generation arguments of a request: texts that end it, tokens at most, (knob, value) of its
    sampling.
    """

    stop: tuple[str, ...]
    max_new_tokens: int
    sampling: tuple[tuple[str, float], ...]


def parse(arguments: Mapping[str, Any]) -> Until:
    """Generation arguments by lm-eval's names.

    Known are `until` (a text or several), `max_gen_toks`, `temperature`, `top_p`, `top_k`, `min_p`,
    and `do_sample`, which sets the temperature to 0 where it is false and asks for one where it is
    true.

    Raises:
      ValueError: an argument that is not known, or sampling without a temperature.
    """
    known = {"until", "max_gen_toks", "do_sample", *SAMPLING}
    if unknown := sorted(arguments.keys() - known):
        raise ValueError(
            f"{unknown[0]} is no generation argument here: known are {', '.join(sorted(known))}"
        )
    until = arguments.get("until") or ()
    stop = (until,) if isinstance(until, str) else tuple(text for text in until if text)
    values = {name: arguments[name] for name in SAMPLING if arguments.get(name) is not None}
    values.setdefault("temperature", 0.0)
    sample = arguments.get("do_sample")
    if sample and not values["temperature"] > 0:
        raise ValueError(
            f"do_sample is true, so temperature must be above 0, not {values['temperature']}"
        )
    if sample is False or not values["temperature"]:
        values = {"temperature": 0.0}  # the most probable token, whatever the filters
    if values.get("top_k") == 0:  # as lm-eval's models take it: no limit
        del values["top_k"]
    budget = arguments.get("max_gen_toks")
    budget = MAX_GEN_TOKS if budget is None else int(budget)
    return Until(stop, budget, tuple(sorted(values.items())))


def generate_until(
    model: Model,
    requests: Sequence[tuple[str, Until]],
    setting: Setting,
    *,
    rows: int = 8,
    seed: int = 0,
) -> list[str]:
    """The continuation of each request, cut before its first stop text.

    A context that leaves no room for its budget loses text on the left, token by token. The k-th of
    equal requests draws with seed + k.

    Args:
      setting: the decoder and its knobs; the request's sampling arguments take the place of theirs.
      rows: requests decoded together.

    Raises:
      ValueError: a budget that the model's length has no room for, or what `generate` refuses.
    """
    groups: dict[tuple[Until, int], list[int]] = {}
    seen: Counter[tuple[str, Until]] = Counter()
    for i, request in enumerate(requests):
        groups.setdefault((request[1], seen[request]), []).append(i)
        seen[request] += 1
    texts = [""] * len(requests)
    for (until, again), members in groups.items():
        room = model.network.max_length - until.max_new_tokens
        if room < 1:
            raise ValueError(
                f"max_gen_toks is {until.max_new_tokens}, but the model was built for "
                f"{model.network.max_length} positions, the context's included"
            )
        contexts = [fitting(model, requests[i][0], room) for i in members]
        chosen = setting.changed(dict(until.sampling))
        longest, _ = encode_prompts(
            tokenizer_of(model),
            contexts,
            spec=model.token_spec,
            may_be_empty=chosen.decoder.any_order,
        )
        for start in range(0, len(contexts), rows):
            batch = contexts[start : start + rows]
            batch += batch[-1:] * (rows - len(batch))  # all of one shape, for one program
            out = generate(
                model,
                batch,
                chosen.decoder,
                knobs=chosen.knobs,
                max_new_tokens=until.max_new_tokens,
                seed=seed + again,
                stop_strings=until.stop,
                bucket=longest.shape[1],
            )
            for i, text in zip(members[start : start + rows], out.text, strict=False):
                texts[i] = text
    return texts


def fitting(model: Model, context: str, room: int) -> str:
    """The longest end of a context, cut between tokens, that has at most `room` tokens with
    begin-of-text.
    """
    tokenizer = tokenizer_of(model)
    while context:
        ids, offsets = tokenizer.encode_with_offsets(context)
        excess = len(tokenizer.begun(ids, model.token_spec.bos)) - room
        if excess <= 0:
            break
        # Without its first tokens, or a few more where they end inside a character.
        starts = [start for start, _ in offsets[excess:] if start >= offsets[excess - 1][1]]
        context = context[starts[0] :] if starts else ""
    return context
