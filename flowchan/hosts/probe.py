"""Check a host before a graph runs on it (``flowchan hosts check``).

The provider starts this module on the host instead of an agent. The probe therefore runs under the same
conditions as an agent. The probe dials, authenticates, and describes the host in its hello. The program then
sends requests:

- A transfer is a size, followed by that many bytes. The probe answers with one byte.
- The size ``SPEED``, followed by a number of cores, asks for the host's speed. The probe answers with the
  mean number of rounds per second and core.
"""

from __future__ import annotations

import json
import platform
import secrets
import shutil
import socket
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import Collection, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from flowchan.errors import HostError
from flowchan.hosts.capacity import known_cores, relative, report_cores
from flowchan.hosts.core_speed import rounds_per_core
from flowchan.hosts.providers.provider import Launch, Provider, StartedAgent
from flowchan.run.crew.memory import available
from flowchan.run.observe.cgroups import local_cores
from flowchan.transport.authentication import meet
from flowchan.transport.listener import AuthenticatedListener
from flowchan.transport.tcp import dial, listen
from flowchan.transport.versions import VERSION

HOST_TIMEOUT_S = 30.0  # seconds for a host to start and dial, and for each answer
ROUNDS = 50
LONG_ENOUGH = 0.2  # the size is doubled until a transfer takes at least this many seconds
LEAST, MOST = 1 << 20, 1 << 28  # minimum and maximum size of a transfer, in bytes
SIZE = 8  # size of the size field, in bytes
SPEED = (1 << 64) - 1
RATE = struct.Struct(">d")
PIECE = bytes(1 << 20)


@dataclass(frozen=True, slots=True)
class Facts:
    """Result of a probe: whether the host is usable, and what it provides.

    Attributes:
        host: Host's name.
        problem: Why the host is unusable; empty if it is usable.
        python: Version of Python.
        flowchan: Version of flowchan.
        cores: Number of cores available to a process.
        memory: Bytes of memory available to a process.
        gpus: Names of the GPUs.
        round_trip: Median round-trip time in seconds.
        rate: Throughput in bytes per second.
        speed: Speed of a core relative to the fastest host: above 0, at most 1; 0 if not measured.
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
    speed: float = 0.0


Sockets = dict[int, socket.socket]
"""Connection to the probe of each host, by host number."""


def check_hosts(provider: Provider, host_timeout: float = HOST_TIMEOUT_S) -> list[Facts]:
    """Start a probe on every host. Measure each connection in turn, and then the speeds of all hosts.

    Raise :class:`flowchan.HostError` if no host can be tried.
    """
    found: dict[int, Facts] = {}
    sockets: Sockets = {}
    with probes(provider, provider.hosts, found, host_timeout) as arriving:
        for number, sock in arriving:
            sockets[number] = sock
            found[number] = _measured(found[number], sock)
        _add_speeds(provider, sockets, found, time.monotonic() + host_timeout)
    return [found[number] for number in range(len(provider.hosts))]


def ask_hosts(
    provider: Provider, hosts: Collection[str], host_timeout: float = HOST_TIMEOUT_S, *, speed: bool = False
) -> list[Facts]:
    """Ask each host for its number of cores and, if ``speed`` is set, for its speed.

    Raise :class:`flowchan.HostError` if a host is unusable or does not answer within ``host_timeout``.
    """
    found: dict[int, Facts] = {}
    give_up = time.monotonic() + host_timeout
    with probes(provider, hosts, found, host_timeout) as arriving:
        sockets = dict(arriving)
        if speed:
            _add_speeds(provider, sockets, found, give_up)
    for facts in found.values():
        if facts.problem:
            raise HostError(facts.problem, facts.host)
    return [found[number] for number in sorted(found)]


@contextmanager
def probes(
    provider: Provider, hosts: Collection[str], found: dict[int, Facts], host_timeout: float
) -> Iterator[Iterator[tuple[int, socket.socket]]]:
    """Start a probe on each of ``hosts``, and yield an iterator over the probes that connect.

    The iterator stores a host's facts in ``found`` before it yields the host's probe. After the last probe,
    the iterator stores the problems of the other hosts. Leaving the block shuts down the probes.
    """
    secret = secrets.token_bytes(32)
    address = _listen_at(provider, list(hosts), found)
    with ExitStack() as resources:
        bound = listen(f"[{address}]:0" if ":" in address else f"{address}:0")
        listener = resources.enter_context(AuthenticatedListener(bound, secret, {}))
        started: dict[int, StartedAgent] = {}
        for number, host in enumerate(provider.hosts):
            if number in found or host not in hosts:
                continue
            orders = {"address": listener.address, "secret": secret.hex(), "number": number}
            launch = Launch(("-m", "flowchan.hosts.probe"), json.dumps(orders).encode() + b"\n")
            try:
                started[number] = resources.enter_context(closing(provider.start(number, launch)))
            except HostError as error:
                found[number] = Facts(host, str(error))
        yield _arriving(provider, listener, started, found, host_timeout, resources)


def _arriving(
    provider: Provider,
    listener: AuthenticatedListener,
    started: dict[int, StartedAgent],
    found: dict[int, Facts],
    host_timeout: float,
    resources: ExitStack,
) -> Iterator[tuple[int, socket.socket]]:
    """Yield the probes that connect, and record a problem for each host without such a probe."""
    for sock, hello in _accepted(listener, started, host_timeout):
        number = hello.pop("number")
        sock.settimeout(host_timeout)
        resources.enter_context(sock)
        found[number] = facts = _facts(provider.hosts[number], hello)
        report_cores(provider, facts.host, facts.cores)
        del started[number]
        yield number, sock
    for number, one in started.items():
        late = (
            f"did not connect to {listener.address} within {host_timeout:g} s; open that address to "
            "the host, or set address= to another address of this machine"
        )
        found[number] = Facts(provider.hosts[number], one.ended() or f"{provider.hosts[number]} {late}")


def _add_speeds(provider: Provider, sockets: Sockets, found: dict[int, Facts], give_up: float) -> None:
    """Measure the speeds of all usable hosts at the same time, and add them to the facts."""
    cores = known_cores(provider)
    asked = {number: sock for number, sock in sockets.items() if not found[number].problem}
    rates: dict[str, float] = {}
    for number, sock in list(asked.items()):
        host = found[number].host
        try:
            sock.sendall(SPEED.to_bytes(SIZE, "big") + cores[host].to_bytes(SIZE, "big"))
        except OSError as error:
            found[number] = _silent(found[number], error)
            del asked[number]
    for number, sock in asked.items():
        try:
            rates[found[number].host] = _received_rate(sock, give_up)
        except OSError as error:
            found[number] = _silent(found[number], error)
    speeds = relative(rates)
    for number, facts in found.items():
        found[number] = replace(facts, speed=speeds.get(facts.host, 0.0))


def _received_rate(sock: socket.socket, give_up: float) -> float:
    sock.settimeout(max(0.001, give_up - time.monotonic()))
    with sock.makefile("rb", buffering=0) as stream:
        answer = _read(stream, RATE.size)
    if not answer:
        raise ConnectionError("it closed the connection")
    rate: float = RATE.unpack(answer)[0]
    return rate


def _silent(facts: Facts, error: OSError) -> Facts:
    return replace(facts, problem=f"{facts.host} did not answer during the measurement: {error}")


def _listen_at(provider: Provider, hosts: list[str], found: dict[int, Facts]) -> str:
    """Return the address at which the hosts can reach this machine.

    Record a problem for each host without a route.
    """
    while hosts:
        try:
            return provider.listen_at(hosts)
        except HostError as error:
            if error.host not in hosts:
                raise
            hosts.remove(error.host)
            found[provider.hosts.index(error.host)] = Facts(error.host, str(error))
    return "127.0.0.1"  # any address, because no host is left that could dial it


def _accepted(
    listener: AuthenticatedListener, waiting: dict[int, StartedAgent], host_timeout: float
) -> Iterator[tuple[socket.socket, dict[str, Any]]]:
    """Yield the probes' connections until every probe that is still running has connected."""
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
    """Measure the round trip and the rate, and add both to the facts."""
    try:
        trips = [_transfer(sock, 0) for _ in range(ROUNDS)]
        size = LEAST
        while (took := _transfer(sock, size)) < LONG_ENOUGH and size < MOST:
            size *= 2
    except OSError as error:
        return _silent(facts, error)
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
    """Answer requests until the program closes the connection."""
    buffer = bytearray(1 << 20)
    with sock.makefile("rb", buffering=0) as stream:
        while head := _read(stream, SIZE):
            size = int.from_bytes(head, "big")
            if size == SPEED:
                cores = int.from_bytes(_read(stream, SIZE), "big")
                sock.sendall(RATE.pack(rounds_per_core(cores)))
                continue
            while size:
                came = stream.readinto(memoryview(buffer)[: min(size, len(buffer))])
                if not came:
                    return
                size -= came
            sock.sendall(b".")


def _read(stream: Any, size: int) -> bytes:
    """Read exactly ``size`` bytes, or return an empty value if the stream has ended."""
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
        "cores": local_cores(),
        "memory": available(),
        "gpus": _gpus(),
    }


def _gpus() -> list[str]:
    """Return the names of the GPUs, as NVIDIA's driver reports them."""
    if shutil.which("nvidia-smi") is None:
        return []
    command = ("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")
    result = subprocess.run(command, capture_output=True, text=True, timeout=10)
    return result.stdout.splitlines() if result.returncode == 0 else []


def main() -> None:
    """Dial the program at the address on standard input, and answer its requests."""
    orders = json.loads(sys.stdin.readline())
    hello = {"number": orders["number"], **_own_facts()}
    sock = dial(orders["address"], HOST_TIMEOUT_S)
    sock, _ = meet(sock, bytes.fromhex(orders["secret"]), dialled=True, hello=hello, timeout=HOST_TIMEOUT_S)
    with sock:
        _answer(sock)


if __name__ == "__main__":
    main()
