"""Create a connection with a long delay below TCP, so that acknowledgements are delayed like data.

The two ends are in two network namespaces, each with a TUN device. A process between them delays every
packet.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import select
import shutil
import socket
import struct
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from benchmarks.peers import CONTEXT
from flowchan.transport.tcp import prepare

NEW_NETWORK = 0x40000000
TUN, TUNSETIFF, NO_HEADER = 0x0001, 0x400454CA, 0x1000
ADDRESSES = "10.9.0.1", "10.9.0.2"
PACKET = 65_000
AT_ONCE = 64  # maximum number of packets to read from one side before reading from the other


def missing() -> str | None:
    """Return the first requirement of the wire that this machine does not meet, or None."""
    if os.geteuid() != 0:
        return "needs root"
    if not os.path.exists("/dev/net/tun"):
        return "needs /dev/net/tun"
    return None if shutil.which("ip") else "needs ip: apt-get install iproute2"


@dataclass(frozen=True, slots=True)
class Wire:
    """Networks at both ends of a wire, as descriptors that `enter` accepts."""

    near: int
    far: int

    def connected(self) -> tuple[socket.socket, socket.socket]:
        """Return a connection between both networks, set up like an agent's connection.

        Afterwards, the calling thread is in the near network.
        """
        enter(self.near)
        with socket.create_server((ADDRESSES[0], 0)) as server:
            enter(self.far)
            far = socket.create_connection(server.getsockname())
            near, _ = server.accept()
        enter(self.near)
        for end in (near, far):
            prepare(end, end.getpeername()[0])
        return near, far


@contextlib.contextmanager
def wire(round_trip: float) -> Iterator[Wire]:
    """Yield a wire with this round-trip time in seconds."""
    home = _here()
    networks, devices = [], []
    try:
        try:
            for address in ADDRESSES:
                _call("unshare", NEW_NETWORK)
                networks.append(_here())
                devices.append(_device(address))
        finally:
            enter(home)
        relay = CONTEXT.Process(target=_relay, args=(*devices, round_trip / 2), daemon=True)
        relay.start()
        try:
            yield Wire(*networks)
        finally:
            relay.kill()
            relay.join()
    finally:
        for fd in (home, *networks, *devices):
            os.close(fd)


def within(network: int, work: Callable[[], float]) -> float:
    """Run ``work`` in a process in this network, and return its result."""
    told, tell = CONTEXT.Pipe(duplex=False)

    def run() -> None:
        enter(network)
        tell.send(work())

    process = CONTEXT.Process(target=run)
    process.start()
    tell.close()
    try:
        found: float = told.recv()  # raises EOFError if the process failed and printed its traceback
    finally:
        process.join()
    return found


def enter(network: int) -> None:
    """Move this thread, and the threads that it starts later, into a network."""
    _call("setns", network, NEW_NETWORK)


def _here() -> int:
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def _call(name: str, *arguments: int) -> None:
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def _device(address: str) -> int:
    """Open a TUN device in the caller's network."""
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    fcntl.ioctl(fd, TUNSETIFF, struct.pack("16sH22x", b"tun0", TUN | NO_HEADER))
    for line in (
        f"ip addr add {address}/24 dev tun0",
        f"ip link set tun0 mtu {PACKET} txqueuelen 20000 up",
        "ip link set lo up",
    ):
        subprocess.run(line.split(), check=True)
    return fd


def _relay(one: int, other: int, delay: float) -> None:
    under_way: deque[tuple[float, int, bytes]] = deque()
    while True:
        now = time.perf_counter()
        while under_way and under_way[0][0] <= now:
            _, to, packet = under_way.popleft()
            with contextlib.suppress(BlockingIOError):  # if the device is full, drop the packet
                os.write(to, packet)
        wait = max(0.0, under_way[0][0] - now) if under_way else None
        ready, _, _ = select.select((one, other), (), (), wait)
        for fd in ready:
            with contextlib.suppress(BlockingIOError):
                for _ in range(AT_ONCE):
                    packet = os.read(fd, PACKET)
                    under_way.append((time.perf_counter() + delay, other if fd == one else one, packet))
