"""`paradec train OBJECTIVE --model M --data F`: each objective has the options that are its own."""

import inspect
from collections.abc import Callable
from typing import Annotated, Any

import jax
from tyro.conf import arg
from tyro.extras import SubcommandApp

from paradec_jax.io import WRONG_INPUT, one_sentence
from paradec_jax.objectives import OBJECTIVES
from paradec_jax.objectives.options import Run
from paradec_jax.objectives.run import train
from paradec_jax.train import NoneReadable, NonFiniteLoss
from paradec_jax.train.processes import leave

BARE = arg(name="")


def _command(kind: Any) -> Callable[..., int]:
    """The function of one subcommand, whose annotations are its options."""

    def command(objective: Annotated[kind, BARE], run: Annotated[Run, BARE]) -> int:
        try:
            train(objective, run)
        except (*WRONG_INPUT, NonFiniteLoss, NoneReadable) as error:
            if jax.distributed.is_initialized():
                leave(f"paradec: {one_sentence(error)}")
            raise ValueError(one_sentence(error)) from error
        return 0

    return command


app = SubcommandApp()
app.__doc__ = "Trains a model on JSON lines; a run that was stopped goes on when the same command is given again."
for _name, _kind in OBJECTIVES.items():
    app.command(name=_name, help=inspect.cleandoc(_kind.__doc__).partition("\n\nAttributes:")[0])(
        _command(_kind)
    )
