"""An agent requests outputs from another agent without waiting for the outputs that it requested earlier."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.scripts import script, start
from support.waiting import WAIT_LIMIT_S

from flowchan.transport.listener import AuthenticatedListener
from flowchan.transport.tcp import listen

SECRET = b"s" * 32
GONE = struct.pack("<Q", 2**64 - 1)

FETCH_THREE = f"""
    import signal, struct, sys
    from flowchan import _core
    from flowchan.hosts.kept_outputs import KeptOutputs

    kept = KeptOutputs(_core.Link(False), sys.argv[1], {SECRET!r}, False, {WAIT_LIMIT_S})
    for output in range(3):  # id, size, output, stream, port and kind; then the address
        kept.fetch(struct.pack("<QQQIHH", output + 1, 100_000, output, 1, 0, 2) + sys.argv[1].encode())
    signal.pause()
"""


@pytest.fixture
def other_agent(tmp_path: Path) -> Iterator[AuthenticatedListener]:
    """Listen like an agent, and start a program that fetches outputs 0, 1 and 2 from it."""
    with (
        contextlib.closing(AuthenticatedListener(listen("127.0.0.1:0"), SECRET, {})) as listener,
        start(script(tmp_path, FETCH_THREE), listener.address) as process,
    ):
        try:
            yield listener
        finally:
            process.kill()


def requested(sock: socket.socket, count: int) -> list[int]:
    """Receive ``count`` requests, and return the numbers of the outputs."""
    sock.settimeout(WAIT_LIMIT_S)
    data = b""
    while len(data) < 16 * count:
        data += sock.recv(16 * count - len(data)) or pytest.fail(f"ended after {data!r}")
    return [output for output, _, _ in struct.iter_unpack("<QII", data)]


def test_agent_requests_outputs_before_earlier_ones_arrive(other_agent: AuthenticatedListener) -> None:
    sock, _ = other_agent.accept(WAIT_LIMIT_S)
    with sock:
        assert requested(sock, 3) == [0, 1, 2]


def test_agent_repeats_its_requests_over_a_new_connection(other_agent: AuthenticatedListener) -> None:
    sock, _ = other_agent.accept(WAIT_LIMIT_S)
    with sock:
        assert requested(sock, 3) == [0, 1, 2]
        sock.sendall(GONE)
    # The driver sends the output whose fetch has failed.
    sock, _ = other_agent.accept(WAIT_LIMIT_S)
    with sock:
        assert requested(sock, 1) == [2]
