"""Options that every objective has, and what is read off them alone."""

from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import jax
import optax
from tyro.conf import OmitArgPrefixes, arg

from paradec_jax.config import Ranged, check_numbers
from paradec_jax.decode.machine import key_of, seed_words
from paradec_jax.families import matrix_axes
from paradec_jax.records import choices
from paradec_jax.sharding.mesh import make_mesh
from paradec_jax.store import Model
from paradec_jax.train import adamw, initialize, muon

LENGTH = 1024  # positions of the longest row where nothing is given

T = TypeVar("T")
# Options of a part that have no prefix, and whose errors tyro passes on.
Bare = OmitArgPrefixes[Annotated[T, arg(name="")]]


@choices
class Cluster:
    """Processes and their mesh; one device of one process unless something else is given or found.

    Attributes:
      coordinator: HOST:PORT of process 0, where neither experiments/launch/local.py nor what JAX
        finds of the cluster says it.
      processes: how many there are; with coordinator. 1 alone is one process, whatever JAX finds.
      process: which this one is, from 0; with coordinator.
      heartbeat_s: seconds after which a silent process counts as dead and the others end.
      data: copies of the parameters.
      fsdp: devices over which rows and parameters lie; None for all that are left, where anything
        else is given.
      tensor: devices over which heads, inner widths and the vocabulary lie.
    """

    coordinator: str | None = None
    processes: int | None = None
    process: int | None = None
    heartbeat_s: int = 100
    data: int = 1
    fsdp: int | None = None
    tensor: int = 1

    def join(self) -> jax.sharding.Mesh | None:
        """Finds the other processes, before anything asks for a device, and makes the mesh; None
        for one device.

        Raises:
          ValueError: numbers out of range.
        """
        check_numbers(Cluster, vars(self), {"process": (0, 65535)}, within="cluster.")
        initialize(self.coordinator, self.processes, self.process, heartbeat_s=self.heartbeat_s)
        if jax.process_count() == 1 and (self.data, self.fsdp, self.tensor) == (1, None, 1):
            return None
        return make_mesh(self.data, self.fsdp or -1, self.tensor)


@choices
class Run(Ranged):
    """Options of a run, the same for every objective.

    A call that ends early, by --minutes or a signal, goes on when the same command is given again.

    Attributes:
      model: a model folder, the name of a bundled model, a Hugging Face folder, a .gguf file or
        org/name[@revision].
      data: JSON lines with "messages", "prompt" and "response", or "text": a file, a folder or a
        pattern.
      held_out: lines of the same form that the model is measured on before and after.
      out: folder of the run; runs/OBJECTIVE-MODEL by default, of a run's model runs/OBJECTIVE-RUN.
      minutes: after so many the call ends, before its run is done.
      updates: length of the run, instead of epochs.
      epochs: length of the run in passes over the data.
      batch_tokens: positions of an update, padding included.
      length: tokens of the longest example; 1024, or as many as the model has room for, by default.
      long: longer examples are left out (drop) or lose their end (cut).
      packed: rows hold several examples, which do not see each other.
      skip_bad: lines that cannot be used are counted and left out, instead of ending the run.
      learning_rate: peak of the schedule, of the matrices with muon.
      optimizer: adamw or muon.
      adam_learning_rate: peak for what is no matrix, with muon.
      weight_decay: decoupled decay.
      warmup: share of the updates in which the rate climbs.
      cooldown: share of the updates, the last ones, in which it falls.
      ema: decay of a moving average of the parameters, which then is what the run ends in.
      blend: share of what training changed that the run's model has: base + blend (trained - base).
        Below 1 more stays of what it knew (Wortsman et al., 2022, arXiv 2109.01903). A finished run
        is given another at once.
      base: the model that is blended with where it is not `model`, such as that before several
        runs.
      layers: share of the layers that train, the upper ones, one at least; below 1 embedding and
        output matrix stay.
      lora: rank of the adapters that train in the place of these layers' matrices; the run's folder
        then has `adapter`, in PEFT's layout, beside the merged `model`.
      precision: of parameters and activations; mixed has parameters in float32, bfloat16 rounds
        updates away that are far below a number's size. The model is written as it was read.
      products: jax's precision of products, such as BF16_BF16_F32.
      remat: what a backward pass computes anew, as of the model's config.
      accumulate: parts of a batch that are computed one after the other.
      seed: of all draws.
      checkpoint_every: updates between checkpoints.
      allow: parts in which the call may differ from the run that it goes on with, such as steps.
      cluster: processes and their devices.
    """

    model: str
    data: str
    held_out: str | None = None
    out: Path | None = None
    minutes: float | None = None
    updates: int | None = None
    epochs: float = 1.0
    batch_tokens: int = 4096
    length: int | None = None
    long: Literal["drop", "cut"] = "drop"
    packed: bool = False
    skip_bad: bool = False
    learning_rate: float = 2e-5
    optimizer: Literal["adamw", "muon"] = "adamw"
    adam_learning_rate: float = 2e-5
    weight_decay: float = 0.0
    warmup: float = 0.05
    cooldown: float = 0.5
    ema: float | None = None
    blend: float = 1.0
    base: str | None = None
    layers: float = 1.0
    lora: int | None = None
    precision: Literal["float32", "mixed", "bfloat16"] = "float32"
    products: str | None = None
    remat: str = "none"
    accumulate: int = 1
    seed: int = 0
    checkpoint_every: int = 50
    allow: tuple[str, ...] = ()
    cluster: Cluster = Cluster()

    BOUNDS = {  # noqa: RUF012
        **dict.fromkeys(("warmup", "cooldown", "layers", "blend"), (0, 1)),
        **dict.fromkeys(("learning_rate", "adam_learning_rate", "weight_decay"), (0, 10)),
        "ema": (0, 0.999999),
        "batch_tokens": (1, 2**26),
    }

    @property
    def key(self) -> jax.Array:
        """The key that all keys of the run are folded from."""
        return key_of(seed_words(self.seed))

    def row_length(self, model: Model) -> int:
        """Positions of the longest row. Raises ValueError where the model has no room for it."""
        most = model.network.max_length
        if self.length and not 1 < self.length <= most:
            raise ValueError(
                f"length must be from 2 to the {most} positions of the model, not {self.length}"
            )
        return self.length or min(LENGTH, most)

    def optimizer_for(self, config: Any, updates: int) -> optax.GradientTransformation:
        """The optimizer of a model of this config, on a schedule of so many updates."""
        warmup = min(round(self.warmup * updates), updates)
        cooldown = min(round(self.cooldown * updates), updates - warmup)
        ramps: Any = {"warmup": warmup, "cooldown": cooldown, "weight_decay": self.weight_decay}
        if self.optimizer == "adamw":
            return adamw(self.learning_rate, updates, **ramps)
        ramps |= {"axes": matrix_axes(config), "adam_learning_rate": self.adam_learning_rate}
        return muon(self.learning_rate, updates, **ramps)
