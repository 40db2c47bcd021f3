"""Decide whether the number of workers of a stage can change during a run."""

from __future__ import annotations

from flowchan.declare.callables import is_async
from flowchan.declare.values import Stage


def fixed_workers(stage: Stage) -> str:
    """Explain why a stage's number of workers cannot change during a run.

    Args:
        stage: A stage of the graph.

    Returns:
        A description of the stage, such as "a map on hosts". The description is empty if the number can
        change.
    """
    if not stage.operator.per_item:
        return f"a {stage.kind}"
    if "key" in stage.options:
        return f"a {stage.kind} with key="
    if is_async(stage.function):
        return f"a {stage.kind} with an async def function"
    if stage.placement.is_remote:
        return f"a {stage.kind} on hosts"
    if stage.gpus:
        return f"a {stage.kind} with gpus={stage.gpus} for each worker"
    return f"a {stage.kind} with an output or input for each worker" if stage.output_per_worker else ""


def auto_refusal(stage: Stage, why: str) -> str:
    """Return the error message for a stage that does not support ``workers="auto"``."""
    return (
        f"workers={stage.auto!r} requires a map, filter, flat_map, partition or sink on threads or "
        f"processes, got {why}; set a number of workers"
    )
