"""Floor 2: what every decoder is made of and driven by. It knows no family."""

from paradec_jax.decode.machine.decoder import CachedState, DecoderBase
from paradec_jax.decode.machine.drive import (
    checked,
    compiled_run,
    finish,
    rollout,
    run,
    stream,
    trace,
)
from paradec_jax.decode.machine.knobs import (
    COUNT,
    NOT_NEGATIVE,
    POSITIVE,
    SHARE,
    UNLIMITED,
    Number,
    Range,
    RepetitionKnobs,
    SamplingKnobs,
    Scheduled,
    Whole,
    alternatives,
    as_arrays,
    at_age,
    check_range,
    knob,
)
from paradec_jax.decode.machine.network import (
    CachedNetwork,
    Counts,
    Forward,
    Network,
    Params,
    Prefix,
)
from paradec_jax.decode.machine.queue import serve
from paradec_jax.decode.machine.request import (
    RecordedDraws,
    Request,
    key_of,
    keys_of,
    keys_of_rows,
    make_request,
    seed_words,
)
from paradec_jax.decode.machine.rows import NETWORK_CALLS, POSITIONS, Decoded, Reason, Rows
from paradec_jax.decode.machine.setting import Setting
from paradec_jax.decode.machine.shapes import on_smallest, unless_idle
from paradec_jax.decode.machine.soft import SoftGiven, given_offsets
from paradec_jax.decode.machine.tree import Reading, TreeCall, Windows, forward_tree
from paradec_jax.decode.machine.verify import accept, accept_by_ratio, counted
