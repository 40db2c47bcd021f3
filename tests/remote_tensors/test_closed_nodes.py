"""Test nodes that are closed before the check for leftovers.

These tests must not be in a file with the fixture ``two_nodes``. The nodes of that fixture may open
descriptors during any test, such as the socket of their run for viewers. The check would then report that
test.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.optional_packages import optional
from support.waiting import wait_until

from flowchan.pipelines import RemoteNodes
from flowchan.run.observe import view_socket

torch = optional("torch")
pytestmark = pytest.mark.usefixtures("one_compute_thread")


def sockets() -> set[str]:
    """Return the sockets of this process."""
    links = []
    for one in Path("/proc/self/fd").iterdir():
        try:
            links.append(os.readlink(one))
        except OSError:  # the descriptor that lists the folder itself
            continue
    return {link for link in links if link.startswith("socket:")}


def shown_runs() -> int:
    """Return the number of this process's runs that ``flowchan top`` can show."""
    name = f"@{view_socket.socket_prefix()}{os.getpid()}-"
    return Path("/proc/net/unix").read_text().count(name)


def test_close_ends_the_sockets_of_the_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(view_socket, "POLL_INTERVAL_S", 0.0)
    before = sockets()
    nodes = RemoteNodes(1)
    wait_until(lambda: shown_runs() == 1)
    assert sockets() > before
    nodes.close()
    assert sockets() <= before


def test_forked_generators_ignore_closed_nodes() -> None:
    RemoteNodes(1).close()
    with torch.random.fork_rng(range(torch.remote.device_count()), device_type="remote"):
        torch.manual_seed(2)
    with torch.random.fork_rng():
        torch.manual_seed(2)


def test_operation_without_meta_kernel_runs_on_node_and_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    library = torch.library.Library("flowchan_no_meta", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x * 2, "CPU")
    with RemoteNodes(1) as nodes:  # forked after the operation was registered
        x = torch.ones(3, device=nodes[0])
        for _ in range(2):
            assert torch.ops.flowchan_no_meta.twice(x).tolist() == [2, 2, 2]
    (record,) = caplog.records
    assert record.getMessage().startswith("flowchan_no_meta::twice has no meta kernel")
