"""Continuations cut where the text ends, options of decoders, and tables."""

import dataclasses

import pytest
from recital import CONFIG, recite
from stubs import StubNetwork

import paradec_jax as pd
from experiments.replicas import ReleasedWavefront
from experiments.tasks import build_tokenizer, token_spec
from paradec_jax.evaluate.continuations import continuations, cut
from paradec_jax.evaluate.options import choose
from paradec_jax.families import FAMILIES
from paradec_jax.store import Model

GREEDY = pd.AutoRegressive(greedy=True)


@pytest.fixture(scope="module")
def model():
    return Model(CONFIG, {}, token_spec(), build_tokenizer())


def on(model, network):
    """The model with another network."""
    copied = dataclasses.replace(model)
    copied.__dict__["network"] = network
    return copied


class TestContinuations:
    PROMPTS = ("Ana has 3 apples.", "Ben", "Cal and Dan have 2 pears.")

    def test_reasons_and_texts(self, model):
        script = "10 apples"
        tokens = len(model.tokenizer.encode(script))
        prompt = "Ana"
        start = 1 + len(model.tokenizer.encode(prompt))
        network = recite(model.tokenizer, script, start)

        def one(**more):
            return continuations(on(model, network), [prompt], GREEDY, rows=1, **more)[0]

        ended, cut_short = one(max_new_tokens=20), one(max_new_tokens=2)
        assert (ended.text, ended.reason, len(ended.tokens)) == (script, "stop token", tokens + 1)
        assert cut_short.reason == "budget" and len(cut_short.tokens) == 2
        stopped = one(max_new_tokens=20, stop=("zzz", " app"))
        assert (stopped.text, stopped.reason) == ("10", "stop string") and len(stopped.tokens) <= tokens

    def test_batches_of_one_shape_do_not_change_a_row(self, model):
        network = StubNetwork(vocab_size=384, max_length=256)
        options = {"max_new_tokens": 5, "stop": ("e",)}
        two, four = (
            continuations(on(model, network), self.PROMPTS, GREEDY, rows=n, **options) for n in (2, 4)
        )
        assert two == four and len(two) == 3

    def test_what_the_release_leaves_behind_is_cut(self, model):
        tokenizer, spec = model.tokenizer, model.token_spec
        words = tokenizer.encode(" 1 2 3")
        beyond = [*words, spec.stop[0], *words]  # tokens after a stop token
        assert cut(tokenizer, spec, beyond, 20, ()) == (beyond[:4], " 1 2 3", "stop token")
        assert cut(tokenizer, spec, beyond, 2, ()) == (words[:2], " 1 2", "budget")
        assert cut(tokenizer, spec, words, 20, ("2",)) == (words, " 1 ", "stop string")

    def test_the_released_wave_stays_within_the_budget(self, model):
        network = StubNetwork(vocab_size=384, max_length=256)
        released = ReleasedWavefront(window=3, inner_recurrence=4, headway=2, greedy=True)
        one = continuations(on(model, network), ["Ana"], released, max_new_tokens=3, rows=1)[0]
        expected = network.expected([1, *model.tokenizer.encode("Ana")], 3)
        assert list(one.tokens) == expected and one.text == model.tokenizer.decode(expected)

    def test_rows_below_one(self, model):
        with pytest.raises(ValueError, match="rows must be at least 1, not 0"):
            continuations(model, ["Ana"], GREEDY, max_new_tokens=1, rows=0)


class TestOptions:
    def test_each_decoder_takes_its_own(self):
        decoders = FAMILIES["recurrent_depth"].decoders
        decoder, knobs = choose("adaptive", decoders["adaptive"], options={"recurrence": 3, "top_p": 0.5})
        assert (decoder.max_recurrence, knobs.top_p, decoder.greedy) == (3, 0.5, True)
        decoder, knobs = choose("wavefront", decoders["wavefront"], options={"window": 9, "temperature": 0.2})
        assert (decoder.window, knobs.temperature, decoder.greedy) == (9, 0.2, False)
        static, sampled = decoders["autoregressive"], pd.Static.Knobs(temperature=1.0)
        assert not choose("autoregressive", static, sampled)[0].greedy
        with pytest.raises(ValueError, match="--inner-recurrence is no option of autoregressive"):
            choose("autoregressive", static, options={"inner_recurrence": 2})
