"""Check a host before a graph runs on it (``flowchan hosts check``).

The provider starts this module on the host in place of an agent, so the probe runs under the same conditions
as an agent. It dials, authenticates, and describes the host in its hello. The program then sends transfers. A
transfer is a size followed by that many bytes, and the probe answers each transfer with one byte.
"""

from __future__ import annotations

import json
import os
import platform
import secrets
import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from typing import Any

from flowchan.errors import HostError
from flowchan.hosts.providers.provider import Launch, Provider, StartedAgent
from flowchan.run.crew.memory import available
from flowchan.transport.authentication import meet
from flowchan.transport.listener import AuthenticatedListener
from flowchan.transport.tcp import dial, listen
from flowchan.transport.versions import VERSION

HOST_TIMEOUT_S = 30.0  # seconds for a host to start and dial, and for each answer
ROUNDS = 50
LONG_ENOUGH = 0.2  # minimum duration of the transfer that is measured, in seconds
LEAST, MOST = 1 << 20, 1 << 28  # minimum and maximum size of a transfer, in bytes
SIZE = 8  # size of the size field, in bytes
PIECE = bytes(1 << 20)


@dataclass(frozen=True, slots=True)
class Facts:
    """The description of a host.

    Attributes:
        host: Name of the host.
        problem: Reason why the host can't be used; empty if it can be used.
        python: Its version of Python.
        flowchan: Its version of flowchan.
        cores: Number of cores that a process on the host may use.
        memory: Number of bytes of memory that a process on the host may use.
        gpus: Names of its GPUs.
        round_trip: Median round-trip time in seconds.
        rate: Throughput in bytes per second.
    """

    host: str
    problem: str = ""
    python: str = ""
    flowchan: str = ""
    cores: int = 0
    memory: int = 0
    gpus: tuple[str, ...] = ()
    round_trip: float = 0.0
    rate: float = 0.0


def check_hosts(provider: Provider, host_timeout: float = HOST_TIMEOUT_S) -> list[Facts]:
    """Start a probe on every host, and measure the connections one at a time.

    Raises :class:`flowchan.HostError` if no host can be tried.
    """
    secret = secrets.token_bytes(32)
    found: dict[int, Facts] = {}
    address = _listen_at(provider, found)
    with ExitStack() as resources:
        bound = listen(f"[{address}]:0" if ":" in address else f"{address}:0")
        listener = resources.enter_context(AuthenticatedListener(bound, secret, {}))
        started: dict[int, StartedAgent] = {}
        for number, host in enumerate(provider.hosts):
            if number in found:
                continue
            orders = {"address": listener.address, "secret": secret.hex(), "number": number}
            launch = Launch(("-m", "flowchan.hosts.probe"), json.dumps(orders).encode() + b"\n")
            try:
                started[number] = resources.enter_context(closing(provider.start(number, launch)))
            except HostError as error:
                found[number] = Facts(host, str(error))
        for sock, hello in _accepted(listener, started, host_timeout):
            number = hello.pop("number")
            sock.settimeout(host_timeout)
            with sock:
                found[number] = _measured(_facts(provider.hosts[number], hello), sock)
            del started[number]
        for number, one in started.items():
            late = (
                f"did not connect to {listener.address} within {host_timeout:g} s; open that address to "
                "the host, or set address= to another address of this machine"
            )
            found[number] = Facts(provider.hosts[number], one.ended() or f"{provider.hosts[number]} {late}")
    return [found[number] for number in range(len(provider.hosts))]


def _listen_at(provider: Provider, found: dict[int, Facts]) -> str:
    """Return the address at which the hosts can reach this machine.

    Record a problem for each host that has no route.
    """
    hosts = list(provider.hosts)
    while hosts:
        try:
            return provider.listen_at(hosts)
        except HostError as error:
            if error.host not in hosts:
                raise
            hosts.remove(error.host)
            found[provider.hosts.index(error.host)] = Facts(error.host, str(error))
    return "127.0.0.1"  # no host will dial this address


def _accepted(
    listener: AuthenticatedListener, waiting: dict[int, StartedAgent], host_timeout: float
) -> Iterator[tuple[socket.socket, dict[str, Any]]]:
    """Yield the connections of the probes, until every probe that is still running has dialled."""
    give_up = time.monotonic() + host_timeout
    while time.monotonic() < give_up and not all(one.ended() for one in waiting.values()):
        try:
            yield listener.accept(0.1)
        except TimeoutError:
            continue


def _facts(host: str, hello: dict[str, Any]) -> Facts:
    facts = Facts(host, **{**hello, "gpus": tuple(hello["gpus"])})
    ours = platform.python_version()
    if facts.python.split(".")[:2] != ours.split(".")[:2]:
        return replace(
            facts,
            problem=(
                f"{host} has Python {facts.python}, but this program has {ours}; install the same "
                "minor version"
            ),
        )
    ours = VERSION
    if facts.flowchan != ours:
        return replace(
            facts,
            problem=(
                f"{host} has flowchan {facts.flowchan}, but this program has {ours}; install the same version"
            ),
        )
    return facts


def _measured(facts: Facts, sock: socket.socket) -> Facts:
    """Measure the round trip and the rate, and return the facts with both added."""
    try:
        trips = [_transfer(sock, 0) for _ in range(ROUNDS)]
        size = LEAST
        while (took := _transfer(sock, size)) < LONG_ENOUGH and size < MOST:
            size *= 2
    except OSError as error:
        return replace(facts, problem=f"{facts.host} did not answer during the measurement: {error}")
    return replace(facts, round_trip=statistics.median(trips), rate=size / took)


def _transfer(sock: socket.socket, size: int) -> float:
    """Send ``size`` bytes, and return the seconds until the answer arrives."""
    begin = time.perf_counter()
    sock.sendall(size.to_bytes(SIZE, "big"))
    for sent in range(0, size, len(PIECE)):
        sock.sendall(PIECE[: size - sent])
    if not sock.recv(1):
        raise ConnectionError("it closed the connection")
    return time.perf_counter() - begin


# --- on the host ---


def _answer(sock: socket.socket) -> None:
    """Answer transfers until the program closes the connection."""
    buffer = bytearray(1 << 20)
    with sock.makefile("rb", buffering=0) as stream:
        while head := _read(stream, SIZE):
            size = int.from_bytes(head, "big")
            while size:
                came = stream.readinto(memoryview(buffer)[: min(size, len(buffer))])
                if not came:
                    return
                size -= came
            sock.sendall(b".")


def _read(stream: Any, size: int) -> bytes:
    """Read exactly ``size`` bytes; return nothing if the stream has ended."""
    found = b""
    while len(found) < size:
        if not (came := stream.read(size - len(found))):
            return b""
        found += came
    return found


def _own_facts() -> dict[str, Any]:
    return {
        "python": platform.python_version(),
        "flowchan": VERSION,
        "cores": len(os.sched_getaffinity(0)),
        "memory": available(),
        "gpus": _gpus(),
    }


def _gpus() -> list[str]:
    """Return the names of the GPUs as reported by NVIDIA's driver."""
    if shutil.which("nvidia-smi") is None:
        return []
    command = ("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")
    result = subprocess.run(command, capture_output=True, text=True, timeout=10)
    return result.stdout.splitlines() if result.returncode == 0 else []


def main() -> None:
    """Dial the program at the address given on standard input, and answer its transfers."""
    orders = json.loads(sys.stdin.readline())
    hello = {"number": orders["number"], **_own_facts()}
    sock = dial(orders["address"], HOST_TIMEOUT_S)
    sock, _ = meet(sock, bytes.fromhex(orders["secret"]), dialled=True, hello=hello, timeout=HOST_TIMEOUT_S)
    with sock:
        _answer(sock)


if __name__ == "__main__":
    main()
