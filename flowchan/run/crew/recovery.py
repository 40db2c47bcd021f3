"""What a dead worker leaves: what it had in hand, which another takes up, and how it died, which decides
whether there will be another (R4, R10)."""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass

from flowchan import _core
from flowchan.declare.blueprint import Blueprint
from flowchan.errors import WorkerDied
from flowchan.run.crew.main_guard import UNGUARDED, hint_at_import, unguarded
from flowchan.run.policy.decisions import Died
from flowchan.run.policy.events import Failure, WorkerId
from flowchan.run.policy.failures import RETIRED
from flowchan.run.policy.plan import Plan, PlannedWorker
from flowchan.run.worker import item_timeout
from flowchan.run.worker.opening import Ports

HOPELESS = 4
"""Deaths of a worker in a row, each before it begins to work, that end the run."""


def take_up(old: Ports, new: Ports, whole: bool = False, blame: bool = True) -> None:
    """Gives back what a dead worker had in hand, so that every output of it appears once. ``new`` are the
    open ports of its successor, which may have to do it alone; ``whole``: it gets all that the dead one had
    in hand. Without ``blame`` no item can have killed the worker, for we did."""
    successors = [new.inputs[port] for port in old.inputs]
    _core._take_up(list(old.inputs.values()), list(old.writers()), successors, whole, blame)


def deaths_in_hand(ports: Ports) -> int:
    """How many workers have died in the user's code over the item that this dead one had in hand, itself
    included; 0 when it died elsewhere."""
    return _core._deaths_over(list(ports.inputs.values()))


@dataclass(frozen=True, slots=True)
class Death:
    """How a worker's process ended that told nothing: in words, with its exit code if it had one, after
    how many seconds, and how many workers have died over the item that it had in hand. ``host``: where,
    if not on this machine. ``counts``: as one of the restarts that its stage has."""

    how: str
    exitcode: int | None
    pid: int
    lived: float
    over_item: int = 0
    host: str = ""
    counts: bool = True


class DeathLog:
    """How the workers of a run died."""

    def __init__(self, plan: Plan) -> None:
        self._graph: Blueprint = plan.graph
        self._limits = plan.limits()
        self._without_item: Counter[WorkerId] = Counter()  # deaths in quick succession without an item
        # How the last workers died that died over one item: that which the successor tries again.
        self._how: dict[WorkerId, list[str]] = {}
        self._stillborn: Counter[WorkerId] = Counter()  # deaths in a row before it began to work

    def began(self, id: WorkerId) -> None:
        """The worker has begun to work."""
        self._stillborn[id] = -1

    def how_they_died(self, id: WorkerId) -> tuple[str, ...]:
        """The predecessors of a worker that died over the item with which it begins."""
        return tuple(self._how.get(id, ()))

    def write(self, worker: PlannedWorker, death: Death, used: int) -> Died:
        """What is to be said of a worker whose process has ended without a word. ``used``: how often one of
        its stage has been replaced."""
        id = worker.id
        retired = death.exitcode == RETIRED
        late = item_timeout.has_exceeded(worker.stage, death.exitcode)
        if late:
            death = dataclasses.replace(death, how=item_timeout.exceeded(worker.stage), counts=False)
        deaths = 0 if retired else self._count(id, death)
        self._stillborn[id] += death.counts
        if self._stillborn[id] and death.exitcode == UNGUARDED:
            return Died(id, Failure(id, unguarded(self._graph), None, death.pid), deaths, hopeless=True)
        hopeless = self._stillborn[id] >= HOPELESS
        limit = self._limits.get(id.stage, 0)
        stateful = id.stage not in self._limits or (limit == 0 and worker.stage.restarts > 0)
        if stateful:
            why = f"a {worker.stage.kind} stage keeps state of its own and is not declared restartable"
        elif hopeless:
            why = "it dies before it begins to work" + hint_at_import(None if death.host else death.exitcode)
        else:
            why = f"{used} of {limit} restarts are used"
        text = f"the process of worker {id} {death.how}; it is not replaced: {why}"
        error = WorkerDied(text, exitcode=death.exitcode, pid=death.pid)
        return Died(
            id,
            Failure(id, error, None, death.pid, host=death.host),
            deaths,
            hopeless,
            death.counts and not retired,
            "" if retired else _in_words(death),
            always=late and not stateful,
        )

    def _count(self, id: WorkerId, death: Death) -> int:
        """The deaths that count for the pause before the next start."""
        if death.over_item:
            self._how[id] = [*self._how.get(id, [])[: death.over_item - 1], death.how]
            return death.over_item
        self._without_item[id] = 1 if death.lived > 1 else self._without_item[id] + 1
        return self._without_item[id]


def _in_words(death: Death) -> str:
    if not death.over_item:
        return death.how
    others = "" if death.over_item == 1 else f", as {death.over_item - 1} before it over the same"
    return f"{death.how}, at work on an item{others}"
