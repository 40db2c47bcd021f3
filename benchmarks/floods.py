"""Measure how long a peer with the secret needs to connect while others flood the port.

``python -m benchmarks.floods [DELAY]`` prints the median and the longest of 20 connections for each kind of
flood. Two processes on this machine flood the port from the peer's own address. DELAY is the transmission
delay between the peer and the port, in seconds in each direction (default: 0). If a peer can't connect within
10 s, the result is ``inf``.
"""

from __future__ import annotations

import math
import multiprocessing
import random
import secrets
import socket
import statistics
import struct
import sys
import threading
import time

from benchmarks.slow_connections import delay_between
from flowchan.transport.authentication import DIALLED, greeting
from flowchan.transport.dial import reach
from flowchan.transport.listener import AuthenticatedListener
from flowchan.transport.tcp import dial, listen

KINDS = ("none", "close", "reset", "silent", "garbage", "imitated greeting")
ATTACKERS, HELD, CONNECTIONS, WITHIN_S = 2, 300, 20, 10.0


def flood(address: str, kind: str) -> None:
    """Open connections until this process is ended, and keep the last ``HELD`` of them open."""
    held: list[socket.socket] = []
    while kind != "none":
        try:
            sock = dial(address, 2)
            if kind == "reset":
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            elif kind == "garbage":
                sock.sendall(random.randbytes(random.choice([1, 40, 100, 5000])))
            elif kind == "imitated greeting":
                sock.sendall(greeting(DIALLED))
        except OSError:
            continue
        if kind in ("silent", "imitated greeting"):
            held.append(sock)
            if len(held) > HELD:
                held.pop(0).close()
        else:
            sock.close()


def accept(listener: AuthenticatedListener) -> None:
    while True:
        listener.accept()[0].close()


def relay(address: str, delay: float) -> str:
    """Return the address of a proxy that delays all bytes to and from ``address``."""
    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            delay_between(server.accept()[0], dial(address, WITHIN_S), delay)

    threading.Thread(target=serve, daemon=True).start()
    return f"127.0.0.1:{server.getsockname()[1]}"


def measure(kind: str, delay: float) -> tuple[float, float]:
    """Return the median and the longest time in seconds that a peer needs to connect."""
    secret = secrets.token_bytes(32)
    listener = AuthenticatedListener(listen("127.0.0.1:0"), secret, {})
    threading.Thread(target=accept, args=(listener,), daemon=True).start()
    address = relay(listener.address, delay) if delay else listener.address
    spawn = multiprocessing.get_context("spawn")
    attackers = [spawn.Process(target=flood, args=(listener.address, kind)) for _ in range(ATTACKERS)]
    for attacker in attackers:
        attacker.start()
    time.sleep(2)  # wait until the flood has begun
    took = []
    for _ in range(CONNECTIONS):
        began = time.monotonic()
        try:
            reach(address, secret, {}, why="no connection", within=WITHIN_S, tls=False)[0].close()
        except OSError:
            took.append(math.inf)
            break
        took.append(time.monotonic() - began)
    for attacker in attackers:
        attacker.kill()
        attacker.join()
    return statistics.median(took), max(took)


if __name__ == "__main__":
    for kind in KINDS:
        middle, longest = measure(kind, float(sys.argv[1]) if len(sys.argv) > 1 else 0.0)
        print(f"| {kind} | {middle:.3f} s | {longest:.3f} s |", flush=True)
