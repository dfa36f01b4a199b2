"""Options of a training that say on how many processes and devices it runs."""

import dataclasses

import jax

from paradec_jax.config.bounds import check_numbers
from paradec_jax.sharding.mesh import make_mesh
from paradec_jax.train import initialize


@dataclasses.dataclass(frozen=True)
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
        return make_mesh(self.data, -1 if self.fsdp is None else self.fsdp, self.tensor)
