"""A function of the user's own over what all members give. Rank 0 runs it and tells the others what came of
it, for one that draws random numbers, or asks for the time, gives each who runs it something else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from flowchan.collective.deadline import countdown
from flowchan.collective.operations import NAMES
from flowchan.collective.value_bytes import dumps, loads
from flowchan.items.combining import OPERATIONS
from flowchan.run.policy.failures import Portable

_GIVEN, _TOLD = 4, 8
"""Keys of its two steps, beside those of ``operations.py``."""

REPEATABLE = (*OPERATIONS.values(), min, max)
"""Python's operators that have a name: they give each member the same, so all may run them."""


def number_of_function(function: Any) -> int:
    """Its place among :data:`REPEATABLE`, by which members compare their calls; how many these are for any
    other one: each process may make those anew, so they have one number."""
    return next((number for number, one in enumerate(REPEATABLE) if function is one), len(REPEATABLE))


class RootMember(Protocol):
    """What it asks of a member of a group."""

    @property
    def rank(self) -> int: ...
    def _collect(
        self, doing: int, key: int, data: Any, root: int, timeout: float | None, x: Any, more: Any
    ) -> list[bytes]: ...
    def _tell(
        self, doing: int, key: int, data: Any, root: int, timeout: float | None, x: Any, more: Any
    ) -> bytes: ...
    def _give_up_all(self) -> None: ...


def run_once(
    group: RootMember,
    doing: int,
    mine: bytes,
    run: Callable[[list[bytes]], Any],
    timeout: float | None,
    x: Any,
    function: Any,
) -> Any:
    """What ``run`` gives of what all members have; if it raises, so do all. ``x`` and ``function``: what the
    operation was called with."""
    left, first = countdown(timeout), group.rank == 0
    found = group._collect(doing, _GIVEN, mine, 0, left(), x, function)
    result, error, told = None, None, b""
    if first:
        try:
            result = run(found)
            told = dumps((result, None))
        except Exception as raised:
            raised.add_note(f"raised at rank 0, which runs the function of {NAMES[doing]} for all")
            error = raised
            told = dumps((None, Portable(raised, "at rank 0")))
        except BaseException:  # Ctrl-C: the others wait for this member
            group._give_up_all()
            raise
    told = group._tell(doing, _TOLD, told, 0, left(), x, function)
    if not first:
        result, error = loads(told)
    if error is not None:
        raise error
    return result
