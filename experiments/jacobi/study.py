"""The studies of Jacobi decoding: `python -m experiments.jacobi.study jacobi_table --timed 0`.

Tables 1 and 2 of Jacobi Forcing (arXiv 2512.14681), and sweeps. All of these write what
autoregressive decoding writes, so what differs is the number of tokens a network call, and the
speed. Sweeps have many rows: `--timed 0` leaves the speed out.
"""

from collections.abc import Sequence
from pathlib import Path

from experiments.common.runner import command
from experiments.common.study import Study
from paradec_jax.decode import Jacobi, Lookahead, PromptLookup
from paradec_jax.decode.machine.setting import Setting

BLOCKS = (8, 16, 32)
SPAWNS = (0.0, 0.5, 0.85)


def jacobi(
    block: int, *, running: bool = False, pool: int = 0, candidates: int | None = None
) -> Setting:
    """Jacobi decoding of one window."""
    return Setting("jacobi", Jacobi(block=block, running=running, pool=pool, candidates=candidates))


def multiblock(
    block: int, blocks: int, spawn: float | None, *, pool: int = 0, candidates: int | None = None
) -> Setting:
    """Jacobi decoding of several blocks in flight."""
    decoder = Jacobi(block=block, blocks=blocks, pool=pool, candidates=candidates)
    return Setting("multiblock", decoder, Jacobi.Knobs(spawn=spawn))


def table() -> list[Setting]:
    """The rows of tables 1 and 2 at two block sizes, ours, and what needs no training."""
    # the released settings but for the block size
    return [
        *(jacobi(n) for n in (16, 32, 64)),
        *(jacobi(n, pool=4) for n in (16, 32)),
        *(multiblock(n, 2, 0.85, pool=4) for n in (16, 32)),
        *(multiblock(n, 2, 0.0, candidates=4) for n in (16, 32)),
        *(jacobi(n, running=True) for n in (8, 16, 32)),
        *(jacobi(16, running=True, candidates=count) for count in (2, 4)),
        Setting("prompt_lookup", PromptLookup()),
        Setting("lookahead", Lookahead()),
    ]


def sweep() -> list[Setting]:
    """Block size, blocks in flight, pool and spawn ratio. A single block is never spawned, so it
    has no ratio.
    """
    return [
        multiblock(n, blocks, spawn, pool=pool)
        for blocks in (1, 2, 3)
        for spawn in (SPAWNS if blocks > 1 else (None,))
        for n in BLOCKS
        for pool in (0, 2, 4)
    ]


def candidates() -> list[Setting]:
    """Candidates verified in a call of a running window: next-best alternatives alone (pool 0), or
    a pool's first.
    """
    alone = [jacobi(16, running=True, candidates=count) for count in (1, 2, 3, 4, 6, 8)]
    return [
        *alone,
        *(
            jacobi(16, running=True, pool=pool, candidates=count)
            for pool in (2, 4, 8)
            for count in (2, 3, 4, 6, 8)
        ),
    ]


def compared(block: int) -> Sequence[Setting]:
    """What shows a distilled model beside others: plain, with all that the paper adds, and ours."""
    return [
        jacobi(block),
        multiblock(block, 2, 0.85, pool=4),
        jacobi(block, running=True),
        jacobi(block, running=True, candidates=2),
    ]


STUDIES: dict[str, Study] = {
    "jacobi_table": Study(
        "Jacobi decoders side by side (Tables 1 and 2)", lambda d: table(), family="causal"
    ),
    "jacobi_sweep": Study(
        "Block size, blocks in flight, pool and spawn ratio",
        lambda d: sweep(),
        "block",
        "blocks spawn pool",
        family="causal",
    ),
    "jacobi_candidates": Study(
        "Candidates from a pool against next-best alternatives",
        lambda d: candidates(),
        "candidates",
        "pool",
        family="causal",
    ),
}


if __name__ == "__main__":
    command(STUDIES, Path("experiments/jacobi/results"), "tiny-jacobi")
