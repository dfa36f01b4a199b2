"""Recorded arrays of the original programs' judgements: generative perplexity, a last word's bound
and fill.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import over
from reading import read
from recorded_masked_diffusion import arrays, assert_log_probs, model

from experiments.masked_diffusion.judge import summed
from paradec_jax.decode.rules.subs import subs, without_mask
from paradec_jax.evaluate.bound import bounds, costs_of
from paradec_jax.evaluate.likelihood import Span
from paradec_jax.noise import LOGLINEAR, SDTT_TIMES, hide

READ = {  # arrays of eval.npz, each by the test that compares it or as its input
    "mdlm_gen_ppl",
    "mdlm_gen_ppl_weight",
    "sdtt_gen_ppl",
    "gen_tokens",
    "gen_logits",
    "eos_id",
    "lambada_prefix",
    "lambada_suffix",
    "lambada_u_t",
    "lambada_u_mask",
    "lambada_nll",
    "lambada_greedy",
    "lambada_log_probs",
}


def recorded():
    return arrays("eval")


def test_every_recorded_array_is_compared():
    assert recorded().keys() == READ


def generative(definition):
    """Perplexity, and the tokens that count."""
    tokens, logits = recorded()["gen_tokens"], recorded()["gen_logits"].astype(np.float32)
    log_probs = jax.nn.log_softmax(jnp.asarray(logits[:, :-1]))
    nats = -np.take_along_axis(np.asarray(log_probs), tokens[:, 1:, None], axis=-1)[..., 0]
    above, below, counted = summed(
        list(nats), tokens.tolist(), definition, (int(recorded()["eos_id"]),)
    )
    return math.exp(above.sum() / below.sum()), counted


@over(["sdtt", "mdlm"], argument="definition")
def test_generative_perplexity(definition):
    value, counted = generative(definition)
    assert value == pytest.approx(float(recorded()[f"{definition}_gen_ppl"]), rel=1e-4)
    every = recorded()["gen_tokens"][:, 1:].size
    assert counted.sum() == (every if definition == "sdtt" else recorded()["mdlm_gen_ppl_weight"])
    assert (counted.sum() < every) == (definition == "mdlm")


def span():
    """The suffix without its end-of-text is scored."""
    prefix, suffix = recorded()["lambada_prefix"].tolist(), recorded()["lambada_suffix"].tolist()
    return Span((*prefix, *suffix), len(prefix), len(prefix) + len(suffix) - 1)


def log_probs(network, params, tokens, mask):
    return subs(read(network, params, tokens)[0], tokens, mask)


def test_the_last_word_is_filled_in_one_call():
    network, params, spec = model()
    ids, scored = np.asarray(span().ids), slice(span().start, span().stop)
    hidden = ids.copy()
    hidden[scored] = spec.mask
    got = np.asarray(log_probs(network, params, jnp.asarray(hidden)[None], spec.mask)[0])
    assert_log_probs(got, recorded()["lambada_log_probs"])
    want = recorded()["lambada_greedy"]
    assert jnp.argmax(without_mask(jnp.asarray(got), spec.mask), axis=-1).tolist() == want.tolist()


def test_the_last_words_bound():
    """The recorded times and masks. `bounds` draws counts: it agrees within what they leave open."""
    network, params, spec = model()
    uniforms = jnp.asarray(recorded()["lambada_u_mask"]).reshape(-1, len(span().ids))
    t = SDTT_TIMES.at(jnp.asarray(recorded()["lambada_u_t"]), len(uniforms))
    ids = jnp.broadcast_to(jnp.asarray(span().ids), uniforms.shape)
    at = jnp.arange(ids.shape[1])
    where = jnp.broadcast_to((at >= span().start) & (at < span().stop), ids.shape)
    noised, hidden = hide(ids, uniforms, LOGLINEAR.mask_probability(t), spec.mask, where)
    costs = jax.jit(costs_of, static_argnums=(0, 4, 5))
    nats = costs(network, params, noised, ids, spec.mask, 0, None)
    each = LOGLINEAR.weight(t) * jnp.sum(jnp.where(hidden, nats, 0), axis=1)
    assert float(jnp.mean(each)) == pytest.approx(float(recorded()["lambada_nll"]), rel=1e-4)
    (own,) = bounds(network, params, [span()], spec.mask, draws=64, batch=64)
    error = float(jnp.std(each, ddof=1)) / math.sqrt(len(each))
    assert abs(own.nats - float(jnp.mean(each))) < 3 * error and own.error < error / 4
