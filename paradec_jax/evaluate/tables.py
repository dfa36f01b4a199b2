"""The rows of `paradec compare`: settings that suit the bundled models, by family."""

import dataclasses

from paradec_jax.decode.machine import Setting
from paradec_jax.families import choose

WAVE = "wavefront --momentum 0 --inner-recurrence"
# As command lines name them, the baseline with a star after it; rows with a plus stand in the table
# of several families, too.
ROWS = {
    "recurrent_depth": f"""
        autoregressive --recurrence 1 +
        autoregressive --recurrence 2 +
        autoregressive --recurrence 4
        autoregressive --recurrence 16 *
        adaptive --exit-threshold 0.2 +
        speculative --recurrence 4 --draft-recurrence 1 --lookahead 4 +
        jacobi --block 8 --recurrence 1
        jacobi --block 8 --recurrence 1 --running +
        {WAVE} 16 --window 1 --exit-threshold inf
        {WAVE} 1 --window 8 --headway 8 --no-warm-start --prefill-recurrence 1 --exit-threshold inf +
        {WAVE} 1 --window 2 --prefill-recurrence 4 --exit-threshold 0.4 +
        {WAVE} 1 --window 3 --prefill-recurrence 4 --exit-threshold 0.1
    """,
    "causal": """
        autoregressive *
        prompt_lookup +
        lookahead
        lookahead --level 3 --window 3 --guesses 3 +
        drafted +
        drafted --places 1 +
        jacobi --block 16
        multiblock --block 8 --spawn 0 +
        jacobi --block 16 --pool 4
        multiblock --block 16 --pool 4 --spawn 0.5
        multiblock --block 16 --candidates 4 --spawn 0
        jacobi --block 8 --running +
        jacobi --block 16 --running
        jacobi --block 16 --running --candidates 2
    """,
    "masked_diffusion": """
        strided --steps 64
        masked --steps 64 *
    """,
    "block_diffusion": """
        block --rule static *
        block --rule static --no-fuse-store --no-fuse-prompt
        block --rule static --steps 4 +
        block --rule entropy +
        block --rule factor +
        block --rule threshold
        self_verified +
        self_verified --causal
        self_verified --route score
        in_flight --flight 4 +
        in_flight --flight 4 --rule certain
        residual_speculative --rule static --head zero
        residual_speculative --rule static
        residual_speculative --head zero +
        residual_speculative +
        residual --rule static --head zero
        residual --rule static
        residual --head zero +
        residual +
        block +
    """,
    "full_attention": """
        semi_autoregressive --rule static *
        semi_autoregressive --rule static --steps 16
        semi_autoregressive --rule static --steps 8
        semi_autoregressive --rule factor
        semi_autoregressive --cache prefix
        semi_autoregressive --cache dual +
        semi_autoregressive +
        in_flight +
        speculative +
        wino --length 32 +
        prophet +
        planned
        masked --order confidence --temperature 0
    """,
}


def _table(family: str, marks: tuple[str, ...]) -> tuple[Setting, ...]:
    return tuple(
        dataclasses.replace(choose(family, words.rstrip(" *+")), baseline=words.endswith("*"))
        for words in ROWS[family].strip().splitlines()
        if words.endswith(marks)
    )


TABLES = {family: _table(family, ("",)) for family in ROWS}
# Rows where models of several families are compared
SHORT = {family: _table(family, ("*", "+")) for family in ROWS}
