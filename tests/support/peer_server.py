"""A program that is started apart, as one on another host would be: it inherits nothing of the process that
asks for it. It imports what a test needs, once, and has a child for each function that it is asked to run.
Importing starts no thread and opens nothing, so a child is as good as a program of its own, and ends like
one. It gets the gates at which tests meet, and a pipe for what the function returned or raised."""

from __future__ import annotations

import contextlib
import ctypes
import encodings.idna  # noqa: F401, what a child imports when it resolves an address
import fcntl
import gc
import importlib
import os
import pickle
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection

import cloudpickle

PR_SET_PDEATHSIG = 1
kept: list[tuple[Callable[..., object], tuple[object, ...]]] = []
"""What the function holds on to is not let go of before the program ends."""


def main() -> None:
    die_with_parent()
    sys.path[0] = os.path.dirname(sys.path[0])  # where support is found
    importlib.import_module("support.peers")  # what functions of tests refer to
    orders = Connection(int(sys.argv[1]))
    while (order := orders.recv()) is not None:
        if isinstance(order, int):
            orders.send(os.waitstatus_to_exitcode(os.waitpid(order, 0)[1]))
            continue
        path, modules, numbers = order
        descriptors = received(orders, len(numbers))
        task = orders.recv_bytes()
        sys.path[:] = path
        for module in modules:
            with contextlib.suppress(Exception):  # unpickling the function tells
                importlib.import_module(module)
        gc.freeze()  # else a child's end looks at, and so copies, all that is here
        assert len(os.listdir("/proc/self/task")) == 1, f"a child would miss a thread; of {modules[-1]}?"
        child = os.fork()
        if child == 0:
            orders.close()
            die_with_parent()
            renumber(descriptors, numbers)
            run(task, numbers[0])
            return
        for fd in descriptors:
            os.close(fd)
        orders.send(child)


def die_with_parent() -> None:
    """Never outlives a test run that was killed."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def received(orders: Connection, count: int) -> list[int]:
    with socket.socket(fileno=os.dup(orders.fileno())) as beside:
        _, descriptors, _, _ = socket.recv_fds(beside, 1, count)
    assert len(descriptors) == count
    return descriptors


def renumber(descriptors: list[int], numbers: list[int]) -> None:
    """Gives them the numbers that they have where they come from, by which the function knows them."""
    above = [fcntl.fcntl(fd, fcntl.F_DUPFD, max(numbers) + 1) for fd in descriptors]
    for fd in descriptors:
        os.close(fd)
    for fd, number in zip(above, numbers, strict=True):
        os.dup2(fd, number)
        os.close(fd)


def run(task: bytes, answer: int) -> None:
    said: tuple[bool, object]
    try:
        kept.append(pickle.loads(task))
        function, args = kept[0]
        said = False, function(*args)
    except BaseException as error:
        error.add_note(f"in the program apart: {traceback.format_exc()}")
        said = True, error
    try:
        data = cloudpickle.dumps(said)
    except Exception as error:
        data = cloudpickle.dumps((True, AssertionError(f"the answer {said!r} cannot be sent: {error}")))
    del said
    with os.fdopen(answer, "wb") as pipe:
        pipe.write(data)


if __name__ == "__main__":
    main()
