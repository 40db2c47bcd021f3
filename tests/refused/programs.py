"""Programs that the tests run in their own processes, with a refused system call or without ``/proc``.

``python programs.py FUNCTION CALL ERROR`` runs FUNCTION while the system call CALL fails with ERROR, and
prints the result.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
from typing import Any

import psutil
import seccomp

from flowchan import Channel, Graph, GraphError, select

BLOCKED = 1.0  # duration of the CPU time measurement in seconds


def waiting(channels: list[Channel]) -> bool:
    return all(channel.stats().waiting_readers for channel in channels)


def blocked_select() -> None:
    """Print the fraction of a core that a blocked select uses.

    Then put an item into the last channel, and print the result of the select.
    """
    channels = [Channel(across=transport) for transport in ("threads", "processes", "processes")]
    got: list[object] = []
    selecting = threading.Thread(target=lambda: got.append(select(channels).item))
    selecting.start()
    while not waiting(channels):
        time.sleep(0.001)
    before = time.process_time()
    time.sleep(BLOCKED)
    share = (time.process_time() - before) / BLOCKED
    channels[-1].put("item")
    selecting.join()
    print(f"burns {share:.0%} of a core" if share > 0.05 else "sleeps", *got)


def blocked_coroutines() -> None:
    """Await two calls in one event loop, one call per transport."""
    channels = [Channel(across=transport) for transport in ("threads", "processes")]

    async def get_both() -> list[object]:
        getting = asyncio.gather(*(channel.aget() for channel in channels))
        while not waiting(channels):
            await asyncio.sleep(0.001)
        for number, channel in enumerate(channels):
            channel.put(number)
        return await getting

    print(asyncio.run(get_both()))


def double(item: int) -> int:
    return 2 * item


def run() -> None:
    graph = Graph("refused")
    doubled = graph.source(range(100)).map(double, workers=2, on="process").reduce(int.__add__, 0)
    try:
        print(graph.run()[doubled])
    except GraphError as error:
        (problem,) = error.problems
        print(problem.rule, problem.message)


def death() -> None:
    """Let a worker die while it is processing an item; the worker is replaced."""
    died: Channel[bool] = Channel(across="processes")

    def work(item: int) -> int:
        if item == 50 and not died:
            died.put(True)
            os.kill(os.getpid(), signal.SIGKILL)
        return item

    graph = Graph("refused")
    total = graph.source(range(100)).map(work, workers=2, on="process").reduce(int.__add__, 0)
    print(graph.run()[total], len(died))


def remain(item: int) -> int:
    os.write(1, b"at work\n")
    threading.Event().wait()
    return item


def orphans() -> None:
    """Start two workers that run until they are killed."""
    graph = Graph("orphans")
    graph.source(range(2)).map(remain, workers=2, on="process").sink(print)
    graph.run()


def channel() -> None:
    try:
        Channel(across="processes")
    except OSError as error:
        print(repr(error))


def threads() -> None:
    """Use only channels between threads."""
    graph = Graph("threads")
    doubled = graph.source(range(100)).map(double, workers=2).reduce(int.__add__, 0)
    full = Channel()
    full.put("item")
    print(graph.run()[doubled], select([Channel(), full]).item)


def tls() -> None:
    """Connect two ends over TLS. One process then dies while its child still has copies of both ends."""
    from flowchan.transport import tcp
    from flowchan.transport.authentication import meet

    secret = bytes(32)
    with tcp.listen("127.0.0.1:0") as listener:
        dialled, listens = tcp.dial(listener.address, 30), listener.accept(30)
    answered: list[object] = []

    def answer() -> None:
        answered.extend(meet(listens, secret, dialled=False, hello={}, timeout=30, tls=True))

    answering = threading.Thread(target=answer)
    answering.start()
    sock, _ = meet(dialled, secret, dialled=True, hello={}, timeout=30, tls=True)
    answering.join()
    there: Any = answered[0]
    sock.sendall(b"over TLS")
    relays = [child.pid for child in psutil.Process().children()]
    if os.fork() == 0:
        sys.stdin.read()
        os._exit(0)
    print(there.recv(8).decode(), os.getpid(), *relays, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def parts() -> None:
    import torch
    from torch import nn

    from flowchan.pipelines import Sequential

    model = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 3))
    with Sequential(model, parts=2, on="process") as pipe, torch.no_grad():
        print(tuple(pipe(torch.ones(4, 2)).shape))


if __name__ == "__main__":
    function, call, *error = sys.argv[1:]
    seccomp.without_proc() if call == "proc" else seccomp.refuse(call, int(error[0]))
    globals()[function]()
