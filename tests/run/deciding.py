"""Create events about workers, as a supervisor receives them."""

from __future__ import annotations

import signal

from flowchan.errors import MemberDied
from flowchan.run.policy.events import Death, Failure, WorkerId


def failure(worker: WorkerId, text: str = "wrong") -> Failure:
    return Failure(worker, ValueError(text), "item", 1)


def died(worker: WorkerId) -> Death:
    return Death(worker, "was killed by SIGKILL", 1, -signal.SIGKILL)


def missing(worker: WorkerId) -> Failure:
    return Failure(worker, MemberDied("another died"), None, 1)
