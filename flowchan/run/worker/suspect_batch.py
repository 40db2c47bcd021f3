"""Try a batch's members one at a time, after workers died while processing the whole batch.

A batch is a single item of its stage. One member that kills its worker would therefore make all other members
fail as well. For this reason, a ``map`` after a ``batch`` gets the members one at a time if one more death
would use up ``max_deaths``.

Algorithm. The worker reports each member before it calls the function (``TriesMember``), so that the crew
knows which member killed the worker. The replacement skips this member and tries the others. In the end, the
members that killed a worker fail, and the results of the others form the batch's result. If a call with one
member does not return a list of one result, the worker calls the function again with all remaining members.

Invariant. A replacement skips outputs that have already been put. Once outputs may have been put, further
attempts must therefore put the same outputs in the same order. For this reason, the worker reports when all
members have been tried (``MembersTried``), and later deaths exclude no further members.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from flowchan import _core
from flowchan.channel.channel import In
from flowchan.declare.values import Stage
from flowchan.items.text import short
from flowchan.run.policy import journal, seeds
from flowchan.run.policy.events import MembersTried, TriesMember, WorkerId
from flowchan.run.policy.failures import Suspicion, died_over
from flowchan.run.worker import item_timeout
from flowchan.run.worker.operator_job import SKIPPED, OperatorJob
from flowchan.run.worker.requests import Dropped
from flowchan.run.worker.tracking import marks_of


def can_try_members(stage: Stage) -> bool:
    """Return whether the stage processes batches and may try their members one at a time."""
    return "members" in stage.options and stage.operator.one_output and stage.max_deaths > 1


class SuspectBatch:
    """Calls a worker's function, and tries the members of its first batch alone if that batch is suspect.

    A batch is suspect if it has killed other workers. Each step is reported to the crew with ``tell``.
    """

    def __init__(
        self,
        job: OperatorJob,
        stage: Stage,
        readers: Sequence[In[Any]],
        suspicion: Suspicion,
        tell: Callable[[TriesMember | MembersTried], None],
    ) -> None:
        self._job, self._function = job, job.function
        self._stage, self._readers = stage, readers
        self._suspicion, self._tell = suspicion, tell
        self._worker = WorkerId(stage.name, seeds.worker().number)
        self._first = True
        self._batch: Any = None

    def __call__(self, batch: Any) -> Any:
        """Call the function with a batch, or with one member at a time if the batch is suspect."""
        if self._first:
            self._first = False
            self._batch = batch if self._is_suspect(batch) else None
        if self._batch is None or batch is not self._batch:
            self._batch = None
            return self._function(batch)
        return self._one_at_a_time(batch)

    def _is_suspect(self, batch: Any) -> bool:
        return type(batch) is list and _core._deaths_over(list(self._readers)) >= self._stage.max_deaths

    def _one_at_a_time(self, batch: list[Any]) -> Any:
        killers = self._suspicion.members
        done: list[Any] = []
        results: list[Any] = []
        tracked = self._job.tracking is not None
        for number, member in enumerate(batch):
            if number not in killers:
                self._tell(TriesMember(self._worker, number))
                try:
                    result = self._function([member])
                except Dropped:
                    continue
                results.append(result[1] if tracked else result)
                done.append(member)
        if not (done or killers):
            raise Dropped
        self._tell(TriesMember(self._worker, None))
        joined = [result[0] for result in results if type(result) is list and len(result) == 1]
        if len(joined) < len(done):
            result = self._function(done)
        else:
            result = (marks_of(done), joined) if tracked else joined
        self._tell(MembersTried(self._worker))
        for number, how in killers.items():
            self._give_up(batch[number], how)
        batch[:] = done  # drop members without results, so that the batch matches its results
        return result if done else SKIPPED

    def _give_up(self, member: Any, how: str) -> None:
        """Fail a member that has killed a worker both in its batch and alone."""
        tries = self._stage.max_deaths
        if self._stage.timeout is not None and how == item_timeout.exceeded(self._stage):
            error: Exception = TimeoutError(f"the worker {how}")
        else:
            error = died_over([*self._suspicion.deaths[: tries - 1], how])
            journal.blamed(short(self._job.bare(member), 120), str(error))
        self._job.give_up(member, error, tries)
