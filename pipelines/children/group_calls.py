"""Call several children at once.

A call serves every live child before it raises an error. If several children failed, the call raises the
error of the first dead child or, if no child died, the first error. The other errors are attached as notes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pickle import PickleBuffer
from typing import Any

from flowchan import ChildDied, Closed, Empty, Full, pack
from flowchan.items.arguments import callable_argument
from flowchan.items.arguments import pause as checked_pause
from flowchan.items.codec import Opening
from flowchan.pipelines.children.child_links import SentOnce
from flowchan.pipelines.children.child_state import ChildState
from flowchan.pipelines.children.code_for_hosts import CodeForHosts
from flowchan.pipelines.fill_into import fill
from flowchan.remote.joining import sealed_once

States = Sequence[ChildState]
Program = Callable[..., Any] | str

_LARGE = 1 << 20
"""Minimum size in bytes of a value that all children on this machine read from the same memory."""
_SMALL = (str, int, float, bool, type(None))
"""Types that a channel encodes without pickle."""


class _Misses:
    """Children on which a call has failed or was late, and the reasons."""

    def __init__(self, call: str, timeout: float | None) -> None:
        self._call, self._timeout = call, timeout
        self._late: list[int] = []
        self._errors: list[Exception] = []

    def late(self, child: ChildState) -> None:
        self._late.append(child.number)

    def gone(self, child: ChildState) -> None:
        self._errors.append(child.gone(self._call))

    def add(self, error: Exception | None) -> None:
        if error is not None:
            self._errors.append(error)

    def check(self) -> None:
        """Raise the first error, or raise ``TimeoutError`` if some children were late and none failed."""
        if self._errors:
            self._errors.sort(key=lambda error: not isinstance(error, ChildDied))
            first, *others = self._errors
            for other in others:
                first.add_note(f"also: {other}")
            self._errors.clear()
            try:
                raise first
            finally:
                del first  # break the cycle: the exception refers to this frame
        if self._late:
            which = ", ".join(map(str, self._late))
            who = f"child {which} was" if len(self._late) == 1 else f"children {which} were"
            text = f"{self._call}: {who} not ready within {self._timeout} s"
            raise TimeoutError(text)


def deadline(call: str, timeout: float | None) -> float | None:
    """Check ``timeout``, and return the deadline on the monotonic clock."""
    limit = checked_pause(call, "timeout", timeout)
    return None if limit is None else time.monotonic() + limit


def need_owner(call: str, children: States) -> None:
    """Raise ``RuntimeError`` in a forked process, because it is not notified when a child exits."""
    for child in children:
        if not child.is_ours():
            raise RuntimeError(
                f"{call}: child {child.number} must be called in the process that started it (pid "
                f"{child.owner}), got fork {os.getpid()}; start new children in the fork"
            )


def need_programs(call: str, children: States) -> None:
    """Raise ``RuntimeError`` if a child has no function to run, because the call would wait forever."""
    need_owner(call, children)
    for child in children:
        if not (child.has_program or child.closing or child.ended.is_set()):
            raise RuntimeError(f"{call}: child {child.number} has no function to run; call run() first")


def shared(value: Any, children: States, remote: bool) -> Any:
    """Serialise a value once for all children."""
    if len(children) < 2 or type(value) in _SMALL:
        return value
    return sealed_once(value) if remote else _local(pack(value))


def _local(packed: Any) -> Any:
    """Return the item that carries a value to several children on this machine."""
    once = Opening(packed)
    buffers = packed[1:] if isinstance(packed, list) else []
    if not all(isinstance(one, PickleBuffer) for one in buffers):  # each child needs a copy of a channel
        return once
    return SentOnce(once) if sum(one.raw().nbytes for one in buffers) >= _LARGE else once


def run(children: States, program: tuple[Program, tuple[Any, ...], dict[str, Any]], remote: bool) -> None:
    """Serialise a function and its arguments once, and send them to each child."""
    function: Any
    function, args, kwargs = program
    if not isinstance(function, str):
        callable_argument("run", "function", function)
    need_owner("run", children)
    for child in children:
        if child.has_program:
            raise RuntimeError(f"run: child {child.number} already has a function; start another child")
    if remote and callable(function):
        function = CodeForHosts(function)
    packed: Any = pack((function, args, kwargs))
    misses = _Misses("run", None)
    if len(children) > 1 and not remote and isinstance(once := _local(packed), SentOnce):
        packed = once
    for child in children:
        child.has_program = True
        try:
            child.put(packed, None)
        except Closed:
            misses.gone(child)
    misses.check()


def join(children: States, message: Any, timeout: float | None, remote: bool) -> None:
    """Pass the message to ``pause`` in each child. Send all messages before waiting for an answer."""
    need_programs("join", children)
    until, misses = deadline("join", timeout), _Misses("join", timeout)
    text = shared(message, children, remote)
    joined: set[ChildState] = set()
    try:
        asked = []
        for child in sorted(
            children, key=lambda child: child.number
        ):  # in a fixed order, so that two joins never block each other
            if child.begin_join(until):
                joined.add(child)
        for child in children:
            if child not in joined:
                misses.late(child)
                continue
            try:
                asked.append((child, child.ask(text)))
            except Closed:
                misses.gone(child)
        for child, number in asked:
            try:
                child.answered(number, until)
            except Empty:
                misses.late(child)
            except Closed:
                misses.gone(child)
    finally:
        for child in joined:
            child.end_join()
    misses.check()


def send(call: str, values: Iterable[tuple[ChildState, Any]], timeout: float | None) -> None:
    """Send each child its value."""
    until, misses = deadline(call, timeout), _Misses(call, timeout)
    for child, value in values:
        try:
            child.put(value, until)
        except Full:
            misses.late(child)
        except Closed:
            if not child.links.down.closed:  # the error came from pickling the value
                raise
            misses.gone(child)
    misses.check()


def receive(children: States, timeout: float | None, into: Mapping[int, Any]) -> dict[int, Any]:
    """Receive one value from each child. If this fails, the next call returns the received values."""
    need_programs("receive", children)
    numbers = [child.number for child in children]
    for number in into:
        if number not in numbers:
            known = ", ".join(map(str, numbers)) or "none"
            raise KeyError(f"receive: the keys of into must be child numbers ({known}), got {number!r}")
    until, misses = deadline("receive", timeout), _Misses("receive", timeout)
    found: list[tuple[ChildState, Any]] = []
    try:
        for child in children:
            try:
                found.append((child, child.get(until)))
            except Empty:
                misses.late(child)
            except Closed:
                if not child.links.up.closed:  # the error came from unpickling the value
                    raise
                misses.gone(child)
        misses.check()
        for child, value in found:
            if child.number in into:
                fill("receive", into[child.number], value)
    except BaseException:
        for child, value in found:
            child.give_back(value)
        raise
    return {child.number: into.get(child.number, value) for child, value in found}


def wait(children: States, timeout: float | None, ended: Callable[[], None]) -> dict[int, Any]:
    """Wait until the children have exited, and return the results of their functions.

    If a child dies, stop waiting for the others, because they may be waiting for the dead child.
    """
    need_programs("wait", children)
    until, misses = deadline("wait", timeout), _Misses("wait", timeout)
    if children:
        children[0].alive.wait_for(
            lambda: any(map(_has_died, children)) or all(child.ended.is_set() for child in children), until
        )
    for child in children:
        if child.ended.is_set():
            misses.add(child.failure("wait"))
        else:
            misses.late(child)
    ended()
    misses.check()
    return {child.number: child.value for child in children}


def _has_died(child: ChildState) -> bool:
    return child.ended.is_set() and isinstance(child.failure("wait"), ChildDied)
