"""What the least call of a network costs, by formula."""

import math

from paradec_jax.config import RECURRENT_PRESETS
from paradec_jax.models import RecurrentDepthNetwork
from paradec_jax.models.recurrent_depth import parameter_shapes

TINY = RECURRENT_PRESETS["test-recurrent"]


def work(config, batch, positions, context, recurrence):
    return RecurrentDepthNetwork(config, recurrence=recurrence).work(batch, positions, context)


def test_work_of_one_recurrence_reads_every_parameter_but_the_embedding():
    config = RECURRENT_PRESETS["tiny-recurrent"]
    shapes = parameter_shapes(config)
    once = sum(math.prod(leaf.shape) for leaf in _leaves(shapes))  # tied: the embedding is the output matrix
    cost = work(config, batch=1, positions=1, context=0, recurrence=1)
    assert cost.bytes == 4 * once
    attention = 4 * 4 * config.width  # a position sees itself in four layers
    assert cost.flops == 2 * once + attention


def _leaves(tree):
    return [
        leaf for value in tree.values() for leaf in (_leaves(value) if isinstance(value, dict) else [value])
    ]


def test_work_grows_with_recurrences_context_and_rows():
    base = work(TINY, 1, 1, 10, 2)
    more = work(TINY, 1, 1, 10, 4)
    core = (more.bytes - base.bytes) // 2
    assert work(TINY, 1, 1, 10, 6).bytes - more.bytes == 2 * core
    cached = 2 * (1 + 1 + 2 * 2) * TINY.width * 4
    assert work(TINY, 1, 1, 11, 2).bytes - base.bytes == cached
    assert work(TINY, 3, 1, 10, 2).bytes - base.bytes == 2 * 10 * cached
    assert work(TINY, 3, 1, 10, 2).flops == 3 * base.flops
    assert work(TINY, 1, 4, 10, 2).bytes == base.bytes
