"""The crew of a run that has workers on other hosts too. The channels are all here; who is asked about one
worker is the part that has it, and the rest goes to all parts."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol, cast

from flowchan.declare.placements import Placement
from flowchan.run.crew.local_crew import LocalCrew
from flowchan.run.crew.pool_processes import LastingProcesses
from flowchan.run.crew.recovery import Death
from flowchan.run.policy.deadlock import Elsewhere, Glance
from flowchan.run.policy.decisions import Died
from flowchan.run.policy.events import Event, WorkerId
from flowchan.run.policy.plan import Plan, PlannedWorker
from flowchan.run.policy.stats import HostStats


class CrewPart(Protocol):
    """The workers of a run on the hosts of one pool. What ``Crew`` has too means the same here."""

    def start(self, tell: Callable[[Event], None]) -> None: ...

    def release_ports(self, id: WorkerId) -> None: ...

    def terminate(self, id: WorkerId, force: bool) -> None: ...

    def kill(self) -> None: ...

    def death(self, id: WorkerId) -> Death:
        """How a worker died that is gone without a word."""

    def recover(self, id: WorkerId, blame: bool) -> None: ...

    def regroup(self, ids: Sequence[WorkerId]) -> None: ...

    def meet(self, ids: Sequence[WorkerId]) -> None: ...

    def disband(self, stage: str) -> None: ...

    def start_again(self, id: WorkerId) -> None: ...

    def cross_off(self, question: int) -> None: ...

    def all_is_heard(self) -> bool: ...

    def elsewhere(self, alive: frozenset[WorkerId]) -> Elsewhere | None: ...

    def hosts(self) -> tuple[HostStats, ...]: ...

    def close(self) -> None:
        """Leaves nothing on any host, and nothing of them here."""


class Hosting(Protocol):
    """A placement with hosts: it has what runs workers there."""

    def open_crew(self, home: LocalCrew, workers: Sequence[PlannedWorker]) -> CrewPart: ...


def crew_of(plan: Plan, lasting: LastingProcesses | None) -> LocalCrew:
    """The crew that a run needs. ``lasting``: the processes of its pool, which has none on hosts."""
    return CrewRouter(plan) if any(worker.host for worker in plan.workers) else LocalCrew(plan, lasting)


class CrewRouter(LocalCrew):
    """The workers of one run, here and on hosts."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self._parts: list[CrewPart] = []
        self._whose: dict[WorkerId, CrewPart] = {}
        self._at_the_end: tuple[HostStats, ...] = ()
        self._answers: dict[int, Elsewhere] = {}  # of those who have answered what their workers do
        for placement, workers in _shares(plan):
            part = cast(Hosting, placement).open_crew(self, workers)
            self._parts.append(part)
            self._whose.update({worker.id: part for worker in workers})

    def _start_processes(self) -> None:
        super()._start_processes()
        for part in self._parts:
            part.start(self._tell)

    def release_ports(self, id: WorkerId) -> None:
        if id in self._whose:
            self._whose[id].release_ports(id)
        super().release_ports(id)

    def terminate(self, id: WorkerId, force: bool) -> None:
        part = self._whose.get(id)
        super().terminate(id, force) if part is None else part.terminate(id, force)

    def kill(self) -> None:
        super().kill()
        for part in self._parts:
            part.kill()

    def death_of(self, id: WorkerId, used: int) -> Died:
        part = self._whose.get(id)
        if part is None:
            return super().death_of(id, used)
        return self.death_log.write(self._workers[id], part.death(id), used)

    def recover(self, id: WorkerId, blame: bool = True) -> None:
        part = self._whose.get(id)
        super().recover(id, blame) if part is None else part.recover(id, blame)

    def regroup(self, ids: Sequence[WorkerId]) -> None:
        part = self._whose.get(ids[0])
        super().regroup(ids) if part is None else part.regroup(ids)

    def meet(self, ids: Sequence[WorkerId]) -> None:
        part = self._whose.get(ids[0])
        super().meet(ids) if part is None else part.meet(ids)

    def disband(self, stage: str) -> None:
        part = next((part for id, part in self._whose.items() if id.stage == stage), None)
        super().disband(stage) if part is None else part.disband(stage)

    def start_again(self, id: WorkerId) -> None:
        part = self._whose.get(id)
        super().start_again(id) if part is None else part.start_again(id)

    def cross_off(self, question: int) -> None:
        for part in self._parts:
            part.cross_off(question)

    def all_is_heard(self) -> bool:
        return super().all_is_heard() and all(part.all_is_heard() for part in self._parts)

    def glance(self) -> Glance:
        # Whether workers on hosts wait, no channel of ours shows; that is for a closer look.
        here = super().glance()
        return dataclasses.replace(here, reading=here.reading + len(self._whose))

    def elsewhere(self, alive: frozenset[WorkerId]) -> Elsewhere | None:
        for number, part in enumerate(self._parts):
            if number not in self._answers and (told := part.elsewhere(alive)) is not None:
                self._answers[number] = told
        if len(self._answers) < len(self._parts):
            return None
        answers, self._answers = [*self._answers.values()], {}
        reading: Counter[str] = Counter()
        writing: Counter[str] = Counter()
        for one in answers:
            reading.update(one.reading)
            writing.update(one.writing)
        counts = tuple(count for one in answers for count in one.counts)
        return Elsewhere(reading, writing, counts, any(one.moves for one in answers))

    def hosts(self) -> tuple[HostStats, ...]:
        return tuple(host for part in self._parts for host in part.hosts()) or self._at_the_end

    def clear_up(self, abandoned: frozenset[WorkerId], timeout: float | None) -> frozenset[WorkerId]:
        for part in self._parts:
            part.close()
        self._at_the_end = self.hosts()
        self._parts, self._whose = [], {}
        return super().clear_up(abandoned, timeout)


def _shares(plan: Plan) -> list[tuple[Placement, list[PlannedWorker]]]:
    """The workers that run on hosts, by the pool that these are of."""
    shares: list[tuple[Placement, list[PlannedWorker]]] = []
    for worker in plan.workers:
        if worker.host:
            mine = (workers for placement, workers in shares if placement.is_beside(worker.stage.placement))
            workers = next(mine, None)
            if workers is None:
                shares.append((worker.stage.placement, [worker]))
            else:
                workers.append(worker)
    return shares
