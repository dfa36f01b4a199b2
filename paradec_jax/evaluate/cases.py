"""What the rows of a table run: prompts in one shape, and decoders that are bound to models."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from paradec_jax.data.problems import Problem, encode_prompts
from paradec_jax.decode import Request, make_request
from paradec_jax.decode.machine import Setting, keys_of_rows
from paradec_jax.evaluate.entropy import Samples
from paradec_jax.evaluate.likelihood import prefix
from paradec_jax.evaluate.timing import Case
from paradec_jax.generate import BUCKET, bind, parameters, tokenizer_of
from paradec_jax.records import record
from paradec_jax.store import Model
from paradec_jax.text.tokenizer import Tokenizer


@record
class Source:
    """A row to be: a model with a tokenizer, the name that the table has for it, and the decoder
    that runs it.
    """

    name: str
    model: Model
    setting: Setting


@record
class Prompts:
    """Encoded prompts, all in one shape: tokens [N, P], lengths [N], one key each, budget of each."""

    tokens: Any
    lengths: Any
    keys: Any
    budget: int
    stop: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        """Positions that a prompt and what follows it need."""
        return self.tokens.shape[1] + self.budget

    def request(self, rows: Sequence[int] | np.ndarray) -> Request:
        """Some of the prompts as one request."""
        at = np.asarray(rows)
        return make_request(
            self.tokens[at],
            self.lengths[at],
            max_new_tokens=self.budget,
            stop=self.stop,
            keys=self.keys[at],
        )

    def texts(self, tokenizer: Tokenizer, ids: Samples) -> list[str]:
        """The text that the ids of each row add to its prompt."""
        rows = zip(self.tokens, self.lengths, ids, strict=True)
        return [
            tokenizer.decode_after(prompt[:length].tolist(), row, skip_special=True)
            for prompt, length, row in rows
        ]


def prompts_of(
    model: Model, problems: Sequence[Problem | str], seed: int, budget: int | None
) -> Prompts:
    """Prompts in one buffer; without a budget there is room for the longest reference solution and
    its end.

    Raises:
      ValueError: no tokenizer, no problem, a too long one, or problems without a solution and no
        budget.
    """
    tokenizer = tokenizer_of(model)
    tokens, lengths = encode_prompts(tokenizer, problems, spec=model.token_spec, bucket=BUCKET)
    most = model.network.max_length
    if budget is None:
        solutions: list[Any] = [getattr(item, "solution", None) for item in problems]
        if None in solutions:
            raise ValueError("problems without a reference solution need a budget of new tokens")
        least = max(len(ids) for ids in tokenizer.encode_batch(solutions)) + 1
        budget = max(least, min(-(-least // BUCKET) * BUCKET, most - tokens.shape[1]))
    if tokens.shape[1] + budget > most:
        raise ValueError(
            f"problem {int(lengths.argmax())} has {int(lengths.max())} tokens, and {budget} may follow: more than "
            f"the {most} positions the model was built for"
        )
    keys = keys_of_rows(seed, len(problems))  # whatever decoder, batch or call a prompt is in
    return Prompts(tokens, lengths, keys, budget, model.token_spec.stop)


def empty_prompts(model: Model, count: int, length: int, seed: int) -> Prompts:
    """What texts of `length` tokens begin with: nothing, or begin-of-text where the model predicts
    the next token.

    No stop token ends such a text.

    Raises:
      ValueError: a model that has neither a begin-of-text nor a stop token and needs one.
    """
    begin = [] if model.network.visibility == "full" else [prefix(model.token_spec)]
    tokens = np.asarray([begin] * count, np.int32)
    return Prompts(tokens, np.full(count, len(begin), np.int32), keys_of_rows(seed, count), length)


def case_of(setting: Setting, model: Model, size: int, params: Any = None) -> Case:
    """A setting's decoder bound to a model and a buffer, greedy where it does not sample.

    `params` are prepared parameters of the model's network; they are prepared here when None.
    """
    network = model.network
    if setting.cache is not None:
        network = dataclasses.replace(network, cache=setting.cache)
    decoder = dataclasses.replace(setting.decoder, network=network, greedy=not setting.sampled)
    decoder = bind(model, decoder, size)
    return Case(decoder, parameters(model, decoder, network=params), setting.knobs)
