"""Test the supervisor with random events in random order: every run must end, and no failure may be lost."""

from __future__ import annotations

import math
from typing import Any

import pytest
from deciding import died, failure, missing
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from flowchan.run.policy.actions import (
    BreakChannels,
    FormGroup,
    ReleasePorts,
    StopSources,
    Terminate,
)
from flowchan.run.policy.decisions import (
    AbortRequested,
    StopRequested,
    Tick,
    decide,
    next_at,
)
from flowchan.run.policy.events import (
    Ended,
    GroupLost,
    ProcessEnded,
    WorkerId,
)
from flowchan.run.policy.scaling import AddWorker, RemoveWorker, Scale, Size
from flowchan.run.policy.transitions import (
    PolicyState,
)


class Runs(RuleBasedStateMachine):
    """State machine of a run with the worst possible workers: they react only to SIGKILL."""

    @initialize(
        stages=st.lists(st.integers(1, 3), min_size=1, max_size=4),
        processes=st.sets(st.integers(0, 3)),
        ends=st.sets(st.integers(0, 3), min_size=1),
        restarts=st.integers(0, 2),
        gangs=st.sets(st.integers(0, 3)),
        elastic=st.booleans(),
    )
    def begin(
        self,
        stages: list[int],
        processes: set[int],
        ends: set[int],
        restarts: int,
        gangs: set[int],
        elastic: bool,
    ) -> None:
        workers = [WorkerId(str(s), n + 1) for s, count in enumerate(stages) for n in range(count)]
        self.now = 0.0
        self.failed = 0
        self.broken = False
        self.released: set[WorkerId] = set()
        self.killed: set[WorkerId] = set()
        last = len(stages) - 1
        self.state = PolicyState(
            alive=frozenset(workers),
            processes=frozenset(worker for worker in workers if int(worker.stage) in processes),
            sources=frozenset(worker for worker in workers if worker.stage == "0"),
            ends=frozenset(
                worker for worker in workers if int(worker.stage) in {min(end, last) for end in ends}
            ),
            limits=dict.fromkeys(map(str, range(len(stages))), restarts),
            gangs=frozenset(map(str, gangs)),
            elastic=frozenset(map(str, gangs & processes if elastic else ())),
            sizes={str(s): Size(count, 0.0, count) for s, count in enumerate(stages) if s not in gangs},
        )

    @property
    def alive_workers(self) -> frozenset[WorkerId]:
        return self.state.alive - self.state.ended_peers

    def happens(self, event: Any) -> None:
        before = self.state
        self.state, actions = decide(before, event, self.now)
        for action in actions:
            if isinstance(action, BreakChannels):
                assert not self.broken, "channels are broken once"
                self.broken = True
            elif isinstance(action, ReleasePorts):
                self.released.add(action.worker)
            elif isinstance(action, Terminate):
                assert action.worker in before.processes & before.alive - before.ended_peers
                if action.force:
                    self.killed.add(action.worker)
            elif isinstance(action, StopSources):
                assert before.phase == "running"
            elif isinstance(action, AddWorker):
                assert action.worker in self.state.alive
                assert action.worker not in before.alive | self.released, "numbers are not used again"
            elif isinstance(action, RemoveWorker):
                assert action.worker in before.alive - before.leaving
            elif isinstance(action, FormGroup):
                stage = action.workers[0].stage
                peers = {worker for worker in self.state.alive - self.state.joining if worker.stage == stage}
                assert set(action.workers) == peers, "all that are at work"

    def some(self, data: st.DataObject, workers: frozenset[WorkerId]) -> WorkerId:
        return data.draw(st.sampled_from(sorted(workers, key=str)))

    def goes(self, worker: WorkerId) -> None:
        """Report that a process has ended, although its worker had not reported its end."""
        self.happens(ProcessEnded(worker) if self.state.ends_with_peers(worker) else died(worker))

    @precondition(lambda self: self.alive_workers - self.state.missing_peer.keys())
    @rule(data=st.data())
    def a_worker_ends(self, data: st.DataObject) -> None:
        worker = self.some(data, self.alive_workers - self.state.missing_peer.keys())
        self.happens(Ended(worker, early=data.draw(st.booleans())))

    @precondition(lambda self: self.alive_workers - self.state.missing_peer.keys())
    @rule(data=st.data())
    def a_worker_fails(self, data: st.DataObject) -> None:
        self.failed += 1
        self.happens(failure(self.some(data, self.alive_workers - self.state.missing_peer.keys())))

    @precondition(lambda self: self.alive_workers - self.state.missing_peer.keys())
    @rule(data=st.data())
    def a_worker_misses_another_of_its_group(self, data: st.DataObject) -> None:
        self.happens(missing(self.some(data, self.alive_workers - self.state.missing_peer.keys())))

    @precondition(lambda self: self.without_group)
    @rule(data=st.data())
    def a_worker_finds_its_group_over(self, data: st.DataObject) -> None:
        worker = self.some(data, self.without_group)
        self.happens(GroupLost(worker, None if worker in self.state.joining else missing(worker)))

    @property
    def without_group(self) -> frozenset[WorkerId]:
        """Return the workers of elastic gangs that may still report the loss of their group."""
        state = self.state
        return frozenset(
            one for one in state.alive - state.without_group.keys() if one.stage in state.elastic
        )

    @precondition(lambda self: self.alive_workers & self.state.processes)
    @rule(data=st.data())
    def a_process_dies(self, data: st.DataObject) -> None:
        self.goes(self.some(data, self.alive_workers & self.state.processes))

    @precondition(lambda self: self.state.sizes)
    @rule(data=st.data(), workers=st.integers(1, 4))
    def stage_is_scaled(self, data: st.DataObject, workers: int) -> None:
        stage = data.draw(st.sampled_from(sorted(self.state.sizes)))
        before = self.at_work(stage)
        self.happens(Scale(stage, workers))
        going_on = self.state.phase in ("running", "stopping") and before
        assert len(self.at_work(stage)) == (workers if going_on else len(before))

    def at_work(self, stage: str) -> frozenset[WorkerId]:
        return frozenset(one for one in self.state.alive - self.state.leaving if one.stage == stage)

    @rule()
    def run_is_stopped(self) -> None:
        self.happens(StopRequested())

    @rule()
    def run_is_aborted(self) -> None:
        self.happens(AbortRequested())

    @rule(seconds=st.floats(0, 40))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.happens(Tick())

    @invariant()
    def no_failure_is_lost(self) -> None:
        assert len(getattr(self, "state", PolicyState(*[frozenset()] * 4)).failures) >= getattr(
            self, "failed", 0
        )

    @invariant()
    def ended_means_no_worker_is_alive(self) -> None:
        if hasattr(self, "state"):
            assert (self.state.phase == "ended") == (not self.state.alive)

    @invariant()
    def decisions_change_only_at_announced_times(self) -> None:
        if not hasattr(self, "state"):
            return
        at, now = next_at(self.state), getattr(self, "now", 0.0)
        before, after = min(at - 1e-6, 1e9), at + 1e-6
        assert before < now or decide(self.state, Tick(), before) == (self.state, ())
        assert at == math.inf or decide(self.state, Tick(), max(after, now)) != (self.state, ())

    def teardown(self) -> None:
        """Check that a run that is stopped with a timeout ends without further events from its workers.

        Only time passes, and processes that were killed are reported dead.
        """
        if not hasattr(self, "state"):
            return
        self.happens(StopRequested(timeout=60.0))
        for _ in range(1000):
            if self.state.phase == "ended":
                return
            self.now += 1.0
            self.happens(Tick())
            for worker in sorted(
                (self.killed | self.state.missing_peer.keys()) & self.alive_workers, key=str
            ):
                if worker in self.alive_workers:
                    self.goes(worker)
        raise AssertionError(f"stuck: {self.state}")


# when a test fails, Hypothesis simplifies the example for up to 300 s
TestRuns = pytest.mark.timeout(400)(Runs.TestCase)
