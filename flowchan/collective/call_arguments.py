"""Check the arguments of group calls, and describe calls in messages.

An operation checks its arguments before it sends anything. An invalid argument therefore raises an error only
on the member that passed it. The other members wait until this member makes its next call.
"""

from __future__ import annotations

import itertools
import math
import numbers
from collections.abc import Sequence, Sized
from typing import Any

from flowchan.collective import array_access
from flowchan.errors import Mismatch
from flowchan.items.combining import OPERATIONS
from flowchan.items.text import shown


def called(call: str, x: Any, more: Any) -> str:
    """Describe a call, for example ``allreduce(float64[3], 'sum')``.

    ``more`` is a further argument, or a tuple of several arguments.
    """
    if isinstance(x, list):
        what = f"[{', '.join(map(array_access.described, x))}]"
    else:
        what = "" if x is None else array_access.described(x)
    given = more if isinstance(more, tuple) else () if more is None else (more,)
    return f"{call}({what}{''.join(f', {one!r}' for one in given)})"


def op_argument(call: str, op: Any) -> None:
    """Raise an error unless ``op`` is callable or the name of an operation."""
    if isinstance(op, str) and op in OPERATIONS:
        return
    if isinstance(op, str) or not callable(op):
        error = ValueError if isinstance(op, str) else TypeError
        names = ", ".join(map(repr, OPERATIONS))
        raise error(
            f"{call}: op must be one of {names} or a function that takes two arguments, got {shown(op)}"
        )


def function_argument(call: str, function: Any) -> None:
    """Raise ``TypeError`` unless ``function`` is callable."""
    if not callable(function):
        raise TypeError(f"{call}: fn must be a function that takes two arguments, got {shown(function)}")


def array_argument(call: str, argument: str, x: Any) -> None:
    """Raise ``TypeError`` unless ``x`` is an array or tensor that groups can send."""
    if not array_access.is_dense(x):
        raise TypeError(f"{call}: {argument} must be an array or a tensor, got {shown(x)}")


def parts_argument(call: str, argument: str, xs: Any, size: int) -> Sequence[Any]:
    """Return ``xs``; raise an error unless it is a list with one part for each member."""
    if not isinstance(xs, Sized) or not hasattr(xs, "__getitem__"):
        raise TypeError(
            f"{call}: {argument} must be a list with one part for each of the {size} members, got {shown(xs)}"
        )
    if len(xs) != size:
        raise ValueError(
            f"{call}: {argument} must have one part for each of the {size} members, got {len(xs)}"
        )
    parts: Sequence[Any] = xs  # type: ignore[assignment]
    return parts


def sizes_differ(call: str, sizes: dict[int, tuple[list[int], list[int]]]) -> str:
    """Describe the first pair of ranks whose sizes differ; return an empty string if all sizes are equal.

    For each rank, ``sizes`` contains two lists: how many bytes the rank sends to each rank, and how many
    bytes it expects from each rank.
    """
    for source, to in itertools.product(range(len(sizes)), repeat=2):
        given, room = sizes[source][0][to], sizes[to][1][source : source + 1]
        if room != [given]:
            return f"{call}: rank {source} sends {given} bytes to rank {to}, which expects {sum(room)}"
    return ""


def received(x: Any, source: int, out: Any, rank: int) -> Any:
    """Return the value received from ``source``, copied into ``out`` if given.

    Args:
        x: Received value.
        source: Rank of the sender.
        out: Array for the value, or None.
        rank: Rank of this member.

    Returns:
        ``out`` if given, otherwise ``x``.

    Raises:
        Mismatch: The value does not fit into ``out``.
    """
    if out is None:
        return x
    fits = (
        array_access.is_array(x)
        and array_access.kind(x)[0] == array_access.kind(out)[0]
        and x.nbytes == out.nbytes
    )
    if not fits:
        raise Mismatch(
            f"out must match the value that rank {source} sent, {array_access.described(x)}, got "
            f"{array_access.described(out)} on rank {rank}"
        )
    return array_access.fill(out, array_access.of_library(out, x).reshape(out.shape))


def seconds_argument(call: str, argument: str, value: Any) -> float:
    """Return ``value`` as a float; raise an error unless it is a finite, non-negative number."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{call}: {argument} must be a number of seconds, got {shown(value)}")
    if not 0 <= float(value) < math.inf:
        raise ValueError(f"{call}: {argument} must be a finite, non-negative number of seconds, got {value}")
    return float(value)
