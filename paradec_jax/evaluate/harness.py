"""A model and a decoder as lm-eval sees them. Needs the extra `eval` (lm-eval 0.4.13 or newer).

::

    import lm_eval
    import paradec_jax as pd
    from paradec_jax.evaluate.harness import DecoderLM

    lm = DecoderLM(pd.load("tiny-recurrent"), pd.Wavefront())
    lm_eval.simple_evaluate(model=lm, tasks=[...])

Likelihoods come from the network at its default recurrence and are the same for every decoder; only generated
text depends on the decoder. They are exact, not bounds. What each method does stands in `likelihood` and `until`.
"""

from collections.abc import Sequence
from typing import Any

from paradec_jax.evaluate.continuations import tokenizer_of
from paradec_jax.evaluate.likelihood import continuation_row, log_likelihoods, rolling_rows
from paradec_jax.evaluate.until import generate_until, parse
from paradec_jax.store import Model

try:
    from lm_eval.api.model import LM
except ImportError as error:
    raise ImportError("lm-eval is missing: install paradec-jax[eval]") from error


class DecoderLM(LM):
    """The three questions of lm-eval, answered by one model; text is written by one decoder."""

    def __init__(
        self, model: Model, decoder: Any, knobs: Any = None, *, rows: int = 8, seed: int = 0
    ) -> None:
        """Takes a model and a decoder.

        Args:
          model: with a tokenizer; its logits must predict the next token.
          decoder: unbound.
          knobs: its knobs; a request's sampling arguments take the place of theirs.
          rows: requests answered together.
          seed: of initial states and of all draws.

        Raises:
          ValueError: no tokenizer, or logits that predict their own position.
        """
        super().__init__()
        tokenizer_of(model)
        if model.token_spec.alignment != "next":
            raise ValueError("this needs a model whose logits predict the next token")
        self.model, self.decoder, self.knobs, self.rows, self.seed = model, decoder, knobs, rows, seed

    @property
    def tokenizer_name(self) -> str:
        """Nothing: requests hold plain text, never a chat template's."""
        return ""

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """(Log-likelihood in nats, whether greedy decoding would write it) of (context, continuation) pairs."""
        tokenizer, spec = tokenizer_of(self.model), self.model.token_spec
        length = self.model.network.max_length
        pairs = [request.args for request in requests]
        return self._score([continuation_row(tokenizer, spec, a, b, length) for a, b in pairs])

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        """Log-likelihood in nats of whole texts, each token scored once."""
        tokenizer, spec = tokenizer_of(self.model), self.model.token_spec
        length = self.model.network.max_length
        texts = [rolling_rows(tokenizer, spec, request.args[0], length) for request in requests]
        scores = iter(self._score([row for rows in texts for row in rows]))
        return [sum((next(scores)[0] for _ in rows), 0.0) for rows in texts]

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """Continuations of contexts, each with its own stop texts, budget and temperature."""
        pairs = [(request.args[0], parse(request.args[1])) for request in requests]
        name = type(self.decoder).__name__
        return generate_until(
            self.model, pairs, self.decoder, self.knobs, name=name, rows=self.rows, seed=self.seed
        )

    def _score(self, rows: Sequence[Any]) -> list[tuple[float, bool]]:
        model = self.model
        return log_likelihoods(model.network, model.params, rows, batch=self.rows, seed=self.seed)
