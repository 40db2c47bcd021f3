"""Abort the runs that have not ended when the interpreter exits."""

from __future__ import annotations

import atexit
import os
import sys
import weakref

from flowchan import _core
from flowchan.errors import Interrupted
from flowchan.run.crew.at_exit import before_exit
from flowchan.run.policy.decisions import AbortRequested
from flowchan.run.supervisor import Supervisor

# Supervisors whose thread still lives, whether or not the program kept the handle of the run. A forked child
# inherits the set but not the runs. A plain set is copied in one step while other threads start runs, and a
# WeakSet is not.
_running: set[weakref.ref[Supervisor]] = set()


def end_at_exit(supervisor: Supervisor) -> None:
    """Abort this run at the exit of the interpreter, unless it has ended by then."""
    _running.add(weakref.ref(supervisor, _running.discard))
    before_exit(_end_runs, 100)


def abort_unfinished() -> None:
    """Abort all unfinished runs, because the interpreter exits.

    A resource that runs need until their end calls this before it ends.
    """
    for reference in list(_running):
        supervisor = reference()
        if supervisor is not None and supervisor.pid == os.getpid() and not supervisor.ended.is_set():
            supervisor.ask(AbortRequested())
            supervisor.wait()


@atexit.register
def _end_runs() -> None:
    abort_unfinished()
    error = getattr(sys, "last_value", None)
    if isinstance(error, Interrupted) and not hasattr(sys, "ps1"):
        # The program did not catch it, so end like a program that does not catch the signal.
        _core._die_of(error.signal)
