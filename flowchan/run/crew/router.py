"""Forward the supervisor's calls to the part of the crew that manages the worker, or to all parts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Protocol, cast

from flowchan.declare.placements import Placement
from flowchan.run.crew.local_part import LocalPart
from flowchan.run.crew.part import CrewPart, Report
from flowchan.run.crew.pool_processes import PooledProcesses
from flowchan.run.crew.run_ports import RunPorts
from flowchan.run.policy.deadlock import Waits
from flowchan.run.policy.events import Ended, Failure, WorkerId
from flowchan.run.policy.plan import Plan, PlannedWorker
from flowchan.run.policy.stats import HostStats


class HostPlacement(Protocol):
    """Placement on hosts, which can create a part of the crew for its workers."""

    def open_part(self, ports: RunPorts, workers: Sequence[PlannedWorker]) -> CrewPart:
        """Create the part of the crew for these workers."""


class CrewRouter:
    """Combines all parts of the crew behind the methods of :class:`CrewPart`.

    Args:
        ports: Channels and ports of the run.
        pooled: Processes of a pool, or None.

    Attributes:
        local: Part for this machine.
        remote: Parts for the hosts of pools.
    """

    def __init__(self, ports: RunPorts, pooled: PooledProcesses | None = None) -> None:
        self.local = LocalPart(ports, pooled)
        self.remote: list[CrewPart] = []
        self._part_of: dict[WorkerId, CrewPart] = {}
        self._last_hosts: tuple[HostStats, ...] = ()  # statistics at the end of the run
        self._answers: dict[int, Waits] = {}  # answers received so far, by index in ``remote``
        for placement, workers in _shares(ports.plan):
            part = cast(HostPlacement, placement).open_part(ports, workers)
            self.remote.append(part)
            self._part_of.update({worker.id: part for worker in workers})

    def _of(self, id: WorkerId) -> CrewPart:
        return self._part_of.get(id, self.local)

    @property
    def _parts(self) -> list[CrewPart]:
        return [self.local, *self.remote]

    def start(self, report: Report) -> None:
        """See :class:`CrewPart`. Processes start first, because forking is unsafe once threads run."""
        for part in self._parts:
            part.start(report)
        self.local.start_threads()

    def replace(
        self, ids: Sequence[WorkerId], blamed: WorkerId | None, later: bool = False
    ) -> tuple[Failure | Ended, ...]:
        """See :class:`CrewPart`."""
        return self._of(ids[0]).replace(ids, blamed, later)

    def start_workers(self, ids: Sequence[WorkerId]) -> tuple[Failure, ...]:
        """See :class:`CrewPart`."""
        return tuple(failure for id in ids for failure in self._of(id).start_workers([id]))

    def add(self, id: WorkerId) -> None:
        """See :class:`CrewPart`."""
        self._of(id).add(id)

    def remove(self, id: WorkerId) -> None:
        """See :class:`CrewPart`."""
        self._of(id).remove(id)

    def forget(self, id: WorkerId) -> None:
        """See :class:`CrewPart`."""
        self._of(id).forget(id)

    def release_ports(self, id: WorkerId) -> None:
        """See :class:`CrewPart`."""
        self._of(id).release_ports(id)

    def terminate(self, id: WorkerId, force: bool) -> None:
        """See :class:`CrewPart`."""
        self._of(id).terminate(id, force)

    def kill(self) -> None:
        """See :class:`CrewPart`."""
        for part in self._parts:
            part.kill()

    def form_group(self, ids: Sequence[WorkerId]) -> None:
        """See :class:`CrewPart`."""
        self._of(ids[0]).form_group(ids)

    def end_group(self, stage: str) -> None:
        """See :class:`CrewPart`."""
        self._of(WorkerId(stage, 1)).end_group(stage)

    def cancel_tasks(self, all_of_them: bool) -> None:
        """See :class:`CrewPart`."""
        for part in self._parts:
            part.cancel_tasks(all_of_them)

    def cancel_request(self, question: int) -> None:
        """See :class:`CrewPart`."""
        for part in self._parts:
            part.cancel_request(question)

    def all_reported(self) -> bool:
        """See :class:`CrewPart`."""
        return all(part.all_reported() for part in self._parts)

    def waits(self, alive: frozenset[WorkerId]) -> Waits | None:
        """See :class:`CrewPart`. Ask until all remote parts have answered, and combine the answers."""
        for number, part in enumerate(self.remote):
            if number not in self._answers and (answer := part.waits(alive)) is not None:
                self._answers[number] = answer
        local = self.local.waits(alive) if len(self._answers) == len(self.remote) else None
        if local is None:
            return None
        answers, self._answers = [*self._answers.values(), local], {}
        reading: Counter[str] = Counter()
        writing: Counter[str] = Counter()
        for one in answers:
            reading.update(one.reading)
            writing.update(one.writing)
        counts = tuple(count for one in answers for count in one.counts)
        return Waits(reading, writing, counts, any(one.moves for one in answers))

    def hosts(self) -> tuple[HostStats, ...]:
        """See :class:`CrewPart`."""
        return tuple(host for part in self._parts for host in part.hosts()) or self._last_hosts

    def stacks(self, ids: Collection[WorkerId]) -> dict[WorkerId, str]:
        """See :class:`CrewPart`."""
        return {id: text for part in self._parts for id, text in part.stacks(ids).items()}

    def close(self, abandoned: frozenset[WorkerId], timeout: float | None) -> frozenset[WorkerId]:
        """See :class:`CrewPart`."""
        stuck = frozenset(id for part in self.remote for id in part.close(abandoned, timeout))
        self._last_hosts = self.hosts()
        self.remote, self._part_of = [], {}
        return stuck | self.local.close(abandoned, timeout)

    def warn_of(self, abandoned: frozenset[WorkerId]) -> None:
        """See :class:`CrewPart`."""
        for part in self._parts:
            part.warn_of(abandoned)


def _shares(plan: Plan) -> list[tuple[Placement, list[PlannedWorker]]]:
    """Group the workers on hosts by the pool of their host."""
    shares: list[tuple[Placement, list[PlannedWorker]]] = []
    for worker in plan.workers:
        if worker.host:
            own_workers = (
                workers for placement, workers in shares if placement.has_same_host(worker.stage.placement)
            )
            workers = next(own_workers, None)
            if workers is None:
                shares.append((worker.stage.placement, [worker]))
            else:
                workers.append(worker)
    return shares
