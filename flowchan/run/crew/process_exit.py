"""Describe the end of a worker's process, as a value and in words."""

from __future__ import annotations

import signal
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ProcessExit:
    """The end of a process that did not report how its worker ended.

    Attributes:
        how: The end in words.
        exitcode: Its exit code, negative for a signal, if known.
        pid: The process; 0 if unknown.
        lived: For how many seconds it ran.
        over_item: How many workers have died over the item that it held: see :func:`deaths_over_item`.
        host: The host on which it ran, empty for this machine.
        counts: Whether it uses one of the restarts of its stage.
    """

    how: str
    exitcode: int | None
    pid: int
    lived: float
    over_item: int = 0
    host: str = ""
    counts: bool = True


def exit_text(code: int, lack_of_memory: bool = False) -> str:
    """Say in words what an exit code means.

    ``lack_of_memory``: the kernel has killed a process for lack of memory.
    """
    if code >= 0:
        return f"exited with code {code} without finishing"
    name = signal_name(-code)
    if -code == signal.SIGKILL and lack_of_memory:
        return (
            f"was killed by {name}, likely for lack of memory, because the kernel killed a "
            "process for that at this time"
        )
    return f"was killed by {name}"


def signal_name(number: int) -> str:
    """Return the name of a signal. Most real-time signals have only a number."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
