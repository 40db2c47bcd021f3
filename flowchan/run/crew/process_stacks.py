"""Get the Python stacks of worker processes on this machine.

A process writes its stacks when it receives a signal. If the process does not answer in time, for example
because it ignores the signal, ``py-spy`` reads the stacks. If ``py-spy`` cannot read them either, the text is
one line with the reason.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Mapping

from flowchan.run.crew.process import WorkerProcess
from flowchan.run.observe.stack_text import text_of_dump
from flowchan.run.policy.events import WorkerId

ANSWER_WITHIN_S = 3.0
"""Time limit in seconds for the processes to write their stacks."""
PY_SPY_WITHIN_S = 10.0
"""Time limit in seconds for ``py-spy`` to read the stacks of all remaining processes."""
POLL_INTERVAL_S = 0.001


def stacks_of_processes(processes: Mapping[WorkerId, WorkerProcess]) -> dict[WorkerId, str]:
    """Return the stacks of these processes as text, omitting processes that have exited."""
    found: dict[WorkerId, str] = {}
    requests = {id: StackRequest(process) for id, process in processes.items()}
    waiting, deadline = list(requests.values()), time.monotonic() + ANSWER_WITHIN_S
    while (waiting := [one for one in waiting if one.may_answer()]) and time.monotonic() < deadline:
        time.sleep(POLL_INTERVAL_S)
    deadline = time.monotonic() + PY_SPY_WITHIN_S
    for id, request in requests.items():
        if request.text or not request.process.is_gone():
            found[id] = request.text or _from_outside(request, deadline)
    return found


class StackRequest:
    """Request for the stacks of one process, with its progress.

    Args:
        process: The process.

    Attributes:
        text: The stacks, once they have arrived.
        why: Reason why the stacks have not arrived yet.
    """

    def __init__(self, process: WorkerProcess) -> None:
        self.process = process
        self.text = ""
        self.why = "it is starting"
        self._was_sent = self._is_over = False

    def may_answer(self) -> bool:
        """Ask the process when it is ready, and check for an answer. Return whether one may still arrive."""
        if self._is_over or self.process.is_gone():
            return False
        if not self._was_sent and not self.process.is_starting():
            refusal = self.process.ask_for_stacks()
            self._was_sent, self._is_over = True, bool(refusal)
            self.why = refusal or "it did not answer; it may be suspended or may ignore the signal"
        elif self._was_sent and (dump := self.process.written_stacks()) is not None:
            self.text, self._is_over = text_of_dump(dump), True
        return not self._is_over


def _from_outside(request: StackRequest, deadline: float) -> str:
    """Return the output of ``py-spy`` for the process, or one line that says why there is none."""
    pid = request.process.pid
    try:
        done = subprocess.run(
            ["py-spy", "dump", "--pid", str(pid)],
            capture_output=True,
            text=True,
            timeout=max(0.0, deadline - time.monotonic()),
            check=False,
        )
        if done.returncode == 0:
            return done.stdout
        why = f"py-spy failed: {done.stderr.strip()}"
    except FileNotFoundError:
        why = "py-spy is not installed"
    except (OSError, subprocess.TimeoutExpired) as error:
        why = f"py-spy failed: {error}"
    return f"no stack of pid {pid}: {request.why}; {why}\n"
