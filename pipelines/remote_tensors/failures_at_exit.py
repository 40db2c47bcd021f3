"""At exit, report failures that the program has not seen because it did not call ``RemoteNodes.close()``."""

from __future__ import annotations

import atexit
import contextlib
import sys
import time

from flowchan import FlowchanError
from flowchan.pipelines.remote_tensors import device_table
from flowchan.pipelines.remote_tensors.remote_errors import RemoteError

EXIT_WAIT_S = 2.0
"""Seconds that an exiting program waits for nodes that have not run all commands."""
LEAST_WAIT_S = 0.1
"""Seconds to wait for each further node after a busy node has used up ``EXIT_WAIT_S``."""


def report_at_exit() -> None:
    """Report the failures at exit, before the functions that are already registered with ``atexit`` run.

    Some of these functions end the nodes.
    """
    atexit.unregister(_report)
    atexit.register(_report)


def _report() -> None:
    failures = _unseen()
    if not failures or sys.stderr is None:
        return
    count = "an operation has failed" if len(failures) == 1 else f"{len(failures)} operations have failed"
    print(
        f"flowchan: the program ends without noticing that {count} on its nodes; call "
        "nodes.sync() or nodes.close() before the program ends",
        *(str(one).splitlines()[0] for one in failures[1:]),
        str(failures[0]).rstrip(),
        sep="\n",
        file=sys.stderr,
    )


def _unseen() -> list[RemoteError]:
    """Wait about ``EXIT_WAIT_S`` seconds for commands. Return deaths and failures that were not raised."""
    dead = [one for one in device_table.clients() if one.death is not None]
    clients = [one for one in device_table.clients() if one.death is None]
    for client in clients:
        with contextlib.suppress(FlowchanError):
            client.try_flush()
    until = time.monotonic() + EXIT_WAIT_S
    found: list[RemoteError] = [one.death_error() for one in dead if not one.death_raised]
    for client in clients:
        with contextlib.suppress(FlowchanError, TimeoutError):
            rows = client.failures(max(LEAST_WAIT_S, until - time.monotonic()))
            found += [client.error_of(one) for one in rows]
    return found
