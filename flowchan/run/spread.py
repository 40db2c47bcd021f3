"""The crew of a run that has workers on other hosts too. The channels are all here; who is asked about one
worker is the part that has it, and the rest goes to all parts."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol, cast

from flowchan.declare.places import Place
from flowchan.run.crew import LocalCrew
from flowchan.run.deadlock import Elsewhere, Glance
from flowchan.run.decisions import Died
from flowchan.run.events import Event, WorkerId
from flowchan.run.lasting import LastingProcesses
from flowchan.run.plan import Plan, PlannedWorker
from flowchan.run.recovery import Death
from flowchan.run.stats import HostStats


class Away(Protocol):
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
    """A place with hosts: it has what runs workers there."""

    def open_crew(self, home: LocalCrew, workers: Sequence[PlannedWorker]) -> Away: ...


def crew_of(plan: Plan, lasting: LastingProcesses | None) -> LocalCrew:
    """The crew that a run needs. ``lasting``: the processes of its pool, which has none on hosts."""
    return Spread(plan) if any(worker.host for worker in plan.workers) else LocalCrew(plan, lasting)


class Spread(LocalCrew):
    """The workers of one run, here and on hosts."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self._away: list[Away] = []
        self._whose: dict[WorkerId, Away] = {}
        self._at_the_end: tuple[HostStats, ...] = ()
        self._answers: dict[int, Elsewhere] = {}  # of those who have answered what their workers do
        for place, workers in _shares(plan):
            away = cast(Hosting, place).open_crew(self, workers)
            self._away.append(away)
            self._whose.update({worker.id: away for worker in workers})

    def _start_processes(self) -> None:
        super()._start_processes()
        for away in self._away:
            away.start(self._tell)

    def release_ports(self, id: WorkerId) -> None:
        if id in self._whose:
            self._whose[id].release_ports(id)
        super().release_ports(id)

    def terminate(self, id: WorkerId, force: bool) -> None:
        away = self._whose.get(id)
        super().terminate(id, force) if away is None else away.terminate(id, force)

    def kill(self) -> None:
        super().kill()
        for away in self._away:
            away.kill()

    def obituary(self, id: WorkerId, used: int) -> Died:
        away = self._whose.get(id)
        if away is None:
            return super().obituary(id, used)
        return self.obituaries.write(self._workers[id], away.death(id), used)

    def recover(self, id: WorkerId, blame: bool = True) -> None:
        away = self._whose.get(id)
        super().recover(id, blame) if away is None else away.recover(id, blame)

    def regroup(self, ids: Sequence[WorkerId]) -> None:
        away = self._whose.get(ids[0])
        super().regroup(ids) if away is None else away.regroup(ids)

    def meet(self, ids: Sequence[WorkerId]) -> None:
        away = self._whose.get(ids[0])
        super().meet(ids) if away is None else away.meet(ids)

    def disband(self, stage: str) -> None:
        away = next((away for id, away in self._whose.items() if id.stage == stage), None)
        super().disband(stage) if away is None else away.disband(stage)

    def start_again(self, id: WorkerId) -> None:
        away = self._whose.get(id)
        super().start_again(id) if away is None else away.start_again(id)

    def cross_off(self, question: int) -> None:
        for away in self._away:
            away.cross_off(question)

    def all_is_heard(self) -> bool:
        return super().all_is_heard() and all(away.all_is_heard() for away in self._away)

    def glance(self) -> Glance:
        # Whether workers on hosts wait, no channel of ours shows; that is for a closer look.
        here = super().glance()
        return dataclasses.replace(here, reading=here.reading + len(self._whose))

    def elsewhere(self, alive: frozenset[WorkerId]) -> Elsewhere | None:
        for number, away in enumerate(self._away):
            if number not in self._answers and (told := away.elsewhere(alive)) is not None:
                self._answers[number] = told
        if len(self._answers) < len(self._away):
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
        return tuple(host for away in self._away for host in away.hosts()) or self._at_the_end

    def clear_up(self, abandoned: frozenset[WorkerId], patience: float | None) -> frozenset[WorkerId]:
        for away in self._away:
            away.close()
        self._at_the_end = self.hosts()
        self._away, self._whose = [], {}
        return super().clear_up(abandoned, patience)


def _shares(plan: Plan) -> list[tuple[Place, list[PlannedWorker]]]:
    """The workers that run on hosts, by the pool that these are of."""
    shares: list[tuple[Place, list[PlannedWorker]]] = []
    for worker in plan.workers:
        if worker.host:
            mine = (workers for place, workers in shares if place.is_beside(worker.stage.place))
            workers = next(mine, None)
            if workers is None:
                shares.append((worker.stage.place, [worker]))
            else:
                workers.append(worker)
    return shares
