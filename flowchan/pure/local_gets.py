"""Implement the gets of channels between threads. ``port`` is the port, or None for a call without one."""

from __future__ import annotations

from typing import Any

from flowchan.items.arguments import is_whole
from flowchan.pure.call_results import raise_step
from flowchan.pure.item_tracing import unboxed
from flowchan.pure.local_queue import LocalQueue, QueueState, QueueStep
from flowchan.pure.wait_line import NEVER, QueuedItem, ReaderState, Waiter


def pass_turns(port: Any) -> None:
    """Tell the ordered writers fed by this port that its leased items have no more outputs."""
    if not port.state.leased:
        return
    number = port.state.number
    for out in port.feeds():
        queue, state = out.channel._queue, out.state
        if state.ordered:
            waiter = Waiter(False, out, writer=state, turn=number)
            finish = lambda q=queue, o=out: q.finish_item(o.state, number) if o.open else QueueStep.DONE  # noqa: E731
            queue.perform(waiter, finish, NEVER)
        else:
            state.keyed = False
        state.count = 0


def _keep_turns(port: Any) -> None:
    """Begin to keep turns, because the stage gets more workers.

    Callers must ensure that no item is leased through the port.
    """
    for out in port.feeds():
        if out.may_have_turns:
            with out.channel._queue.held():
                out.channel._queue.start_turns_at(port.state.number + 1)
                out.state.ordered = True
    port.state.keeps_turns = True


def take(channel: Any, port: Any, deadline: float, into: list[QueuedItem], ends: bool = True) -> QueueStep:
    """Take an item. If ``ends`` is true, first end the leases of the port's earlier items."""
    queue: LocalQueue = channel.usable()
    finished = []
    state: ReaderState | None = None if port is None else port.state
    waiter = Waiter(True, port, reader=state)

    def operation() -> QueueStep:
        if port is not None and not port.open:
            return QueueStep.BROKEN if queue.state is QueueState.BROKEN else QueueStep.PORT_CLOSED
        if port is not None and ends:
            finished.append(queue.acknowledge(port.state))
        return queue.try_take(state, into)

    while True:
        if port is not None and ends:
            if port.holds_traced:
                port.holds_traced = False
                if port.tracing is not None:
                    port.tracing.finished(port)
            pass_turns(port)
        step = queue.perform(waiter, operation, deadline)
        if step is not QueueStep.KEEP_TURNS or port is None:
            return step
        _keep_turns(port)


def return_taken(channel: Any, port: Any, taken: list[QueuedItem]) -> None:
    """Return items to the queue, because a signal handler raised before the call could return them."""
    if not taken:
        return
    queue = channel._queue
    with queue.held():
        back = [item for item in taken if port is None or item in port.state.leased]
        if port is not None:
            port.state.leased = [item for item in port.state.leased if item not in back]
            queue.leased -= len(back)
        taken.clear()
        queue.untake(back)


def try_get(
    channel: Any,
    port: Any,
    deadline: float = 0,
    keep: bool = False,
    taken: list[QueuedItem] | None = None,
) -> tuple[QueueStep, Any]:
    """Take an item. Raise an error unless the result is DONE, NOT_NOW or DRAINED."""
    taken = [] if taken is None else taken
    try:
        step = take(channel, port, deadline, taken, ends=not keep)
        result = step, unboxed(port, taken[0].object) if taken else None
    except BaseException:
        return_taken(channel, port, taken)
        raise
    if step not in (QueueStep.DONE, QueueStep.NOT_NOW, QueueStep.DRAINED):
        raise_step(channel, step, True, deadline)
    return result


def get_item(channel: Any, port: Any, deadline: float, keep: bool = False) -> Any:
    """Take an item, or raise the error of the channel."""
    step, item = try_get(channel, port, deadline, keep)
    if step is not QueueStep.DONE:
        raise_step(channel, step, True, deadline)
    return item


def next_item(channel: Any, port: Any) -> Any:
    """Take the next item for a ``for`` loop."""
    step, item = try_get(channel, port, NEVER)
    if step is QueueStep.DRAINED:
        raise StopIteration
    return item


def get_all(channel: Any, port: Any, most: Any, deadline: float) -> list[Any]:
    """Take up to ``most`` items, but wait only for the first."""
    if not is_whole(most) or most < 1:
        raise ValueError(f"get_many: max must be an int of at least 1, got {most!r}")
    first = get_item(channel, port, deadline)
    taken: list[QueuedItem] = []
    try:
        while 1 + len(taken) < most and take(channel, port, 0, taken, ends=False) is QueueStep.DONE:
            pass
        return [first, *(unboxed(port, item.object) for item in taken)]
    except BaseException as error:
        error.items_got = [first, *(unboxed(port, item.object) for item in taken)]  # type: ignore[attr-defined]
        raise
