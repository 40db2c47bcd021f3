"""Combine the members' values with a user's function.

Rank 0 runs the function and sends the result to all members. If every member ran it, a function that draws
random numbers or reads the clock would give different results.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from flowchan.collective.deadline import countdown
from flowchan.collective.operations import NAMES
from flowchan.collective.value_bytes import dumps, loads
from flowchan.items.combining import OPERATIONS
from flowchan.run.policy.failures import Portable

_COLLECT_KEY, _TELL_KEY = 4, 8
"""Keys of the two steps, different from those in ``operations.py``."""

REPEATABLE = (*OPERATIONS.values(), min, max)
"""Functions that give the same result on every member, so that every member may run them itself."""


def number_of_function(function: Any) -> int:
    """Return the index of ``function`` in :data:`REPEATABLE`, or the length of that tuple.

    Members compare calls by this number. All users' functions share one number, because each process may have
    another copy of a function.
    """
    return next((number for number, one in enumerate(REPEATABLE) if function is one), len(REPEATABLE))


class RootMember(Protocol):
    """Methods of a group member that ``run_once`` calls."""

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
    own: bytes,
    run: Callable[[list[bytes]], Any],
    timeout: float | None,
    x: Any,
    function: Any,
) -> Any:
    """Call ``run`` on rank 0 with the values of all members, and return its result everywhere.

    If ``run`` raises, all members raise. ``x`` and ``function`` are the arguments of the operation, for
    messages.
    """
    remaining, first = countdown(timeout), group.rank == 0
    found = group._collect(doing, _COLLECT_KEY, own, 0, remaining(), x, function)
    result, error, outcome = None, None, b""
    if first:
        try:
            result = run(found)
            outcome = dumps((result, None))
        except Exception as raised:
            raised.add_note(f"raised on rank 0, which runs the function of {NAMES[doing]} for all members")
            error = raised
            outcome = dumps((None, Portable(raised, "on rank 0")))
        except BaseException:  # for example Ctrl-C, while the other members wait for this member
            group._give_up_all()
            raise
    outcome = group._tell(doing, _TELL_KEY, outcome, 0, remaining(), x, function)
    if not first:
        result, error = loads(outcome)
    if error is not None:
        raise error
    return result
