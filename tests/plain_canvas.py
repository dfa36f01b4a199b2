"""What decoders of canvases cost: calls and positions of a row, counted in plain Python."""

from plain_baselines import Count
from stubs import StubDenoiser


def whole_canvas_count(stub: StubDenoiser, prompt: int, new: int) -> Count:
    """A call a token, on the whole canvas."""
    return new, new * (prompt + new)


def cached_count(options: dict, stub: StubDenoiser, prompt: int, new: int) -> Count:
    """A call a token: the whole canvas where the cache is renewed, else the block, or with "prefix"
    the block and what follows; of alignment "next" the position before it too.
    """
    end, block, positions = prompt + new, options["length"], 0
    before = stub.alignment == "next" and not options.get("first_alone")
    for p in range(new):
        start, age = prompt + p // block * block - before, p % block
        narrow = end - start
        if options["cache"] == "dual":
            narrow = min(narrow, block + before)
        positions += narrow if age % options.get("renew", block) else end
    return new, positions


def stepped_count(options: dict, stub: StubDenoiser, prompt: int, new: int) -> Count:
    """N calls a block on the whole canvas, or one a token where the block has fewer."""
    sizes = [min(options["length"], new - p) for p in range(0, new, options["length"])]
    return grid_count(sum(min(options["steps"], size) for size in sizes), stub, prompt, new)


def drafted_canvas_count(options: dict, stub: StubDenoiser, prompt: int, new: int) -> Count:
    """The canvas, and then in each block four drafts a call, which are all right; a canvas a draft."""
    sizes = [min(options["length"], new - p) for p in range(0, new, options["length"])]
    return 1 + sum(-(-size // 4) for size in sizes), (1 + new) * (prompt + new)


def strided_count(width: int, stride: int, stub: StubDenoiser, prompt: int, new: int) -> Count:
    """A call a token, on the first window that holds it, as far as the canvas goes."""
    end = prompt + new
    starts = (max(-(-(p - width + 1) // stride), 0) * stride for p in range(prompt, end))
    return new, sum(min(end - start, width) for start in starts)


def grid_count(calls: int, stub: StubDenoiser, prompt: int, new: int) -> Count:
    """The same number of calls on the whole canvas, however many tokens there are."""
    return calls, calls * (prompt + new)


def block_count(options: dict, stub: StubDenoiser, prompt: int, new: int) -> Count:
    """A call a token; a block that is complete while its row goes on is stored, in the next call or
    another one. Blocks count from position 0 or from the prompt's end.
    """
    block, rides = options["block"], options.get("fuse_store", True)
    origin = prompt if options.get("origin") == "prompt" else 0
    given = origin + (prompt - origin) // block * block
    calls, positions = (1, given + block) if rides else (int(given > 0), given)
    for p in range(prompt + rides, prompt + new):
        opens = (p - origin) % block == 0 and p > prompt
        calls += 1 + (opens and not rides)
        positions += block * (1 + opens)
    return calls, positions


def flight_count(options: dict, stub: StubDenoiser, prompt: int, new: int) -> Count:
    """A call a token, from left to right: two blocks in flight and those that are stored, of which
    another one is begun once one position of the last one is shown.
    """
    block, limit, start, count = options["block"], prompt + new, prompt // options["block"], 1
    calls, positions = 1, (start + 1) * block
    for length in range(prompt + 1, limit):
        ready, last = length // block - start, (start + count - 1) * block
        count += length > last and last + block < limit and count - ready < 2
        calls, positions = calls + 1, positions + block * count
        start, count = start + ready, count - ready
    return calls, positions


def verified_block_count(options: dict, stub: StubDenoiser, prompt: int, new: int) -> Count:
    """Two calls a block, whose drafts are all right: a draft, which stores the block before, and a
    verification of twice the block's positions.
    """
    block, limit = options["block"], prompt + new
    given = prompt // block * block
    blocks = -(-(limit - given) // block)
    return 2 * blocks, given + block * (3 * blocks + blocks - 1)


def residual_count(options: dict, stub: StubDenoiser, prompt: int, new: int) -> Count:
    """One token a call and `steps` of the head after it; the head stores what the network stores."""
    block, steps, fused = (
        options["block"],
        options.get("head_steps", 1),
        options.get("fuse_store", True),
    )
    limit, length, cached = prompt + new, prompt, prompt // block * block
    calls, positions, heads = (
        (0, cached, 0) if fused else (int(cached > 0), cached, int(cached > 0))
    )

    def reveal(stores: bool) -> tuple[int, int]:
        now, asked, end = length + 1, 0, length // block * block + block
        for step in range(steps):
            goes = now < min(end, limit)
            asked += goes or (step == 0 and stores and now < limit)
            now += goes
        return now, asked

    first = fused and cached > 0
    while length < limit:
        clean = length == cached + block
        calls, positions = calls + 1, positions + block * (1 + (clean and fused))
        cached += block * clean
        if clean and not fused:
            heads += 1
            continue
        length, asked = reveal(clean or first)
        heads, first = heads + asked, False
    return calls, positions, heads


def drafted_block_count(options: dict, stub: StubDenoiser, prompt: int, new: int) -> Count:
    """`candidates` states of a block a call, each a token further; a head that is always right or
    never.
    """
    block, most, head = options["block"], options.get("candidates", 3), options["head"]
    rides, fused = options.get("ride", True), options.get("fuse_store", True)
    right = getattr(head, "kind", "right") == "right"
    limit, length, cached = prompt + new, prompt, prompt // block * block
    end = -(-limit // block) * block
    calls, positions, heads, drafts = 0, cached, 0, 0

    def draft(stores: bool) -> tuple[int, int]:
        left = max(min(cached + block - length, most - 1), 0) * (length < limit)
        return left, max(left, int(stores and length < limit))

    if fused:
        calls, positions, length = 1, cached + block, length + 1
        drafts, heads = draft(cached > 0)
    else:
        calls = heads = int(cached > 0)
    while length < limit:
        if length == cached + block:
            calls, positions, cached = calls + 1, positions + block * (1 + fused), cached + block
            length += fused
            stored = True
        else:
            left = cached + block - length
            whole = drafts == left and drafts > 0
            reads, rode = 1 + drafts - whole, whole and rides and cached + block < end
            calls, positions = calls + 1, positions + block * (reads + 2 * rode)
            length = min(length + (reads if right else 1), limit)
            stored = rode and right and length < limit
            if stored:
                cached, length = cached + block, length + 1
        drafts, asked = draft(stored)
        if not fused and stored:
            drafts, asked = 0, int(length < limit)
        heads += asked
    return calls, positions, heads * (head != "zero")
