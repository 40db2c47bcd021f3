"""Simulate whole runs with a scripted crew and scripted channels, without processes and threads.

``ScriptedCrew`` implements ``CrewPart`` and ``ScriptedChannels`` implements ``RunChannels``. Both classes
append the supervisor's calls to one list, ``calls``. A test scripts the rest: it reports worker events, sets
the state of the channels, and reacts to calls with :meth:`ScriptedCrew.on`.
"""

from __future__ import annotations

import dataclasses
import signal
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from typing import Any

from flowchan.channel.channel import Channel, ChannelStats
from flowchan.run.crew.mail import run_is_over
from flowchan.run.crew.part import CrewPart, Report
from flowchan.run.crew.run_ports import RunChannels
from flowchan.run.observe.measure import Snapshot
from flowchan.run.policy.deadlock import Activity, Waits
from flowchan.run.policy.events import Death, Ended, Failure, WorkerId
from flowchan.run.policy.plan import Plan
from flowchan.run.policy.stats import HostStats
from flowchan.run.supervisor import Supervisor

Call = tuple[Any, ...]
QUIET = ChannelStats(
    **{field.name: 0 for field in dataclasses.fields(ChannelStats) if field.name != "holders"}
)


def killed(worker: WorkerId, **facts: Any) -> Death:
    """Return the event that reports a worker's death by ``kill -9``."""
    return Death(worker, "was killed by SIGKILL", 1, -signal.SIGKILL, **facts)


class ScriptedCrew(CrewPart):
    """Part of a crew that has no workers.

    Attributes:
        calls: The supervisor's calls, each with its name and arguments.
        report: The run's report, once the run has started.
        refuses: Error that every start of workers raises; None if workers start.
        all_heard: True if all reports of workers have arrived.
        answer: Value that ``waits`` returns (default: no worker waits).
    """

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.report: Report = run_is_over
        self.refuses: Exception | None = None
        self.all_heard = True
        self.answer: Waits | None = Waits()
        self._reactions: defaultdict[str, list[Callable[..., object]]] = defaultdict(list)

    def on(self, word: str, reaction: Callable[..., object]) -> None:
        """Call ``reaction`` whenever the method of this name is called, with the same arguments."""
        self._reactions[word].append(reaction)

    def called(self, word: str) -> list[Call]:
        """Return the arguments of all calls of this name."""
        return [call[1:] for call in self.calls if call[0] == word]

    def record(self, word: str, *arguments: Any) -> None:
        """Append a call, and run the reactions to it."""
        self.calls.append((word, *arguments))
        for reaction in self._reactions[word]:
            reaction(*arguments)

    def end_all(self, *ids: WorkerId) -> None:
        """Report that these workers have ended."""
        for id in ids:
            self.report(Ended(id))

    def start(self, report: Report) -> None:
        self.report = report
        self.record("start")
        if self.refuses is not None:
            raise self.refuses

    def replace(
        self, ids: Sequence[WorkerId], blamed: WorkerId | None, later: bool = False
    ) -> tuple[Failure | Ended, ...]:
        self.record("replace", tuple(ids), blamed, later)
        return () if later else self._failures(ids)

    def start_workers(self, ids: Sequence[WorkerId]) -> tuple[Failure, ...]:
        self.record("start workers", tuple(ids))
        return self._failures(ids)

    def _failures(self, ids: Sequence[WorkerId]) -> tuple[Failure, ...]:
        return () if self.refuses is None else tuple(Failure(id, self.refuses, None, 1) for id in ids)

    def add(self, id: WorkerId) -> None:
        self.record("add", id)
        if self.refuses is not None:
            raise self.refuses

    def remove(self, id: WorkerId) -> None:
        self.record("remove", id)

    def forget(self, id: WorkerId) -> None:
        self.record("forget", id)

    def release_ports(self, id: WorkerId) -> None:
        self.record("release", id)

    def terminate(self, id: WorkerId, force: bool) -> None:
        self.record("terminate", id, force)

    def kill(self) -> None:
        self.record("kill")

    def form_group(self, ids: Sequence[WorkerId]) -> None:
        self.record("form group", tuple(ids))

    def end_group(self, stage: str) -> None:
        self.record("end group", stage)

    def cancel_tasks(self, all_of_them: bool) -> None:
        """Record nothing, because the supervisor calls this method all the time."""

    def cancel_request(self, question: int) -> None:
        self.record("cancel request", question)

    def all_reported(self) -> bool:
        return self.all_heard

    def waits(self, alive: frozenset[WorkerId]) -> Waits | None:
        return self.answer

    def hosts(self) -> tuple[HostStats, ...]:
        return ()

    def stacks(self, ids: Collection[WorkerId]) -> dict[WorkerId, str]:
        return {}

    def close(self, abandoned: frozenset[WorkerId], timeout: float | None) -> frozenset[WorkerId]:
        self.record("close", abandoned)
        return frozenset()

    def warn_of(self, abandoned: frozenset[WorkerId]) -> None:
        pass


class ScriptedChannels(RunChannels):
    """Channels of a run whose state a test sets.

    Attributes:
        plan: The plan of the run.
        inputs: The inputs; always empty, because no script fills one.
        channels: The channels by name; always empty, because no viewer looks into one.
        moved: Number of items that have passed through the channels.
        counts: The nonzero statistics of each channel, by the channel's name.
        broken_ones: The names of channels that are broken.
        unread: Results that the program does not read.
    """

    def __init__(self, plan: Plan, crew: ScriptedCrew) -> None:
        self.plan, self._crew = plan, crew
        self.inputs: dict[str, Any] = {}
        self.channels: dict[str, Channel[Any]] = {}
        self.moved = 0
        self.counts: dict[str, dict[str, int]] = {}
        self.broken_ones: list[str] = []
        self.unread: frozenset[WorkerId] = frozenset()

    def stop_sources(self) -> None:
        self._crew.record("stop sources")

    def end_services(self) -> None:
        self._crew.record("end services")

    def drop_queued(self) -> None:
        self._crew.record("drop queued")

    def close_unwanted(self) -> None:
        """Record nothing, because the supervisor calls this method at times that a test cannot predict."""

    def break_all(self, cause: BaseException | None) -> None:
        self._crew.record("break", cause)

    def broken(self, id: WorkerId | None) -> list[str]:
        return self.broken_ones

    def cause_of(self, channel: str) -> BaseException:
        return ValueError(f"cause of {channel}")

    def activity(self) -> Activity:
        reading = sum(one.get("waiting_readers", 0) for one in self.counts.values())
        writing = sum(one.get("waiting_writers", 0) for one in self.counts.values())
        return Activity(self.moved, reading, writing, unread=self.unread)

    def snapshots(self) -> tuple[Snapshot, ...]:
        return tuple(
            Snapshot(edge, dataclasses.replace(QUIET, **self.counts.get(edge.name, {})))
            for edge in self.plan.edges
        )


@dataclasses.dataclass
class ScriptedRun:
    """The supervisor of a run with a scripted crew and scripted channels."""

    plan: Plan

    def __post_init__(self) -> None:
        self.crew = ScriptedCrew()
        self.channels = ScriptedChannels(self.plan, self.crew)
        self.supervisor = Supervisor(self.plan, self.crew, self.channels)
