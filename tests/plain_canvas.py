"""What decoders of canvases cost: calls and positions of a row, counted in plain Python."""

from plain_baselines import Count

from paradec_jax.testing import StubDenoiser


def whole_canvas_count(stub: StubDenoiser, prompt: int, new: int) -> Count:
    """A call a token, on the whole canvas."""
    return new, new * (prompt + new)


def dual_cache_count(block: int, stub: StubDenoiser, prompt: int, new: int) -> Count:
    """The canvas once, and for each token its block as far as the canvas goes."""
    end = prompt + new
    blocks = (min(p // block * block + block, end) - p // block * block for p in range(prompt, end))
    return 1 + new, end + sum(blocks)


def strided_count(width: int, stride: int, stub: StubDenoiser, prompt: int, new: int) -> Count:
    """A call a token, on the first window that holds it, as far as the canvas goes."""
    end = prompt + new
    starts = (max(-(-(p - width + 1) // stride), 0) * stride for p in range(prompt, end))
    return new, sum(min(end - start, width) for start in starts)


def grid_count(calls: int, stub: StubDenoiser, prompt: int, new: int) -> Count:
    """The same number of calls on the whole canvas, however many tokens there are."""
    return calls, calls * (prompt + new)


def block_count(block: int, rides: bool, stub: StubDenoiser, prompt: int, new: int) -> Count:
    """A call a token; a block that is complete while its row goes on is stored, in the next call or another one."""
    given = prompt // block * block
    calls, positions = (1, given + block) if rides else (int(given > 0), given)
    for p in range(prompt + rides, prompt + new):
        opens = p % block == 0 and p > prompt
        calls += 1 + (opens and not rides)
        positions += block * (1 + opens)
    return calls, positions
