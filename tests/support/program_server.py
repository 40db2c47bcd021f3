"""Server that has imported shared modules, and runs programs in its children.

Usage: ``python program_server.py DESCRIPTOR MODULE …``. The descriptor is a connection for the orders, or a
listening socket. If a socket is given, each connecting process gets its own child of the server, which
executes its orders. Except for the imports, a program behaves as in a fresh Python interpreter. The program
has the arguments, folder, environment, streams and session that the caller has chosen, a separate
``__main__``, and the interpreter's usual shutdown. A program that lacks a necessary import may not fail here.
For example, a program that does not import ``flowchan.pipelines`` still finds it as an attribute of its
package.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import multiprocessing.process
import os
import runpy
import signal
import socket
import sys
import warnings
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from types import ModuleType
from typing import Any, NamedTuple

from peer_server import die_with_parent, received

NAMES = "backslashreplace"  # error handler of sys.stderr for characters that its encoding lacks
ours = sys.modules["__main__"]  # keeps this module alive when a program replaces __main__


class Order(NamedTuple):
    arguments: Sequence[str]
    folder: str | None
    environment: Mapping[str, str]
    session: bool


def main() -> None:
    die_with_parent()
    given = socket.socket(fileno=int(sys.argv[1]))
    if given.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        given = accepted(given)
    else:
        load()
    carry_out(Connection(given.detach()))


def load() -> None:
    for module in sys.argv[2:]:
        with contextlib.suppress(ImportError):  # programs that need the module report that it is missing
            importlib.import_module(module)
    assert len(os.listdir("/proc/self/task")) == 1, "a child would miss a thread"
    gc.collect()
    gc.freeze()
    libc = ctypes.CDLL(None)
    if "torch" in sys.modules and hasattr(libc, "on_exit"):  # only glibc has it
        # After Python's shutdown, a program ends without the destructors of torch's libraries. These
        # destructors would copy the memory that the program shares with this server.
        libc.on_exit(libc._exit, None)


def accepted(listener: socket.socket) -> socket.socket:
    """Return the next connection, in a child that serves it. Modules are imported only after the first
    connection."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps these children
    while True:
        connection, _ = listener.accept()
        load()
        if os.fork() == 0:
            die_with_parent()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            listener.close()
            connection.sendall(os.getpid().to_bytes(4, sys.byteorder))
            return connection
        connection.close()


def carry_out(orders: Connection) -> None:
    while (order := orders.recv()) is not None:
        if isinstance(order, int):
            orders.send(os.waitstatus_to_exitcode(os.waitpid(order, 0)[1]))
            continue
        streams = received(orders, 3)
        child = os.fork()
        if child == 0:
            orders.close()
            become(Order(*order), streams)
            return
        for fd in streams:
            os.close(fd)
        orders.send(child)


def become(order: Order, streams: Sequence[int]) -> None:
    """Make this process look like the program's own process, and run the program."""
    for number, fd in enumerate(streams):
        os.dup2(fd, number)
        os.close(fd)
    if order.session:
        os.setsid()
    if order.folder is not None:
        os.chdir(order.folder)
    os.environ.clear()
    os.environ.update(order.environment)
    sys.path[1:1] = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
    multiprocessing.process.ORIGINAL_DIR = os.getcwd()  # type: ignore[attr-defined]
    begin_streams()
    arguments = warned(list(order.arguments))
    main = sys.modules["__main__"] = ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    if arguments[0] == "-m":
        sys.argv[:], sys.path[0] = arguments[1:], os.getcwd()
        runpy._run_module_as_main(arguments[1])  # type: ignore[attr-defined]
        return
    if arguments[0] == "-c":
        text, file, sys.path[0] = arguments.pop(1), "<string>", ""
    else:
        file = main.__file__ = os.path.abspath(arguments[0])
        sys.path[0] = os.path.dirname(file)
        with open(file) as source:
            text = source.read()
    sys.argv[:] = arguments
    exec(compile(text, file, "exec", dont_inherit=True), main.__dict__)


def begin_streams() -> None:
    out = 1 if os.environ.get("PYTHONUNBUFFERED") else -1
    opened: Any = [
        open(number, mode, buffering, closefd=False, errors=errors)  # noqa: SIM115
        for number, mode, buffering, errors in ((0, "r", -1, None), (1, "w", out, None), (2, "w", 1, NAMES))
    ]
    sys.stdin, sys.stdout, sys.stderr = sys.__stdin__, sys.__stdout__, sys.__stderr__ = opened


def warned(arguments: list[str]) -> list[str]:
    """Apply the ``-W`` options, and return the other arguments."""
    while arguments[0] == "-W":
        _, option, *arguments = arguments
        sys.warnoptions.append(option)
        warnings._setoption(option)  # type: ignore[attr-defined]
    return arguments


if __name__ == "__main__":
    main()
