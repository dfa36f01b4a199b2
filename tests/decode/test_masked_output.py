"""The output matrix of masked samplers: which positions it meets, and that logits never lie in memory whole."""

import dataclasses

import jax
import numpy as np
import pytest
from stubs import StubDenoiser, tiny_denoiser

from paradec_jax import decode
from paradec_jax.config import TokenSpec
from paradec_jax.decode.machine import drive
from paradec_jax.families import parameter_shapes

READ: list[int] = []


@dataclasses.dataclass(frozen=True)
class CountedDenoiser(StubDenoiser):
    """Tells how many positions of a row its output matrix meets in each call of it."""

    def logits(self, params, hidden):
        jax.debug.callback(lambda: READ.append(hidden.shape[1]))
        return super().logits(params, hidden)


@pytest.mark.parametrize("order", ["random", "confidence"])
def test_the_output_matrix_meets_what_may_be_revealed_a_few_positions_at_a_time(order):
    """Of the fullest row what it reveals, or what is masked where the surest are looked for."""
    network = CountedDenoiser(max_length=64)
    decoder = decode.Masked(network, 40, TokenSpec(mask=network.mask, alignment="own"), chunk=3, order=order)
    request = decode.make_request(np.zeros((4, 0)), max_new_tokens=[40, 10, 25, 1], seed=5)
    READ.clear()
    _, infos = decode.trace(decoder, None, request, decoder.Knobs(steps=16), n=20)
    jax.effects_barrier()
    shown = np.asarray(infos.where).sum(axis=2)
    met = shown if order == "random" else np.cumsum(shown[::-1], axis=0)[::-1]
    chunks = int(np.ceil(met.max(axis=1) / 3).sum())
    assert [3] * chunks == READ and chunks > 10


def test_logits_never_lie_in_memory_whole():
    network = tiny_denoiser(vocab_size=97)
    decoder = decode.Masked(network, 40, TokenSpec(mask=96, alignment="own"), chunk=3)
    request, knobs = decode.make_request(np.zeros((2, 0)), max_new_tokens=40), decoder.knobs(None)
    params = parameter_shapes(network.config)
    text = drive.compiled_run.lower(decoder, params, request, knobs, np.int32(40)).as_text()
    assert "x3x97xf32" in text and "x40x97x" not in text
