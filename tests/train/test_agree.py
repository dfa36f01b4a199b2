"""What errors mean where a run has several processes, by errors alone; `tests/processes` has the processes."""

import jax
import pytest

from paradec_jax.train.agree import PeerLost, lost_peer, telling_of_lost_peers, wait_for_all

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


def test_a_lost_process_is_found_behind_what_a_library_made_of_it(monkeypatch):
    def wrapped(told):
        try:
            raise jax.errors.JaxRuntimeError(told)
        except jax.errors.JaxRuntimeError as error:
            raise ValueError("saving failed") from error

    for processes, told in ((1, BROKEN[0]), (2, BROKEN[0]), (2, OTHERS[0])):
        monkeypatch.setattr(jax, "process_count", lambda count=processes: count)
        with pytest.raises(ValueError, match="saving failed") as raised:
            wrapped(told)
        found = lost_peer(raised.value)
        assert (found is not None) == (processes == 2 and told in BROKEN), found
    assert lost_peer(ValueError(BROKEN[0])) is None  # what a user's own error says


def test_one_process_waits_for_nobody():
    wait_for_all("the end")
