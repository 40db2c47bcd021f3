"""Separate program for peers.

Like a program on another host, it inherits nothing from the test. The program imports once the modules that
tests need, and forks a child for each requested function. The imports do not start threads or open files. A
child therefore behaves like a new program, even when it exits. A child gets the gates of the tests, and a
pipe for the result or error of the function.
"""

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
"""Keeps the function's objects alive until the program exits."""


def main() -> None:
    die_with_parent()
    sys.path[0] = os.path.dirname(sys.path[0])  # the tests folder
    importlib.import_module("support.peers")  # functions in tests refer to this module
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
            with contextlib.suppress(Exception):  # unpickling the function reports this error
                importlib.import_module(module)
        gc.freeze()  # an exiting child must not visit these objects, which would copy their memory
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
    """End this process with its parent, so that it does not outlive a killed test run."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def received(orders: Connection, count: int) -> list[int]:
    with socket.socket(fileno=os.dup(orders.fileno())) as duplicate:
        _, descriptors, _, _ = socket.recv_fds(duplicate, 1, count)
    assert len(descriptors) == count
    return descriptors


def renumber(descriptors: list[int], numbers: list[int]) -> None:
    """Give descriptors the same numbers as in the test, because the function uses these numbers."""
    above = [fcntl.fcntl(fd, fcntl.F_DUPFD, max(numbers) + 1) for fd in descriptors]
    for fd in descriptors:
        os.close(fd)
    for fd, number in zip(above, numbers, strict=True):
        os.dup2(fd, number)
        os.close(fd)


def run(task: bytes, answer: int) -> None:
    outcome: tuple[bool, object]
    try:
        kept.append(pickle.loads(task))
        function, args = kept[0]
        outcome = False, function(*args)
    except BaseException as error:
        error.add_note(f"in the program apart: {traceback.format_exc()}")
        outcome = True, error
    try:
        data = cloudpickle.dumps(outcome)
    except Exception as error:
        data = cloudpickle.dumps((True, AssertionError(f"the answer {outcome!r} cannot be sent: {error}")))
    del outcome
    with os.fdopen(answer, "wb") as pipe:
        pipe.write(data)


if __name__ == "__main__":
    main()
