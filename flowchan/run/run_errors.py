"""Create the exception that a run raises for the failures of its workers."""

from __future__ import annotations

from collections.abc import Sequence

from flowchan.errors import Deadlock, RunError, StageError
from flowchan.run.crew.main_guard import Unguarded
from flowchan.run.policy.events import Failure
from flowchan.run.policy.failures import text_of
from flowchan.run.policy.plan import Plan


def failure_of_run(
    plan: Plan, failures: Sequence[Failure], crashed: BaseException | None
) -> Exception | None:
    """Return the error of a run that has ended, or None if it succeeded.

    ``crashed`` is the exception that a bug in flowchan raised, or None.
    """
    if crashed is not None:
        error = RuntimeError(
            f"flowchan failed to supervise graph {plan.graph.name!r}; this is a bug in flowchan, "
            "please report it"
        )
        error.__cause__ = crashed
        return error
    for failure in failures:
        if isinstance(failure.error, Unguarded):
            return failure.error
    if failures:
        errors = [stage_error(failure, plan) for failure in failures]
        return RunError(f"graph {plan.graph.name!r} failed", errors)
    return None


def stage_error(failure: Failure, plan: Plan) -> StageError:
    """Return the error that describes one failure to the user."""
    if isinstance(failure.error, StageError) and failure.error.stage == failure.worker.stage:
        return failure.error
    if isinstance(failure.error, Deadlock):
        error = StageError("no worker can continue", stage=failure.worker.stage, worker=str(failure.worker))
        error.__cause__ = failure.error
        return error
    if failure.channel is not None:
        return _channel_error(failure, plan)
    item = f" on item {failure.item}" if failure.item is not None else ""
    error = StageError(
        f"stage {failure.worker.stage!r} failed{item} in worker {failure.worker} ({_where(failure)}): "
        + text_of(failure.error),
        stage=failure.worker.stage, worker=str(failure.worker), item=failure.item,
    )  # fmt: skip
    error.__cause__ = failure.error
    return error


def _where(failure: Failure) -> str:
    on = f" on host {failure.host!r}" if failure.host else ""
    return f"pid {failure.pid}{on}"


def _channel_error(failure: Failure, plan: Plan) -> StageError:
    edge = next(edge for edge in plan.edges if edge.name == failure.channel)
    worker = f"{failure.worker}" if failure.worker.number else ""
    by = f" by worker {worker} ({_where(failure)})" if worker else ""
    error = StageError(
        f"channel {edge.name!r} (from {edge.writer!r} to {edge.reader!r}) was aborted{by}: "
        f"{text_of(failure.error)}",
        stage=failure.worker.stage,
        worker=worker,
    )
    error.__cause__ = failure.error
    return error
