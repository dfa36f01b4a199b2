"""What a model that predicts the next token makes of the answers of others."""

import numpy as np
from jaxtyping import Float

from paradec_jax.evaluate.bound import is_exact
from paradec_jax.evaluate.entropy import Samples
from paradec_jax.evaluate.likelihood import Span, continuation_span, log_likelihoods
from paradec_jax.generate import tokenizer_of
from paradec_jax.store import Model
from paradec_jax.text.tokenizer import Tokenizer


def judge_answers(
    judge: Model, tokenizer: Tokenizer, prompts: Samples, answers: Samples
) -> Float[np.ndarray, "N 2"]:
    """Log-probability in nats of each answer after its prompt, and how many tokens it has, [N, 2].

    A judge of another tokenizer reads texts without special tokens. A prompt too long for it loses
    its beginning.

    Args:
      judge: a model that predicts the next token, with a tokenizer; else a ValueError.
      tokenizer, prompts, answers: tokenizer of the ids, and the ids; a prompt has one at least.
    """
    check_judge(judge)
    words, most = tokenizer_of(judge), judge.network.max_length
    reads_ids, spans = words.same_as(tokenizer), []
    for prompt, answer in zip(prompts, answers, strict=True):
        if reads_ids:
            ids = [*prompt, *answer][-(most + 1) :]
            spans.append(Span(tuple(ids), len(ids) - len(answer)))
        else:
            before, after = (tokenizer.decode(ids, skip_special=True) for ids in (prompt, answer))
            spans.append(continuation_span(words, judge.token_spec, before, after, most))
    scores = log_likelihoods(judge.network, judge.params, spans)
    return np.asarray([(of.sum(dtype=np.float64), len(of)) for of, _ in scores]).reshape(-1, 2)


def check_judge(judge: Model) -> None:
    """Refuses a model that does not predict the next token. Raises ValueError."""
    if not is_exact(judge):
        raise ValueError(
            "a judge must be a model that predicts the next token from those before it"
        )
