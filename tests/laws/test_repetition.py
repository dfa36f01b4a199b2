"""A repetition penalty is that of transformers, and decoders that have it write what one-by-one
decoding writes.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoders import CAUSAL
from marks import slow
from stubs import tiny_causal, tiny_causal_params

from paradec_jax import decode
from paradec_jax.decode.rules.sampling import sample

NEW, SIZE, NETWORK, PARAMS = 24, 33, tiny_causal(), tiny_causal_params(0, 2.0)
KINDS = [(decode.AutoRegressive, {}), *map(CAUSAL.get, ("prompt-lookup", "lookahead", "jacobi"))]
KINDS += [slow(*CAUSAL["jacobi-blocks"]), slow(decode.Jacobi, {"block": 4})]
# Prompts, and in their padding all other tokens of the vocabulary.
TOKENS, LENGTHS = np.tile(np.arange(32), (3, 1)), (3, 5, 2)
REQUEST = decode.make_request(TOKENS, LENGTHS, max_new_tokens=NEW, seed=3)


@jax.jit
def logits(tokens):
    empty = NETWORK.init_cache(REQUEST.keys[:1], SIZE)
    out = NETWORK.forward(PARAMS, tokens, jnp.arange(SIZE)[None], decode.Prefix(empty, None))
    return NETWORK.logits(PARAMS, out.hidden)[0]


def scores_after(text, penalty):
    scores = np.array(logits(np.pad(text, (0, SIZE - len(text)))[None])[len(text) - 1])
    for token in set(text):
        scores[token] *= penalty if scores[token] < 0 else 1 / penalty
    return scores


@functools.cache
def one_by_one(penalty, temperature):
    """The tokens after each prompt, and their log-probabilities without a penalty."""
    texts, kept = [], []
    for row, key in enumerate(REQUEST.keys):
        texts.append(text := TOKENS[row, : LENGTHS[row]].tolist())
        for _ in range(NEW):
            scores, at = scores_after(text, penalty)[None, None], jnp.array([[len(text)]])
            token = int(
                jax.jit(sample)(scores, at, key[None], decode.SamplingKnobs(temperature))[0, 0]
            )
            kept.append(jax.nn.log_softmax(scores_after(text, 1))[token])
            text.append(token)
    return [text[-NEW:] for text in texts], kept


@pytest.mark.parametrize(("penalty", "temperature"), [(1.3, 0.0), (0.8, 1.0)])
@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_a_penalty_is_that_of_a_loop_over_tokens(kind, options, penalty, temperature):
    knobs = kind.Knobs(temperature=temperature, repetition_penalty=penalty)
    found = decode.run(kind(NETWORK, SIZE, log_probs=True, **options), PARAMS, REQUEST, knobs)
    texts, kept = one_by_one(penalty, temperature)
    assert found.completions() == texts != one_by_one(1.0, temperature)[0]
    np.testing.assert_allclose(np.concatenate(found.generated_log_probs()), kept, atol=2e-4)


def test_a_guess_of_lookahead_sees_its_own_tokens():
    """The choices after the first row's newest token and after each token of a guess of new ones."""
    decoder = decode.Lookahead(NETWORK, SIZE, level=4, window=3, guesses=2)
    knobs = decoder.knobs(decoder.Knobs(repetition_penalty=3.0))
    guesses = jnp.array([[[9, 8, 9], [22, 18, 21]]] * 3)
    state = jax.jit(decoder.init)(PARAMS, REQUEST, knobs)
    state = dataclasses.replace(state, guesses=guesses)
    choices = jax.jit(decoder._look)(PARAMS, state, knobs)[2][0]
    for seen, at in enumerate((0, 4, 5, 6)):
        text = np.concatenate([state.rows.tokens[0, :4], guesses[0, 1, :seen]])
        assert choices[at] == scores_after(text, 3.0).argmax()
