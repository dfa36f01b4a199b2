"""Functions that `fit(writers=)` calls with every line of its log; what they need is an extra."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Writer = Callable[[int, Mapping[str, float]], None]


def tensorboard(folder: str | Path) -> Writer:
    """Writes scalars for TensorBoard into a folder; what is not finite is left out.

    Updates that a resumed run applies again are written again.

    Raises:
      ImportError: tensorboardX is missing.
    """
    try:
        from tensorboardX import SummaryWriter
    except ImportError as error:
        raise ImportError("TensorBoard needs tensorboardX: pip install 'paradec-jax[tensorboard]'") from error
    events = SummaryWriter(str(folder))

    def write(step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            if math.isfinite(value):
                events.add_scalar(name, float(value), step)
        events.flush()

    return write


def wandb(project: str, **options: Any) -> Writer:
    """Logs to Weights & Biases, in a run begun with `wandb.init(project=project, **options)`.

    Give `id` and `resume="allow"` so that a resumed run goes on in its own curve, which drops updates that it has.

    Raises:
      ImportError: wandb is missing.
    """
    try:
        import wandb as client
    except ImportError as error:
        raise ImportError("Weights & Biases needs wandb: pip install 'paradec-jax[wandb]'") from error
    run = client.init(project=project, **options)

    def write(step: int, values: Mapping[str, float]) -> None:
        run.log({name: float(value) for name, value in values.items() if math.isfinite(value)}, step=step)

    return write
