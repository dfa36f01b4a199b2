"""Endless iterators over batches that are functions of their index."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import grain

_MANY = 2**31 - 1  # batches; a grain dataset has a length


def endless(
    make: Callable[[int], dict[str, np.ndarray]], prefetch: int
) -> "grain.DatasetIterator[dict[str, np.ndarray]]":
    """Iterates over make(0), make(1), ...; `get_state` and `set_state` resume it exactly.

    Args:
      make: batch i, a pure function of i.
      prefetch: batches made ahead in a thread; 0 makes each one when it is asked for.
    """
    import grain  # here, because it takes long and only training reads batches

    options = grain.ReadOptions(num_threads=min(prefetch, 1), prefetch_buffer_size=prefetch)
    return iter(grain.MapDataset.range(_MANY).map(make).to_iter_dataset(options))
