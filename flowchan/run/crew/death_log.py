"""Count how the workers of a run died. The counts decide whether and when they are replaced (R4, R10)."""

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
"""Deaths over a batch whose members were all tried before, after which members are found again. Without this
bound, a function that kills only at its second call would run forever."""


class DeathLog:
    """The deaths of the workers of one part of a crew.

    Only one thread at a time calls it for a worker. That is the thread on which the worker's reports arrive,
    or the supervisor's while the worker has no process.
    """

    def __init__(self, plan: Plan) -> None:
        self._graph: Blueprint = plan.graph
        self._limits = plan.limits()
        self._without_item: Counter[WorkerId] = Counter()  # deaths in quick succession without an item
        # How the last workers died over the item that the replacement tries again.
        self._how: dict[WorkerId, list[str]] = {}
        # The member of a batch that each worker tries alone; None: it tries the rest together.
        self._trying: dict[WorkerId, int | None] = {}
        self._members: dict[WorkerId, dict[int, str]] = {}  # how workers died over members of that item
        self._tried: Counter[WorkerId] = Counter()  # 1, and the deaths since all members were tried
        self._unbegun: Counter[WorkerId] = Counter()  # deaths in a row before the worker began to work
        self._terminated: set[WorkerId] = set()

    def started(self, id: WorkerId) -> Suspicion:
        """Note that a process of the worker starts. Return the deaths over its first item."""
        self._terminated.discard(id)
        self._trying.pop(id, None)
        deaths, members = tuple(self._how.get(id, ())), dict(self._members.get(id, {}))
        return Suspicion(deaths, members, self._tried[id] > 0)

    def tries_members(self, event: TriesMember | MembersTried) -> None:
        """Note how far a worker has come that tries the members of a batch."""
        if isinstance(event, TriesMember):
            self._trying[event.worker] = event.member
        else:
            self._tried[event.worker] = max(1, self._tried[event.worker])

    def knows_members(self, id: WorkerId) -> bool:
        """Tell whether members of the worker's batch were tried. Only its replacement knows the result."""
        return bool(self._members.get(id)) or self._tried[id] > 0

    def began(self, id: WorkerId) -> None:
        """Note that the worker has begun to work."""
        self._unbegun[id] = -1

    def terminated(self, id: WorkerId) -> None:
        """Note that the supervisor ends the worker's process.

        Its death then says nothing about the worker.
        """
        self._terminated.add(id)

    def died(self, worker: PlannedWorker, ended: ProcessExit) -> Death:
        """Make the event of a process that has ended without a report of how its worker ended."""
        id, retired = worker.id, ended.exitcode == RETIRED
        late = item_timeout.has_exceeded(worker.stage, ended.exitcode)
        if late:
            ended = dataclasses.replace(ended, how=item_timeout.exceeded(worker.stage), counts=False)
        reason = self._irreplaceable(worker)
        death = Death(
            worker=id, how=ended.how, pid=ended.pid, exitcode=ended.exitcode, host=ended.host,
            over_item=ended.over_item, counts=ended.counts and not retired, retired=retired,
            always=late and not reason, irreplaceable=reason,
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
        """Note the member of a batch over which the worker died.

        A worker that dies over several members together leaves no hope for any of them. Once all members were
        tried, outputs may be out that depend on the members found so far. So later deaths find none, up to
        ``MOST_LATER_DEATHS``.
        """
        id, member = worker.id, self._trying.get(worker.id, -1)
        if ended.over_item < worker.stage.max_deaths:  # another item, or too few deaths
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
        """Return why the stage of a worker can't continue with a replacement; empty if it can."""
        stage, limit = worker.id.stage, self._limits.get(worker.id.stage, 0)
        if stage not in self._limits or (limit == 0 and worker.stage.restarts > 0):
            return "the stage keeps state and is not declared restartable"
        return ""

    def _count(self, worker: PlannedWorker, ended: ProcessExit) -> int:
        """Count the deaths that decide the pause before the next start."""
        id = worker.id
        if ended.over_item:
            self._how[id] = [*self._how.get(id, [])[: ended.over_item - 1], ended.how]
            self._look_at_members(worker, ended)
            return ended.over_item - len(self._members.get(id, ())) - self._tried[id]
        self._without_item[id] = 1 if ended.lived > 1 else self._without_item[id] + 1
        return self._without_item[id]
