"""Create events about workers, as a supervisor receives them.

Most events come from other processes, so their names are equal to those in the state but different objects.
"""

from __future__ import annotations

import pickle
import signal

from flowchan.errors import MemberDied
from flowchan.run.policy.events import Death, Failure, WorkerId


def received(worker: WorkerId) -> WorkerId:
    """Return the same worker as another process reports it."""
    sent: WorkerId = pickle.loads(pickle.dumps(worker))
    return sent


def failure(worker: WorkerId, text: str = "wrong") -> Failure:
    return Failure(received(worker), ValueError(text), "item", 1)


def died(worker: WorkerId) -> Death:
    return Death(received(worker), "was killed by SIGKILL", 1, -signal.SIGKILL)


def missing(worker: WorkerId) -> Failure:
    return Failure(received(worker), MemberDied("another died"), None, 1)
