"""Decoders of the laws' table on networks of random weights, and what their loops ask of several
devices.
"""

from collections import Counter
from typing import Any

import jax
import numpy as np
import stubs

import paradec_jax as pd
from experiments.systems.collectives import collectives, unknown_loops
from paradec_jax.config import TokenSpec
from paradec_jax.decode.machine import drive

PROMPTS = ((3, 1, 4), (1, 5, 2, 6, 5), (2, 7), (8, 3, 9))


def bound(row) -> tuple[Any, Any, bool]:
    """A decoder of the laws' table on networks of random weights, their parameters; on stubs where
    it needs those.
    """
    from decoder_rows import SIZE

    head: tuple[Any, Any] = (None, None)
    mask, alignment = None, row.stub.get("alignment", "own")
    if row.net is stubs.StubNetwork:
        network, params = stubs.tiny_network(), stubs.tiny_params()
    elif row.net is stubs.StubCausal:
        network, params = stubs.tiny_causal(), stubs.tiny_causal_params()
    elif "block" in row.stub:
        changes: dict[str, Any] = {"block": row.stub["block"]}
        head = stubs.tiny_head(**changes), stubs.tiny_head_params(**changes)
        if "others" in row.stub:
            changes["blocks"] = (row.stub["block"], *row.stub["others"])
        network, params, mask = (
            stubs.tiny_blocks(**changes),
            stubs.tiny_blocks_params(**changes),
            31,
        )
    else:
        network, params, mask = stubs.tiny_denoiser(), stubs.tiny_denoiser_params(), 31
    options = dict(row.options)
    if row.kind.further_networks == ("drafter",):
        options["drafter"] = stubs.tiny_drafter()
        params = {"network": params, "drafter": stubs.tiny_drafter_params()}
    elif row.kind.further_networks:
        if row.net is not stubs.StubDenoiser:
            head = network, stubs.tiny_causal_params(seed=1)
        if not isinstance(options["head"], str):
            options["head"] = head[0]
            params = {"network": params, "head": head[1]}
        else:
            params = {"network": params}
    spec = TokenSpec(pad=9, mask=mask, alignment=alignment) if mask else TokenSpec(pad=10)
    try:
        return row.kind(network, SIZE, spec, **options).bind(network, SIZE, spec), params, True
    except (ValueError, TypeError, AttributeError):
        return row.decoder(), row.params, False


def stop_tests(names: list[str]) -> dict[str, Any]:
    """Collectives of an iteration of a decoding loop whose rows lie on all devices, its loops, and
    the bytes.
    """
    from decoders import ROWS

    found, where = {}, pd.make_mesh(data=-1, fsdp=1)
    for name in names or list(ROWS):
        decoder, params, _ = bound(ROWS[name])
        request = stubs.tiny_request(6, prompts=PROMPTS)
        request = jax.device_put(request, pd.row_shardings(request, where))
        knobs = decoder.knobs(ROWS[name].values())
        params = jax.device_put(params, jax.NamedSharding(where, jax.P()))
        with jax.set_mesh(where):
            program = drive.compiled_run.lower(decoder, params, request, knobs, np.int32(99))
        text = program.compile().as_text()
        count: Counter[str] = Counter()
        size = 0
        for sign, iterations in ((1, 1), (-1, 0)):  # what an iteration adds
            for kind, one in collectives(text, unknown=iterations).items():
                count[kind] += sign * one.count
                size += sign * one.bytes
        loop = {kind: number for kind, number in count.items() if number}
        found[name] = {"loop": loop, "bytes": size, "loops": unknown_loops(text)}
    return found
