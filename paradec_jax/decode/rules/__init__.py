"""Floor 1: pure functions on arrays. They know neither decoders nor networks."""

from paradec_jax.decode.rules.randomness import Purpose, fold, purpose_keys, uniform, uniform_at
from paradec_jax.decode.rules.relaxation import RELAXATIONS, noisy, relaxed
from paradec_jax.decode.rules.sampling import (
    TINY,
    TOP_P_RULES,
    distribution,
    draw,
    earlier,
    filtered_probabilities,
    gumbel,
    is_hot,
    log_probability,
    penalised,
    sample,
)
from paradec_jax.decode.rules.subs import without_mask
from paradec_jax.decode.rules.windows import (
    entry_of,
    last_of,
    number_of,
    pad_slots,
    positions_of,
    put,
    shift,
    where_rows,
    window,
    write_after_read,
)
