"""What may happen to the workers of a run, as its supervisor hears of it."""

from __future__ import annotations

from flowchan.errors import MemberDied
from flowchan.run.policy.decisions import Died
from flowchan.run.policy.events import Failure, WorkerId


def failure(worker: WorkerId, text: str = "wrong") -> Failure:
    return Failure(worker, ValueError(text), "item", 1)


def died(worker: WorkerId) -> Died:
    return Died(worker, failure(worker, "killed"))


def missing(worker: WorkerId) -> Failure:
    return Failure(worker, MemberDied("another died"), None, 1)
