"""Define the handle through which the program calls one child."""

from __future__ import annotations

from typing import Any

from flowchan.pipelines.children import group_calls
from flowchan.pipelines.children.group_calls import Program
from flowchan.pipelines.children.started_children import StartedChildren
from flowchan.public import public


@public
class Child:
    """Handle of one child.

    ``kids[3]`` returns the handle of child 3. A call that needs a running child can raise these errors:

    - ``ChildDied`` if the child has died.
    - ``StageError`` if the child's function has raised an exception, which becomes the cause.
    - ``Closed`` if the function has returned or the child was closed.

    Attributes:
        number: Number of the child, from 1.

    Example:
        >>> from flowchan.pipelines import children
        >>> with children.start(3) as kids:
        ...     kids[2].run(lambda parent: parent.number)
        ...     kids[2].wait()
        2
    """

    def __init__(self, started: StartedChildren, number: int) -> None:
        self.number = number
        self._started, self._state = started, started.states[number]

    @property
    def host(self) -> str:
        """Name of the child's host; empty on the program's machine."""
        return self._state.host

    @property
    def speed(self) -> float:
        """Speed of the host relative to the pool's fastest host: above 0, at most 1."""
        return self._state.links.speed

    @property
    def pid(self) -> int:
        """Process ID of the child on its host; 0 if the child died or was closed before it started.

        The first access waits until the child has started.
        """
        self._state.greeted.wait()
        if not self._state.pid:  # the child has exited, but its first report is not handled yet
            self._started.print_reports()
        return self._state.pid

    def run(self, function: Program, /, *args: Any, **kwargs: Any) -> None:
        """Run ``function(parent, *args, **kwargs)`` in the child, and return at once.

        Args:
            function: Function, or its name as ``"module:function"``. If a host lacks the function's
                module, the function is sent by value.
            *args: Positional arguments.
            **kwargs: Keyword arguments.

        Raises:
            RuntimeError: The child already has a function.
            TypeError: An argument cannot be serialised.
            ChildDied: The child has died.

        Example:
            >>> from flowchan.pipelines import children
            >>> with children.start(1) as kids:
            ...     kids[1].run("builtins:repr")
            ...     kids[1].wait()
            '<Parent of child 1>'
        """
        group_calls.run((self._state,), (function, args, kwargs), self._started.remote)

    def join(self, message: Any = "", timeout: float | None = None) -> None:
        """Pass a message to ``parent.pause()`` in the child, and wait until the child has received it.

        Args:
            message: Value that ``pause`` returns (default: ``""``).
            timeout: Seconds to wait (default: no limit). If the child has not read the message by then,
                ``join`` withdraws it.

        Raises:
            TimeoutError: The child did not call ``pause`` in time.
            ChildDied: The child has died.
            StageError: The child's function has raised an exception.
            Closed: The child has exited or was closed.
            RuntimeError: The child has no function to run.

        Example:
            >>> from flowchan.pipelines import children
            >>> with children.start(1) as kids:
            ...     kids.run(lambda parent: parent.pause())
            ...     kids[1].join("stop")
            ...     kids[1].wait()
            'stop'
        """
        group_calls.join((self._state,), message, timeout, self._started.remote)

    def send(self, value: Any, timeout: float | None = None) -> None:
        """Send a value to the child.

        Args:
            value: Any value that a channel between processes accepts.
            timeout: Seconds to wait while the child has 64 unreceived values (default: no limit).

        Raises:
            TimeoutError: The child still had 64 unreceived values at the timeout.
            ChildDied: The child has died.
            StageError: The child's function has raised an exception.
            Closed: The child has exited or was closed.
            RuntimeError: The child has no function to run.
            TypeError: The value cannot be serialised.

        Example:
            >>> from flowchan.pipelines import children
            >>> with children.start(1) as kids:
            ...     kids.run(lambda parent: parent.receive() + 1)
            ...     kids[1].send(1)
            ...     kids[1].wait()
            2
        """
        group_calls.need_programs("send", (self._state,))
        group_calls.send("send", [(self._state, value)], timeout)

    def receive(self, timeout: float | None = None, into: Any = None) -> Any:
        """Receive the next value from the child.

        Values that the child sent before it exited can still be received.

        Args:
            timeout: Seconds to wait (default: no limit).
            into: Array or tensor to fill with the value; its dtype and shape must match (default: none).

        Returns:
            The value, or ``into``.

        Raises:
            TimeoutError: No value arrived in time.
            ChildDied: The child has died.
            StageError: The child's function has raised an exception.
            Closed: The child has exited or was closed.
            RuntimeError: The child has no function to run.
            ValueError: The value does not fit ``into``. The next ``receive`` returns this value.

        Example:
            >>> import numpy
            >>> from flowchan.pipelines import children
            >>> with children.start(1) as kids:
            ...     kids.run(lambda parent: parent.send(numpy.ones(2)))
            ...     kids[1].receive(into=numpy.zeros(2))
            array([1., 1.])
        """
        filled = {} if into is None else {self.number: into}
        return group_calls.receive((self._state,), timeout, filled)[self.number]

    def wait(self, timeout: float | None = None) -> Any:
        """Wait until the child's function has finished.

        Args:
            timeout: Seconds to wait (default: no limit).

        Returns:
            The return value of the function.

        Raises:
            TimeoutError: The function did not finish in time.
            ChildDied: The child has died.
            StageError: The function has raised an exception.
            Closed: The child was closed.
            RuntimeError: The child has no function to run.

        Example:
            >>> from flowchan.pipelines import children
            >>> with children.start(1) as kids:
            ...     kids.run(lambda parent: "done")
            ...     kids[1].wait()
            'done'
        """
        return group_calls.wait((self._state,), timeout, self._started.print_reports)[self.number]

    def close(self) -> None:
        """Shut down the child if it is alive, and discard unreceived values.

        The child's calls to its parent raise ``Closed``. If the child's function is still running after
        2 seconds, the process gets SIGTERM. After 2 more seconds, the process gets SIGKILL. Further calls to
        ``close`` have no effect.

        Example:
            >>> from flowchan.pipelines import children
            >>> with children.start(2) as kids:
            ...     kids[1].close()
            ...     [kid.number for kid in kids.alive]
            [2]
        """
        self._started.close([self._state])

    def __repr__(self) -> str:
        return f"<Child {self.number}{' on ' + self.host if self.host else ''}>"
