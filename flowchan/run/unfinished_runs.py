"""Abort runs that are still active when the interpreter exits."""

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

# Supervisors whose thread is alive, even if the program has dropped the run's handle. A forked child inherits
# this set but not the runs. Unlike a WeakSet, a plain set can be copied in one step while other threads start
# runs.
_running: set[weakref.ref[Supervisor]] = set()


def end_at_exit(supervisor: Supervisor) -> None:
    """Abort this run when the interpreter exits, unless the run has ended by then."""
    _running.add(weakref.ref(supervisor, _running.discard))
    before_exit(_end_runs, 100)


def abort_unfinished() -> None:
    """Abort all active runs before the interpreter exits.

    Call this function before you release a resource that active runs use.
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
        # The program did not catch Interrupted, so let the signal end the program.
        _core._die_of(error.signal)
