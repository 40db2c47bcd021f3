"""Replace ``flowchan._core`` if it is missing. Only channels between threads work; other calls raise."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from flowchan.pure.item_sizes import estimate_size as _size_of
from flowchan.pure.item_tracing import ItemTracing
from flowchan.pure.local_waits import Await
from flowchan.pure.local_waits import LoopWatch as Watch
from flowchan.pure.local_waits import observe as _observe
from flowchan.pure.local_waits import select_one as _select
from flowchan.pure.pure_channel import LocalChannel as Channel
from flowchan.pure.pure_channel import ReadingPort as In
from flowchan.pure.pure_channel import WritingPort as Out
from flowchan.pure.unavailable import missing_class, missing_function

__all__ = [
    "Await",
    "Channel",
    "In",
    "ItemTracing",
    "Out",
    "View",
    "Watch",
    "_claim_signal",
    "_deaths_over",
    "_die_of",
    "_observe",
    "_select",
    "_set_codec",
    "_set_traced",
    "_size_of",
    "_when_finished",
]

Link, Group = missing_class("Link"), missing_class("Group")
(
    _combine,
    _plain_bytes,
    _from_plain_bytes,
    _take_up,
    _descriptor_of,
    _die_with,
    _frame_dumps,
    _dump_before_death,
) = (
    missing_function(name)
    for name in (
        "combine",
        "plain_bytes",
        "from_plain_bytes",
        "take_up",
        "descriptor_of",
        "die_with",
        "frame_dumps",
        "dump_before_death",
    )
)


class View:
    """Replaces the native view of this process's memory with a ``memoryview``."""

    @staticmethod
    def of(address: int, size: int, owner: Any) -> memoryview:
        """Return a read-only view of memory that ``owner`` keeps alive."""
        memory: Any = type("Memory", (ctypes.c_char * size,), {})
        memory = memory.from_address(address)
        memory.owner = owner
        return memoryview(memory).cast("B").toreadonly()


class Reference:
    """Does not occur, because channels between threads pass the items themselves."""

    worker = 0


def _set_codec(*functions: Any) -> None:
    """Do nothing, because channels between threads do not pickle items."""


def _set_traced(traced: type) -> None:
    """Set the class of the boxes for sampled items."""
    ItemTracing.box = traced


def _when_finished(call: Callable[[], object]) -> None:
    """Call the function now, because no item is ever unpickled."""
    call()


def _deaths_over(inputs: Any) -> int:
    """Return 0, because a thread can only die together with its process."""
    return 0


def _claim_signal(number: int) -> bool:
    """Return False, because this core cannot write stacks when a signal arrives."""
    return False


def _die_of(number: int) -> None:
    """Do nothing, because Python exits with its own exit code."""
