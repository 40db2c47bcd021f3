"""Define the code that runs in a child: the handle of its parent, and the function of its worker."""

from __future__ import annotations

import contextlib
import io
import os
import pkgutil
import weakref
from typing import Any, Protocol

from flowchan import Broken, Closed, Empty, unpack, worker
from flowchan.items.arguments import pause as checked_pause
from flowchan.items.worker_globals import shared_globals
from flowchan.pipelines.children.child_links import ChildLinks, SentOnce
from flowchan.pipelines.fill_into import fill
from flowchan.pipelines.user_calls import call
from flowchan.public import public


@public
class Parent:
    """Handle through which a child communicates with the program that started it.

    The handle is the first argument of the child's function. Elsewhere in the child, :func:`parent` returns
    the handle.

    If the program has closed the child, the methods raise ``Closed``. If the program dies, the child's
    process exits.

    Attributes:
        number: Number of the child, from 1.
        host: Name of the child's host; empty on the program's machine.
        speed: Speed of the host relative to the pool's fastest host, above 0 and at most 1.

    Example:
        >>> from flowchan.pipelines import children
        >>> with children.start(2) as kids:
        ...     kids.run(lambda parent: parent.send(parent.number))
        ...     kids.receive()
        {1: 1, 2: 2}
    """

    def __init__(self, links: ChildLinks) -> None:
        self.number, self.speed = links.number, links.speed
        self.host = worker().host
        self._links = links
        self._pid = os.getpid()
        self._unread: list[Any] = []

    def pause(self, timeout: float | None = None) -> Any:
        """Wait until the parent calls ``join``, and return the message.

        Args:
            timeout: Seconds to wait (default: no limit).

        Returns:
            The message that the parent passed to ``join``.

        Raises:
            TimeoutError: The parent did not call ``join`` in time.
            Closed: The parent has closed this child.
            Broken: The connection to the parent is lost.

        Example:
            >>> from flowchan.pipelines import children
            >>> with children.start(1) as kids:
            ...     kids.run(lambda parent: parent.send(parent.pause().upper()))
            ...     kids.join("go")
            ...     kids[1].receive()
            'GO'
        """
        checked_pause("pause", "timeout", timeout)
        try:
            number, message = self._links.joins.get(timeout)
            if isinstance(message, SentOnce):
                message = message.read()
            self._links.answers.put(number)
        except Empty:
            raise TimeoutError(f"pause: the parent did not call join within {timeout} s") from None
        except Closed:
            raise self._closed("pause") from None
        return message

    def send(self, value: Any, timeout: float | None = None) -> None:
        """Send a value to the parent.

        Args:
            value: Any value that a channel between processes accepts.
            timeout: Seconds to wait while the parent has 64 unreceived values (default: no limit).

        Raises:
            TimeoutError: The parent still had 64 unreceived values at the timeout.
            Closed: The parent has closed this child.
            Broken: The connection to the parent is lost.
            TypeError: The value cannot be serialised.

        Example:
            >>> from flowchan.pipelines import children
            >>> with children.start(1) as kids:
            ...     kids.run(lambda parent: parent.send("hello"))
            ...     kids[1].receive()
            'hello'
        """
        checked_pause("send", "timeout", timeout)
        try:
            self._links.up.put(value, timeout)
        except Closed:
            if not self._links.up.closed:  # the error came from pickling the value
                raise
            raise self._closed("send") from None

    def receive(self, timeout: float | None = None, into: Any = None) -> Any:
        """Receive the next value from the parent.

        Args:
            timeout: Seconds to wait (default: no limit).
            into: Array or tensor to fill with the value; its dtype and shape must match (default: none).

        Returns:
            The value, or ``into``.

        Raises:
            TimeoutError: No value arrived in time.
            Closed: The parent has closed this child.
            Broken: The connection to the parent is lost.
            ValueError: The value does not fit ``into``. The next ``receive`` returns this value.

        Example:
            >>> from flowchan.pipelines import children
            >>> with children.start(1) as kids:
            ...     kids.run(lambda parent: parent.send(parent.receive() + 1))
            ...     kids.send(1)
            ...     kids[1].receive()
            2
        """
        checked_pause("receive", "timeout", timeout)
        try:
            value = self._unread.pop() if self._unread else self._links.down.get(timeout)
            if isinstance(value, SentOnce):
                value = value.read()
        except Empty:
            raise TimeoutError(f"receive: the parent sent nothing within {timeout} s") from None
        except Closed:
            if not self._links.down.closed:  # the error came from unpickling the value
                raise
            raise self._closed("receive") from None
        if into is None:
            return value
        try:
            fill("receive", into, value)
        except BaseException:
            self._unread.append(value)
            raise
        return into

    def print(self, *values: object, **options: Any) -> None:
        """Print to the parent's standard output, with the child's number and host as a prefix.

        Args:
            *values: Values to print.
            **options: ``sep`` and ``end``, as for the built-in ``print``.

        Raises:
            Closed: The parent has closed this child.
            Broken: The connection to the parent is lost.

        Example:
            >>> from flowchan.pipelines import children
            >>> with children.start(1) as kids:
            ...     kids.run(lambda parent: parent.print("ready"))
            ...     results = kids.wait()
            <child 001> ready
        """
        text = io.StringIO()
        print(*values, file=text, **options)
        where = f" on {self.host}" if self.host else ""
        self._links.reports.put((self.number, f"<child {self.number:03}{where}> {text.getvalue()}"))

    def _closed(self, what: str) -> Closed:
        return Closed(f"{what}: the parent has closed child {self.number}")

    def __repr__(self) -> str:
        return f"<Parent of child {self.number}>"


@public
def parent() -> Parent | None:
    """Return the handle of this child's parent.

    Returns:
        The handle, or ``None`` if this process is not a child.

    Example:
        >>> from flowchan.pipelines import children
        >>> children.parent() is None
        True
    """
    return _parent if _parent is not None and _parent._pid == os.getpid() else None


class Closeable(Protocol):
    """Group of children that this process has started."""

    def close_all(self) -> None:
        """Shut down all children of the group."""


started: weakref.WeakSet[Closeable] = weakref.WeakSet()
"""Children that this process has started. A child closes its own children when its function finishes."""

os.register_at_fork(after_in_child=started.clear)  # a forked process does not own its parent's children

_parent: Parent | None = None


def child_main(links: ChildLinks) -> tuple[int, Any]:
    """Run the function of a child. This is the main function of the child's worker.

    If the child has already died or was closed, return without running a function, so that the stage can
    finish.
    """
    global _parent
    if links.down.closed:
        return links.number, None
    links.reports.put((links.number, os.getpid()))
    try:
        packed = links.down.get()
    except Closed:  # the child was closed before it got a function
        return links.number, None
    _parent = Parent(links)
    try:
        with shared_globals():
            program = packed.read() if isinstance(packed, SentOnce) else unpack(packed)
        function, args, kwargs = program
        if isinstance(function, str):
            function = pkgutil.resolve_name(function)
        return links.number, call(function, _parent, *args, **kwargs)
    finally:
        _parent = None
        for kids in list(started):
            kids.close_all()
        with contextlib.suppress(Closed, Broken):
            links.flush()
