"""Detect a main script that lacks a ``__main__`` guard.

With the start methods spawn and forkserver, each new process imports the program's main script. If the script
runs the graph or sets the start method during this import, every worker would do so again. Python prevents
this, but every worker prints a traceback. Here, the new process reports the problem by its exit code instead,
and the program raises a single error.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

from flowchan.declare.blueprint import Blueprint
from flowchan.errors import GraphError, Problem
from flowchan.run.crew.process_exit import exit_text
from flowchan.run.crew.process_start import forkserver_pid

UNGUARDED = 78
"""Exit code of a process that runs the graph while it is still importing the main script."""

NAME = "flowchan "
"""Prefix of worker process names."""


_AT_ERRORS = f"""
import os, sys
def leave_if_unguarded(kind, error, trace, usual=sys.excepthook):
    modules, step = [], trace
    while step is not None:
        modules.append(step.tb_frame.f_globals.get("__name__", ""))
        step = step.tb_next
    if kind is RuntimeError and "__mp_main__" in modules and modules[-1].startswith("multiprocessing."):
        os._exit({UNGUARDED})
    usual(kind, error, trace)
sys.excepthook = leave_if_unguarded
"""
"""Code that a new process runs before it imports the main script. It must not import flowchan, because
flowchan may be importable only after the script has changed ``sys.path``."""


class ProcessName(str):
    """Name of a worker process. Unpickling the name installs an exception hook in the process.

    The hook is installed when the name is unpickled, before the main script is imported. If Python refuses to
    start a process during that import, the hook exits with ``UNGUARDED``.
    """

    def __new__(cls, name: str) -> ProcessName:
        return super().__new__(cls, f"{NAME}{name}")

    def __reduce__(self) -> tuple[Any, ...]:
        return eval, (f"exec({_AT_ERRORS!r}, {{}}) or {str(self)!r}",)


class Unguarded(GraphError):
    """During its import, the main script runs code that only the program itself may run."""

    def __reduce__(self) -> tuple[Any, ...]:
        return GraphError, (self.graph, self.problems)


# Tracebacks must show the public name of the exception.
Unguarded.__module__, Unguarded.__qualname__ = "flowchan", "GraphError"


def unguarded(graph: Blueprint) -> Unguarded:
    """Return the error for a main script that lacks a ``__main__`` guard."""
    method = multiprocessing.get_start_method()
    message = (
        f"with the start method {method!r}, a worker process imports the main script, which then runs "
        "the graph, or sets the start method, a second time; put this code under `if __name__ == "
        '"__main__":`'
    )
    return Unguarded(graph.name, [Problem("main-guard", "", graph.where, message)])


def hint_at_import(exitcode: int | None) -> str:
    """Suggest that a process failed because it imports the main script, if this may be the cause.

    ``exitcode`` is the exit code of a process that ended before it began to work.
    """
    method = multiprocessing.get_start_method()
    if exitcode != 1 or method == "fork":
        return ""
    return (
        f", perhaps while importing the main script, as the start method {method!r} requires; put "
        "`set_start_method` and all code that only the main program may run under `if __name__ == "
        '"__main__":`'
    )


def leave_if_unguarded(graph: Blueprint) -> None:
    """Exit if this process is still importing the main script.

    Print the reason first, unless a parent process will report it.
    """
    process = multiprocessing.current_process()
    if not getattr(process, "_inheriting", False) or not any(
        stage.placement.own_process for stage in graph.stages
    ):
        return
    if not process.name.startswith(NAME):
        print(f"flowchan: {unguarded(graph).problems[0]}", file=sys.stderr, flush=True)
    os._exit(UNGUARDED)


@contextlib.contextmanager
def start_of(graph: Blueprint, stage: str) -> Iterator[None]:
    """Explain the error of a process that could not start because Python's forkserver had ended.

    Args:
        graph: Graph that contains the stage.
        stage: Name of the stage.

    Yields:
        Control to the ``with`` block, which starts the process.

    Raises:
        Unguarded: The forkserver ended while importing the main script.
        OSError: The forkserver ended for another reason, or the start failed for a reason that is unrelated
            to the forkserver.
    """
    try:
        yield
    except (EOFError, OSError) as error:
        exitcode = _servers_exitcode()
        if exitcode == UNGUARDED:
            raise unguarded(graph) from None
        if exitcode is None and not isinstance(error, EOFError):
            raise
        how = "has ended" if exitcode is None else exit_text(exitcode).removesuffix(" without finishing")
        raise OSError(
            f"stage {stage!r}: a worker process could not be started with the start method "
            f"{multiprocessing.get_start_method()!r}, because Python's forkserver {how}"
            f"{hint_at_import(exitcode)}"
        ) from error


def _servers_exitcode() -> int | None:
    """Return the exit code of Python's forkserver if it has just ended; a negative code means a signal.

    Since Python 3.14, the forkserver also imports the main script. A script without a main guard therefore
    ends the forkserver.
    """
    server = forkserver_pid()
    if server is None:
        return None
    give_up = time.monotonic() + 1  # the forkserver closes its pipes shortly before it exits
    while time.monotonic() < give_up:
        try:
            # Leave the process unreaped, because multiprocessing will reap it.
            ended = os.waitid(os.P_PID, server, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        except ChildProcessError:
            return None
        if ended is not None:
            return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
        time.sleep(0.001)
    return None
