"""Measure the throughput of two stages across hosts with limited bandwidth. Needs root, ``ip`` and ``tc``.

Run it with ``python -m benchmarks.data_plane``. The hosts are simulated, so the size of the machine limits
their number. Plain sockets that move the same bytes show this limit.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from unittest import mock

import psutil

from benchmarks.limited_hosts import Namespaces, limited_hosts
from flowchan import Graph
from flowchan.hosts import hosts_part
from flowchan.hosts.host_pool import pool_of

SIZE, RATE, ITEMS_PER_HOST = 1_000_000, 200, 60
"""Bytes per item, bandwidth limit of each connection in Mbit/s, and number of items per host."""
THROUGH_DRIVER, DIRECT, CROSSING = "through the driver", "direct", "direct, all items to another host"


def make(number: int) -> bytes:
    return bytes(SIZE)


def main() -> None:
    """Print the throughput for 2, 4 and 8 hosts, with and without direct transfers between hosts."""
    if sys.argv[1:2] == ["inside"]:
        print(json.dumps(measure(sys.argv[2], sys.argv[3] == "ordered", tuple(sys.argv[4:]))))
        return
    if sys.argv[1:2] == ["socket"]:
        exchange(sys.argv[2])
        return
    if os.geteuid():
        sys.exit("network namespaces need root")
    print(f"Mbit/s of {SIZE:,} B items from one stage to the next; each wire carries {RATE} Mbit/s")
    for count in (2, 4, 8):
        with limited_hosts(count, f"{RATE}mbit") as (head, *hosts):
            show(f"{count} hosts, plain sockets to another host", count, *measure_sockets(hosts))
            for way in (THROUGH_DRIVER, DIRECT, CROSSING):
                for order in ("unordered", "ordered"):
                    command = ("ip", "netns", "exec", head, sys.executable, "-m", "benchmarks.data_plane")
                    done = subprocess.run(
                        (*command, "inside", way, order, *hosts), check=True, stdout=subprocess.PIPE
                    )
                    show(f"{count} hosts, {way}, {order}", count, *json.loads(done.stdout))


def show(what: str, count: int, rate: float, busy: float) -> None:
    """Print one result."""
    share, cores = f"{rate / RATE / count:.2f} of the wires", f"{busy:.1f} of {os.cpu_count()} cores busy"
    print(f"{what}: {rate:.0f} Mbit/s, {share}, {cores}", flush=True)


def measure(way: str, ordered: bool, hosts: tuple[str, ...]) -> tuple[float, float]:
    """Return the throughput in Mbit/s, and how many cores were busy.

    The first quarter of the items is not measured.
    """
    if way == THROUGH_DRIVER:
        mock.patch.object(hosts_part, "keeps_outputs", return_value=False).start()
    items = ITEMS_PER_HOST * (1 if way == THROUGH_DRIVER else len(hosts))
    pool, graph = pool_of("limited", Namespaces(hosts)), Graph("chain")
    pairs = [(hosts, hosts)]
    if way == CROSSING:  # each half of the hosts reads what the other half makes
        first, second = hosts[: len(hosts) // 2], hosts[len(hosts) // 2 :]
        pairs = [(first, second), (second, first)]
    chains = []
    for makers, readers in pairs:
        made = graph.source(range(items // len(pairs))).map(
            make, on=pool.assigned(makers), workers=len(makers), ordered=ordered
        )
        chains.append(made.map(len, on=pool.assigned(readers), workers=len(readers), ordered=ordered))
    sizes = graph.merge(*chains).collect() if len(chains) > 1 else chains[0].collect()
    with graph.start() as run:
        times = [(time.perf_counter(), busy_time()) for _ in run.iter(sizes)]
    (began, busy), (ended, busy_at_end) = times[items // 4], times[-1]
    took = ended - began
    return (len(times) - 1 - items // 4) * SIZE * 8 / 1e6 / took, (busy_at_end - busy) / took


def measure_sockets(hosts: list[str]) -> tuple[float, float]:
    """Return the throughput in Mbit/s if each host sends its items to one other host, and the busy cores."""
    programs = []
    for number, host in enumerate(hosts):
        reader = f"10.76.0.{(number + len(hosts) // 2) % len(hosts) + 2}"
        command = (
            "ip",
            "netns",
            "exec",
            host,
            sys.executable,
            "-m",
            "benchmarks.data_plane",
            "socket",
            reader,
        )
        programs.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
    for program in programs:
        assert program.stdout
        assert program.stdout.readline() == b"listening\n"
    began, busy = time.perf_counter(), busy_time()
    for program in programs:
        assert program.stdin
        program.stdin.close()
    for program in programs:
        assert program.stdout
        assert program.stdout.readline() == b"received\n"
    took = time.perf_counter() - began
    for program in programs:
        program.wait()
    return len(hosts) * ITEMS_PER_HOST * SIZE * 8 / 1e6 / took, (busy_time() - busy) / took


def exchange(reader: str) -> None:
    """When standard input ends, send the items of one host to another one, and receive those of a third."""
    with socket.create_server(("", 7000)) as server:
        print("listening", flush=True)
        sys.stdin.read()
        sender = threading.Thread(target=send, args=(reader,))
        sender.start()
        received, room = 0, bytearray(SIZE)
        with server.accept()[0] as incoming:
            while size := incoming.recv_into(room):
                received += size
        sender.join()
    assert received == ITEMS_PER_HOST * SIZE
    print("received", flush=True)


def send(reader: str) -> None:
    with socket.create_connection((reader, 7000)) as outgoing:
        for number in range(ITEMS_PER_HOST):
            outgoing.sendall(make(number))


def busy_time() -> float:
    """Return for how many seconds the cores of this machine have been busy, in total."""
    times = psutil.cpu_times()
    return float(sum(times[:8]) - times.idle - times.iowait)  # guest time is part of user time


if __name__ == "__main__":
    main()
