"""Count the deaths of a run's workers, which determine whether and when to replace a worker (R4, R10)."""

from __future__ import annotations

import dataclasses
from collections import Counter

from flowchan.declare.blueprint import Blueprint
from flowchan.run.crew.main_guard import UNGUARDED, hint_at_import, unguarded
from flowchan.run.crew.process_exit import ProcessExit
from flowchan.run.policy.events import Death, MembersTried, TriesMember, WorkerId
from flowchan.run.policy.failures import RETIRED, Suspicion
from flowchan.run.policy.plan import Plan, PlannedWorker
from flowchan.run.worker import item_timeout

MOST_LATER_DEATHS = 20
"""After each member of a batch was tried alone, up to this many more deaths exclude no further member.

Later deaths exclude members again. Otherwise, a function that kills its worker only in its second call would
run forever.
"""


class DeathLog:
    """Keeps the deaths of the workers in one part of a crew.

    For each worker, only one thread at a time calls the methods. While the worker has a process, this is the
    thread that receives its reports. Otherwise, this is the supervisor's thread.
    """

    def __init__(self, plan: Plan) -> None:
        self._graph: Blueprint = plan.graph
        self._limits = plan.limits()
        self._without_item: Counter[WorkerId] = Counter()  # consecutive early deaths, each without an item
        # For the item that a replacement will retry: how the earlier workers that held the item died.
        self._how: dict[WorkerId, list[str]] = {}
        # The batch member that each worker is trying alone, or None while it tries the rest together.
        self._trying: dict[WorkerId, int | None] = {}
        self._members: dict[WorkerId, dict[int, str]] = {}  # how workers died, by batch member
        # 0 until all members have been tried; from then on, 1 + the number of later deaths.
        self._tried: Counter[WorkerId] = Counter()
        self._unbegun: Counter[WorkerId] = Counter()  # consecutive deaths before the worker began to work
        self._terminated: set[WorkerId] = set()

    def started(self, id: WorkerId) -> Suspicion:
        """Record that a process is about to start, and return the earlier deaths on its first item."""
        self._terminated.discard(id)
        self._trying.pop(id, None)
        deaths, members = tuple(self._how.get(id, ())), dict(self._members.get(id, {}))
        return Suspicion(deaths, members, self._tried[id] > 0)

    def tries_members(self, event: TriesMember | MembersTried) -> None:
        """Record up to which member a worker has tried a batch."""
        if isinstance(event, TriesMember):
            self._trying[event.worker] = event.member
        else:
            self._tried[event.worker] = max(1, self._tried[event.worker])

    def knows_members(self, id: WorkerId) -> bool:
        """Return whether members of a worker's batch were tried. Then only its replacement may get it."""
        return bool(self._members.get(id)) or self._tried[id] > 0

    def began(self, id: WorkerId) -> None:
        """Record that a worker has begun to work."""
        self._unbegun[id] = -1

    def terminated(self, id: WorkerId) -> None:
        """Record that the supervisor is terminating the process of a worker.

        The death of the process is then not blamed on the worker or its item.
        """
        self._terminated.add(id)

    def died(self, worker: PlannedWorker, ended: ProcessExit) -> Death:
        """Return the event for a process that ended before its worker reported an end."""
        id, retired = worker.id, ended.exitcode == RETIRED
        late = item_timeout.has_exceeded(worker.stage, ended.exitcode)
        if late:
            ended = dataclasses.replace(ended, how=item_timeout.exceeded(worker.stage), counts=False)
        reason = self._irreplaceable(worker)
        death = Death(
            worker=id, how=ended.how, pid=ended.pid, exitcode=ended.exitcode, host=ended.host,
            over_item=ended.over_item, counts=ended.counts and not retired, retired=retired,
            always=late and not reason, irreplaceable=reason, stack=ended.stack,
        )  # fmt: skip
        if id in self._terminated:
            return dataclasses.replace(death, deaths=0)
        deaths = 0 if retired else self._count(worker, ended)
        self._unbegun[id] += ended.counts
        unbegun = self._unbegun[id]
        unguarded_script = unbegun and ended.exitcode == UNGUARDED
        return dataclasses.replace(
            death,
            deaths=deaths,
            unbegun=unbegun,
            hint=hint_at_import(None if ended.host else ended.exitcode),
            error=unguarded(self._graph) if unguarded_script else None,
        )

    def _look_at_members(self, worker: PlannedWorker, ended: ProcessExit) -> None:
        """Record the batch member that the worker was processing when it died.

        If the worker was trying several members together, none can be blamed, and the batch fails. After all
        members have been tried, outputs that depend on the choice of excluded members may already have been
        put. For this reason, up to ``MOST_LATER_DEATHS`` later deaths exclude no further members.
        """
        id, member = worker.id, self._trying.get(worker.id, -1)
        # The worker died on another item, or not enough workers have died yet to start trying the members
        # one by one.
        if ended.over_item < worker.stage.max_deaths:
            self._members.pop(id, None)
            self._tried.pop(id, None)
        elif 0 < self._tried[id] <= MOST_LATER_DEATHS:
            self._tried[id] += 1
        elif member is None:
            self._members.pop(id, None)
            self._tried.pop(id, None)
        elif member >= 0:
            self._members.setdefault(id, {})[member] = ended.how

    def _irreplaceable(self, worker: PlannedWorker) -> str:
        """Explain why no replacement can continue the work. The text is empty if a replacement can."""
        stage, limit = worker.id.stage, self._limits.get(worker.id.stage, 0)
        if stage not in self._limits or (limit == 0 and worker.stage.restarts > 0):
            return "the stage keeps state and is not declared restartable"
        return ""

    def _count(self, worker: PlannedWorker, ended: ProcessExit) -> int:
        """Return the number of deaths that determines the delay of the next start."""
        id = worker.id
        if ended.over_item:
            self._how[id] = [*self._how.get(id, [])[: ended.over_item - 1], ended.how]
            self._look_at_members(worker, ended)
            return ended.over_item - len(self._members.get(id, ())) - self._tried[id]
        # A running service takes no items from the graph, so each of its deaths counts as the first one.
        serves = worker.stage.service and self._unbegun[id] < 0
        self._without_item[id] = 1 if ended.lived > 1 or serves else self._without_item[id] + 1
        return self._without_item[id]
