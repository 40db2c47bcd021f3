"""Collect the Python stacks of a run's workers."""

from __future__ import annotations

from typing import Any

from flowchan.declare.stream import Stream
from flowchan.run.supervisor import Supervisor


def stacks(supervisor: Supervisor, stage: Stream[Any] | str | None) -> dict[str, str]:
    """Return the stacks of the running workers of one stage or of all stages; see ``Run.stacks``.

    After the end of the run, the result contains only threads that the run could not stop.
    """
    graph = supervisor.plan.graph
    names = [one.name for one in graph.stages]
    if stage is not None:
        name = stage.stage if isinstance(stage, Stream) and stage.graph is graph else stage
        if not isinstance(name, str):
            raise KeyError(f"{stage!r} is not a stage of graph {graph.name!r}")
        names = [graph.stage_named(name).name]
    state = supervisor.state
    running = {id for id in state.alive | state.abandoned if id.stage in names}
    found = supervisor.crew.stacks(running)
    return {str(id): found[id] for id in sorted(found, key=lambda id: (names.index(id.stage), id.number))}
