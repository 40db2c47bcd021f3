"""Implement the puts of channels between threads. ``out`` is the port, or None for a call without one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from flowchan.pure.call_results import raise_step
from flowchan.pure.item_sizes import estimate_size
from flowchan.pure.local_queue import QueueState, QueueStep
from flowchan.pure.wait_line import QueuedItem, Waiter

_CLOSED_PORT = {
    QueueState.OPEN: QueueStep.PORT_CLOSED,
    QueueState.CLOSED: QueueStep.CLOSED,
    QueueState.BROKEN: QueueStep.BROKEN,
}
"""Result of a put whose port was closed during the wait, by the state of the channel."""


def writing(out: Any, size: int = 0) -> Waiter:
    """Create the waiter for a put."""
    if out is None:
        return Waiter(False, size=size)
    turn = out.state.number if out.state.ordered and out.state.keyed else None
    return Waiter(False, out, writer=out.state, size=size, turn=turn)


def put_step(channel: Any, out: Any, item: Any, deadline: float, done: list[int]) -> QueueStep:
    """Put an item, and append its size to ``done``.

    The put and the append are one step. The item is therefore counted even if a signal handler raises
    immediately afterwards.
    """
    queue = channel.usable()
    entry = QueuedItem(item, estimate_size(item) if queue.counts_bytes else 0)
    waiter = writing(out, entry.size)

    def operation() -> QueueStep:
        if out is not None:
            if not out.open:
                return _CLOSED_PORT[queue.state]
            out.begin()
            if out.state.ordered and out.state.keyed:
                waiter.turn = out.state.number
        step: QueueStep = queue.try_put(entry, out and out.state)
        if step is QueueStep.DONE:
            done.append(entry.size)
        return step

    step: QueueStep = queue.perform(waiter, operation, deadline)
    if step is QueueStep.TOO_LARGE:
        raise ValueError(
            f"{channel.describe()}: item must have at most max_bytes={channel.max_bytes} bytes, got "
            f"{entry.size}; use a larger max_bytes"
        )
    return step


def try_put(
    channel: Any,
    out: Any,
    item: Any,
    deadline: float = 0,
    done: list[int] | None = None,
) -> QueueStep:
    """Put an item, in a box if the item is sampled. Raise an error unless the result is DONE or NOT_NOW."""
    sizes: list[int] = [] if done is None else done

    def put(what: Any) -> QueueStep:
        return put_step(channel, out, what, deadline, sizes)

    step = put(item) if out is None or out.tracing is None else out.tracing.put(out, item, put)
    if step is not QueueStep.DONE and step is not QueueStep.NOT_NOW:
        raise_step(channel, step, False, deadline)
    return step


def put_item(channel: Any, out: Any, item: Any, deadline: float, done: list[int] | None = None) -> None:
    """Put an item, or raise the error of the channel."""
    if try_put(channel, out, item, deadline, done) is QueueStep.NOT_NOW:
        raise_step(channel, QueueStep.NOT_NOW, False, deadline)


def put_all(channel: Any, out: Any, items: Iterable[Any], deadline: float) -> None:
    """Put all items. On failure, ``items_put`` of the error is the number of items that were put before."""
    done: list[int] = []
    iterator = iter(items)
    try:
        for item in iterator:
            put_item(channel, out, item, deadline, done)
    except BaseException as error:
        error.items_put = len(done)  # type: ignore[attr-defined]
        raise
