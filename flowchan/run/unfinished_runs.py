"""Abort the runs that are still active when the interpreter exits."""

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

# Supervisors whose thread is alive, even if the program has dropped the handle of the run. A forked child
# inherits the set but not the runs. This is a plain set, because it can be copied in one step while other
# threads start runs; a WeakSet can't.
_running: set[weakref.ref[Supervisor]] = set()


def end_at_exit(supervisor: Supervisor) -> None:
    """Abort this run when the interpreter exits, unless the run has already ended."""
    _running.add(weakref.ref(supervisor, _running.discard))
    before_exit(_end_runs, 100)


def abort_unfinished() -> None:
    """Abort all active runs, because the interpreter is exiting.

    If runs need a resource until they end, its owner calls this function before it releases the resource.
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
        # The program did not catch Interrupted, so end it as the signal would.
        _core._die_of(error.signal)
