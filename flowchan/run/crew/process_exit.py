"""Describe how a worker process ended, as a value and as text."""

from __future__ import annotations

import signal
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ProcessExit:
    """Describes the end of a process whose worker did not report its own end.

    Attributes:
        how: Description of the end.
        exitcode: Exit code, negative for a signal; None if unknown.
        pid: Process ID; 0 if unknown.
        lived: How long the process ran, in seconds.
        over_item: Number of workers that died while processing the item that this worker held; see
            :func:`deaths_over_item`.
        host: Host on which the process ran; empty for this machine.
        counts: True if the death uses up one of the stage's restarts.
        stack: Python stacks that the process wrote before a time limit killed it; empty if unknown.
    """

    how: str
    exitcode: int | None
    pid: int
    lived: float
    over_item: int = 0
    host: str = ""
    counts: bool = True
    stack: str = ""


def exit_text(code: int, lack_of_memory: bool = False) -> str:
    """Describe an exit code in words.

    ``lack_of_memory`` is true if the kernel has just killed a process because memory ran out.
    """
    if code >= 0:
        return f"exited with code {code} without finishing"
    name = signal_name(-code)
    if -code == signal.SIGKILL and lack_of_memory:
        return (
            f"was killed by {name}, likely for lack of memory: the kernel killed a process for that "
            "reason at the same time"
        )
    return f"was killed by {name}"


def signal_name(number: int) -> str:
    """Return the name of a signal, or its number if it has no name, like most real-time signals."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
