"""Compute deadlines and raise errors for calls on channels between threads."""

from __future__ import annotations

import math
import numbers
import os
import time
from decimal import Decimal
from typing import Any, NoReturn

from flowchan.errors import Broken, Closed, Drained, Empty, Full
from flowchan.pure.local_queue import QueueState, QueueStep
from flowchan.pure.wait_line import NEVER

_LONGEST_S = 1e9

_forks = [0]
os.register_at_fork(after_in_child=lambda: _forks.append(_forks.pop() + 1))


def forks() -> int:
    """Return the number of forks between the program's first process and this one."""
    return _forks[0]


def deadline_of(timeout: Any) -> float:
    """Return the time at which a call gives up: 0 if the call must not wait, ``NEVER`` without a timeout."""
    if timeout is None:
        return NEVER
    seconds = math.nan
    if isinstance(timeout, numbers.Real | Decimal) and not isinstance(timeout, bool):
        try:
            seconds = float(timeout)
        except OverflowError:
            seconds = math.inf if timeout > 0 else -math.inf  # type: ignore[operator]
    if not seconds >= 0:
        raise ValueError(f"timeout must be None or at least 0 seconds, got {timeout!r}")
    return 0 if seconds == 0 else NEVER if seconds > _LONGEST_S else time.monotonic() + seconds


def raise_step(channel: Any, step: QueueStep, reads: bool, deadline: float) -> NoReturn:
    """Raise the error that describes why an attempt has failed."""
    name, queue = channel.describe(), channel._queue
    when = "now" if deadline == 0 else "within the timeout"
    if step is QueueStep.CLOSED:
        raise Closed(f"{name} is closed; no more items can be put")
    if step is QueueStep.DRAINED:
        raise Drained(f"{name} is drained: it is closed, and all its items have been read")
    if step is QueueStep.BROKEN:
        raise Broken(f"{name} is broken") from queue.cause
    if step is QueueStep.PORT_CLOSED:
        raise ValueError(f"this port of {name} was closed; open another one")
    if reads:
        state = (
            "not closed"
            if queue.state is QueueState.OPEN
            else "closed, but a reader may give back its leased items"
        )
        what = f"no item could be taken {when}; the channel is {state}"
        raise Empty(f"{name} is empty; {what}")
    fill = f"{len(queue.items)} of {queue.capacity} items inside"
    inside = queue.bytes_in - queue.bytes_out
    if channel.max_bytes is not None and inside >= 1000:
        fill += f", {_amount(inside)} of max_bytes={_amount(channel.max_bytes)}"
    raise Full(f"{name} is full; no item could be put {when}: {fill}")


def _amount(size: int) -> str:
    return f"{size / 1e6:.1f} MB" if size >= 1_000_000 else f"{size / 1e3:.1f} KB"
