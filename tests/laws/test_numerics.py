"""Laws of scores that are no numbers and of temperatures near 0, for every row of the table of decoders."""

import numpy as np
from decoder_rows import BUDGET
from decoders import EVERY, ROWS, SAMPLED
from results import listed

from paradec_jax import decode
from paradec_jax.testing import Spoilt, tiny_request

BROKEN = {
    "NaN": Spoilt(shift=np.float32(np.nan), state=np.float32(np.nan)),
    "inf": Spoilt(shift=np.float32(np.inf), state=np.float32(np.inf)),
    "-inf": Spoilt(shift=np.float32(-np.inf), state=np.float32(-np.inf)),
    "equal": Spoilt(scale=np.float32(0)),
}
COLD = (1e-7, 1e-8, 1e-9, 1e-12, 1e-20, 1e-30, 1e-36, 1e-38, 1e-40, 1e-45)
LARGE = Spoilt(
    scale=np.float32(4.7), shift=np.float32(7.3)
)  # logits of some tens that no division leaves round


@EVERY
def test_every_row_ends_whatever_the_scores_are(name):
    row = ROWS[name]
    decoder, news = row.decoder(), (BUDGET, 2, 5)
    most = np.array([row.most(new) for new in news])
    further = row.kind.further_networks
    cases = {**BROKEN, "head NaN": Spoilt()} if further else BROKEN
    for said, broken in cases.items():
        heads = broken if said in BROKEN else BROKEN["NaN"]
        params = row.spoilt(broken, **dict.fromkeys(further, heads))
        for temperature in (0.0, 3.0):
            knobs = row.values(temperature=temperature)
            request = tiny_request(news, stop=(0,) if said == "equal" else (-1,))
            result = decode.run(decoder, params, request, knobs, max_steps=int(most.max()))
            assert (np.asarray(result.reasons) > 0).all(), (said, temperature)
            assert (np.asarray(result.network_calls) <= most).all(), (said, temperature)


@SAMPLED
def test_a_temperature_near_0_is_0(name):
    row = ROWS[name]
    decoder, request = row.decoder(), tiny_request((BUDGET, 2, 5), stop=(0,))
    params = row.spoilt(LARGE)
    want = listed(decode.run(decoder, params, request, row.values(temperature=0.0)))
    for temperature in COLD:
        found = listed(decode.run(decoder, params, request, row.values(temperature=temperature)))
        assert found == want, temperature
