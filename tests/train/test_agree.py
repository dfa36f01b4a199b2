"""What errors mean where a run has several processes, by errors alone; `tests/processes` has the processes."""

import jax
import pytest

from paradec_jax.train.agree import PeerLost, telling_of_lost_peers

BROKEN = (
    "Gloo all-reduce failed: [external/gloo/gloo/transport/tcp/pair.cc] Connection closed by peer [127.0.0.1]:1",
    "Gloo allgather failed:\nRead error [127.0.0.1]:1: Connection reset by peer",
    "Gloo all-reduce failed: Timed out waiting 1800000ms for send operation to complete",
    "UNAVAILABLE: The following tasks are unhealthy",
)
OTHERS = (
    "Gloo all-reduce failed: Received data size doesn't match expected size. Is there a size mismatch?",
    "RESOURCE_EXHAUSTED: out of memory",
)


@pytest.mark.parametrize("told", [*BROKEN, *OTHERS])
def test_a_broken_connection_is_a_lost_process_and_nothing_else_is(told, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    expected = PeerLost if told in BROKEN else jax.errors.JaxRuntimeError
    with pytest.raises(expected) as raised, telling_of_lost_peers():
        raise jax.errors.JaxRuntimeError(told)
    assert ("lost another one" in str(raised.value)) == (told in BROKEN)
