"""A model and a decoder as lm-eval sees them. Needs the extra `eval` (lm-eval 0.4.13 or newer).

::

    import lm_eval
    import paradec_jax as pd
    from paradec_jax.evaluate.harness import DecoderLM

    lm = DecoderLM(pd.load("tiny-recurrent"), pd.Wavefront())
    lm_eval.simple_evaluate(model=lm, tasks=[...])

Likelihoods come from the network at its default recurrence and are the same for every decoder; only
generated text depends on the decoder. They are exact where the model predicts the next token. One
that fills masks answers with a lower bound (`evaluate.bound`) and says so: it warns, and
`DecoderLM.likelihood` is "bound". Equal contexts share their draws, so that all choices are hidden
alike. With an `order` its likelihoods are exact, those of writing one position a call in that order.
"""

import warnings
from collections.abc import Sequence
from typing import Any

from paradec_jax.decode import DecoderBase
from paradec_jax.decode.machine import Setting
from paradec_jax.evaluate.bound import DRAWS, ORDERS, is_exact, mask_of, score_spans
from paradec_jax.evaluate.likelihood import Span, continuation_span, rolling_spans
from paradec_jax.evaluate.until import generate_until, parse
from paradec_jax.generate import mark_of, tokenizer_of
from paradec_jax.store import Model

try:
    from lm_eval.api.model import LM
except ImportError as error:
    raise ImportError("lm-eval is missing: install paradec-jax[eval]") from error


class DecoderLM(LM):
    """The three questions of lm-eval, answered by one model; text is written by one decoder."""

    def __init__(
        self,
        model: Model,
        decoder: DecoderBase,
        knobs: Any = None,
        *,
        rows: int = 8,
        seed: int = 0,
        draws: int | None = None,
        order: str | None = None,
    ) -> None:
        """Takes a model and a decoder.

        Args:
          model: a model with a tokenizer.
          decoder: an unbound decoder.
          knobs: knobs of the decoder; a request's sampling arguments take the place of theirs.
          rows: requests answered together.
          seed: seed of initial states and of all draws.
          draws: draws of the bound on each likelihood, 128 when None; left out where likelihoods
            are exact.
          order: how the positions of a span are hidden by a model that fills masks: "forward" or
            "backward" for likelihoods, "random" or None for bounds.

        Raises:
          ValueError: no tokenizer, a model that has no likelihoods and no bounds, or draws or an
            order where there are none.
        """
        super().__init__()
        tokenizer_of(model)
        exact = is_exact(model)
        if exact and (draws is not None or order is not None):
            raise ValueError(
                "this model's likelihoods are exact, so draws and order must be left out"
            )
        self.order = order or ORDERS[0]
        self.likelihood = "exact" if exact or self.order != ORDERS[0] else "bound"
        self.model, self.setting = model, Setting(type(decoder).__name__, decoder, knobs)
        self.rows, self.seed, self.draws = rows, seed, DRAWS if draws is None else draws
        # Tokens that may follow a row's first: a model that fills masks has to read the last one
        # too.
        self.room = model.network.max_length - (not exact)
        if not exact:
            mask_of(model)
        if self.likelihood == "bound":
            warnings.warn(
                "log-likelihoods of this model are lower bounds, "
                f"each the mean of {self.draws} draws",
                stacklevel=2,
            )

    @property
    def tokenizer_name(self) -> str:
        """Nothing: requests hold plain text, never a chat template's."""
        return ""

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """(Log-likelihood in nats or a lower bound, whether the model would write it) of (context,
        continuation).
        """
        tokenizer, spec = tokenizer_of(self.model), self.model.token_spec
        pairs = [request.args for request in requests]
        spans = [continuation_span(tokenizer, spec, a, b, self.room) for a, b in pairs]
        # Equal contexts share their draws; streams are numbers of 31 bits.
        return self._score(spans, [mark_of(context.encode()) >> 1 for context, _ in pairs])

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        """Log-likelihood in nats of whole texts, or a lower bound, each token scored once."""
        tokenizer, spec = tokenizer_of(self.model), self.model.token_spec
        texts = [rolling_spans(tokenizer, spec, request.args[0], self.room) for request in requests]
        scores = iter(self._score([span for spans in texts for span in spans], None))
        return [sum((next(scores)[0] for _ in spans), 0.0) for spans in texts]

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """Continuations of contexts, each with its own stop texts, budget and temperature."""
        pairs = [(request.args[0], parse(request.args[1])) for request in requests]
        return generate_until(self.model, pairs, self.setting, rows=self.rows, seed=self.seed)

    def _score(
        self, spans: Sequence[Span], streams: Sequence[int] | None
    ) -> list[tuple[float, bool]]:
        scores = score_spans(
            self.model,
            spans,
            draws=self.draws,
            order=self.order,
            streams=streams,
            seed=self.seed,
            batch=self.rows,
        )
        return [(-of.nats, bool(of.greedy)) for of in scores]
