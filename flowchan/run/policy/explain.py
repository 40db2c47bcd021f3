"""Explain what a run's stages wait for, from its statistics, and detect that all of them wait."""

from __future__ import annotations

from flowchan.declare.operators import OPERATORS
from flowchan.items.text import number_of
from flowchan.run.policy.stats import EdgeStats, RunStats, StageStats


def explain(stats: RunStats) -> str:
    """Describe what each stage with live workers is doing, in one line per stage.

    For a waiting stage, the line names the channel, the length of the wait, and the stage at the other end.
    """
    stages = {stage.name: stage for stage in stats.stages}
    lines = [f"graph {stats.graph!r} ({stats.state} for {stats.elapsed:.1f} s):"]
    for stage in stats.stages:
        if stage.alive:
            does = _waits(stage, stats.edges, stages) or [_works(stage)]
            if stage.state == "running" and stage.starting:
                does.append(f"{stage.starting} of its {stage.alive} workers are starting")
            lines.append(f"  {_name(stage)} {'; '.join(does)}")
    return "\n".join(lines)


def all_wait(stats: RunStats) -> bool:
    """Return whether every live worker waits for a channel of this graph.

    In this state, only something outside the graph can wake a worker. A single call proves nothing, because
    it reads the channels one after another.

    The result is false if a worker selects from several channels, because several channels would count it.
    The result is also false if a waiting worker has a timeout, or has been woken but is not running yet.
    Waiting coroutines count; ``async_worker.only_wait_for`` checks their event loops for other work.
    """
    if any(edge.selecting > edge.awaiting or edge.woken for edge in stats.edges):
        return False
    alive = [stage for stage in stats.stages if stage.alive]
    return bool(alive) and all(_waiting(stage, stats.edges) >= stage.alive for stage in alive)


def _waiting(stage: StageStats, edges: tuple[EdgeStats, ...]) -> int:
    return sum(
        edge.waiting_readers * (edge.reader == stage.name)
        + edge.waiting_writers * (edge.writer == stage.name)
        for edge in edges
    )


def _name(stage: StageStats) -> str:
    many = "" if stage.alive == 1 else f" ×{stage.alive}"
    return f"{stage.name!r}{many}" + (f" on {', '.join(stage.hosts)}" if stage.hosts else "")


def _is_unread(stage: StageStats) -> bool:
    return OPERATORS[stage.kind].gathers and stage.in_hand == 0


def starting_text(stage: StageStats) -> str:
    """Return "starting", the number of starting workers if others already work, or an empty string."""
    if not stage.starting:
        return ""
    return "starting" if stage.state == "starting" else f"{stage.starting} starting"


def _works(stage: StageStats) -> str:
    if stage.state == "starting":
        return "is starting: no worker has built its callable yet"
    if _is_unread(stage):
        return "waits for the program to read its items with run.iter() or run.wait()"
    return f"works on {number_of(stage.in_hand, 'item')} (busy {100 * stage.busy:.0f} %)"


def _waits(stage: StageStats, edges: tuple[EdgeStats, ...], stages: dict[str, StageStats]) -> list[str]:
    found = []
    for edge in edges:
        if edge.reader == stage.name and edge.waiting_readers:
            found.append(
                f"waits for an item from {_fill(edge)} for {edge.readers_waiting_for:.1f} s, "
                f"whose writer {_other(stages.get(edge.writer), edge.writer)}"
            )
        if edge.writer == stage.name and edge.waiting_writers:
            reader = edge.reader or "nobody"
            found.append(
                f"waits to put into {_fill(edge)} for {edge.writers_waiting_for:.1f} s, "
                f"whose reader {_other(stages.get(reader), reader)}"
            )
    return found


def _fill(edge: EdgeStats) -> str:
    held = [f"process {h.pid} holds {h.blocks} blocks, {h.bytes / 1e6:.1f} MB" for h in edge.holders]
    short = [
        f"{amount(edge.bytes)} of its share of the run's memory, {amount(edge.share)}"
    ] * edge.short_of_bytes
    return f"{edge.name!r} ({'; '.join([f'{edge.inside} of {edge.capacity}', *short, *held])})"


def amount(number: int) -> str:
    """Format a number of bytes."""
    if number < 10**6:
        return f"{number / 1e3:,.1f} KB"
    return f"{number / 1e6:,.1f} MB" if number < 10**9 else f"{number / 1e9:,.1f} GB"


def _other(stage: StageStats | None, name: str) -> str:
    if stage is None or not stage.alive:
        return (
            f"{name!r} has ended"
            if stage is None or not OPERATORS[stage.kind].outside
            else f"{name!r} is filled from outside"
        )
    if _is_unread(stage):
        return f"{name!r} waits for the program to read its items"
    if stage.state == "starting":
        return f"{name!r} is starting"
    return f"{name!r} is busy {100 * stage.busy:.0f} %"
