"""Handles through which the program calls one child or a group of children."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from flowchan import Graph
from flowchan.declare.placements import PlacementOption, placement_argument
from flowchan.items.arguments import callable_argument, refuses_misspelt, whole
from flowchan.pipelines.children import group_calls, parent_handle
from flowchan.pipelines.children.started_children import StartedChildren

Program = Callable[..., Any] | str


class Child:
    """Handle of one child.

    ``kids[3]`` returns the handle of child 3. A call that needs the child can raise these errors:

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
        """Process id of the child on its host; 0 if the child died or was closed before it started.

        The first access waits until the child has started.
        """
        self._state.greeted.wait()
        if not self._state.pid:  # the exit may be recorded before the first report is handled
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
        group_calls.run((self._state,), (_checked("run", function), args, kwargs), self._started.remote)

    def join(self, message: Any = "", timeout: float | None = None) -> None:
        """Wait until the child calls ``parent.pause()``, which then returns the message.

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


class Children:
    """Group of children that were started by one call to :func:`start`.

    A call to a group serves every live member before it raises an error: ``ChildDied``, ``StageError``,
    ``Closed`` or ``TimeoutError``. If several members failed, ``ChildDied`` takes precedence, and
    ``TimeoutError`` comes last. Results are keyed by the child's number.

    ``kids[3]`` is one child. ``kids[1, 2]`` and ``kids[[1, 2]]`` are groups. Iterating over a group yields a
    :class:`Child` for each member. Leaving the ``with`` block closes all members.

    Example:
        >>> from flowchan.pipelines import children
        >>> def work(parent):
        ...     while parent.pause() != "stop":
        ...         parent.send(parent.receive() * parent.number)
        >>> with children.start(3) as kids:
        ...     kids.run(work)
        ...     kids.join()
        ...     kids.send(10)
        ...     kids.receive()
        ...     kids.join("stop")
        {1: 10, 2: 20, 3: 30}
    """

    def __init__(self, started: StartedChildren, numbers: tuple[int, ...]) -> None:
        self._started, self._numbers = started, numbers
        self._states = tuple(started.states[number] for number in numbers)

    # --- members ---

    def __len__(self) -> int:
        return len(self._numbers)

    def __iter__(self) -> Iterator[Child]:
        return (Child(self._started, number) for number in self._numbers)

    def __getitem__(self, which: int | Iterable[int]) -> Any:
        if isinstance(which, numbers.Integral) and not isinstance(which, bool):
            return Child(self._started, self._member(int(which)))
        if isinstance(which, bool) or not isinstance(which, Iterable):
            raise TypeError(f"children: the number must be an int or a list of ints, got {which!r}")
        members = dict.fromkeys(map(self._member, which))
        return Children(self._started, tuple(members))

    def _member(self, number: int) -> int:
        if number not in self._numbers:
            known = ", ".join(map(str, self._numbers)) or "none"
            raise KeyError(f"children: the number must be one of {known}, got {number!r}")
        return number

    @property
    def alive(self) -> Children:
        """Return the group of the members that are still running."""
        alive = (state.number for state in self._states if not state.ended.is_set())
        return Children(self._started, tuple(alive))

    @property
    def graph(self) -> Graph:
        """Return the graph in which the children are a stage; use it to draw the children."""
        return self._started.graph

    def report(self) -> str:
        """Return a text report about the children, in the format of ``run.report()``.

        Returns:
            The report.

        Example:
            >>> from flowchan.pipelines import children
            >>> with children.start(1) as kids:
            ...     print(kids.report())
            graph 'children': running ...
        """
        return self._started.report()

    # --- calls ---

    def run(self, function: Program, /, *args: Any, **kwargs: Any) -> None:
        """Run ``function(parent, *args, **kwargs)`` in each member, and return at once.

        Args:
            function: Function, or its name as ``"module:function"``. If a host lacks the function's
                module, the function is sent by value.
            *args: Positional arguments; the members get copies.
            **kwargs: Keyword arguments.

        Raises:
            RuntimeError: A member already has a function. No member runs the new one.
            TypeError: An argument cannot be serialised.
            ChildDied: A member has died.

        Example:
            >>> from flowchan.pipelines import children
            >>> with children.start(2) as kids:
            ...     kids.run(lambda parent, base: base + parent.number, 10)
            ...     kids.wait()
            {1: 11, 2: 12}
        """
        group_calls.run(self._states, (_checked("run", function), args, kwargs), self._started.remote)

    def join(self, message: Any = "", timeout: float | None = None) -> None:
        """Wait until each member calls ``parent.pause()``, which then returns the message.

        Args:
            message: Value that ``pause`` returns in each member (default: ``""``).
            timeout: Seconds to wait for all members (default: no limit). Messages that members have not read
                by then are withdrawn.

        Raises:
            TimeoutError: A member did not call ``pause`` in time.
            ChildDied: A member has died.
            StageError: A member's function has raised an exception.
            Closed: A member has exited or was closed.
            RuntimeError: A member has no function to run.

        Example:
            >>> from flowchan.pipelines import children
            >>> with children.start(2) as kids:
            ...     kids.run(lambda parent: parent.pause())
            ...     kids.join("stop")
            ...     kids.wait()
            {1: 'stop', 2: 'stop'}
        """
        group_calls.join(self._states, message, timeout, self._started.remote)

    def send(self, value: Any, timeout: float | None = None) -> None:
        """Send one value to all members. The value is serialised only once.

        Args:
            value: Any value that a channel between processes accepts.
            timeout: Seconds to wait in total while members have 64 unreceived values (default: no limit).

        Raises:
            TimeoutError: A member still had 64 unreceived values at the timeout.
            ChildDied: A member has died.
            StageError: A member's function has raised an exception.
            Closed: A member has exited or was closed.
            RuntimeError: A member has no function to run.
            TypeError: The value cannot be serialised.

        Example:
            >>> from flowchan.pipelines import children
            >>> with children.start(2) as kids:
            ...     kids.run(lambda parent: parent.receive())
            ...     kids.send("x")
            ...     kids.wait()
            {1: 'x', 2: 'x'}
        """
        states = self._states
        group_calls.need_programs("send", states)
        once = group_calls.shared(value, states, self._started.remote)
        group_calls.send("send", ((state, once) for state in states), timeout)

    def send_each(self, values: Mapping[int, Any], timeout: float | None = None) -> None:
        """Send each member its own value.

        Args:
            values: Maps numbers of members to values.
            timeout: Seconds to wait, as for :meth:`send` (default: no limit).

        Raises:
            KeyError: A key is not the number of a member.
            TypeError: ``values`` is not a mapping, or a value cannot be serialised.
            TimeoutError: A member still had 64 unreceived values at the timeout.
            ChildDied: A member has died.
            StageError: A member's function has raised an exception.
            Closed: A member has exited or was closed.
            RuntimeError: A member has no function to run.

        Example:
            >>> from flowchan.pipelines import children
            >>> with children.start(2) as kids:
            ...     kids.run(lambda parent: parent.receive())
            ...     kids.send_each({1: "a", 2: "b"})
            ...     kids.wait()
            {1: 'a', 2: 'b'}
        """
        if not isinstance(values, Mapping):
            raise TypeError(
                "send_each: values must be a mapping from child numbers to values, got "
                f"{type(values).__name__}; use send(…) to send the same value to all children"
            )
        states = [self._started.states[self._member(number)] for number in values]
        group_calls.need_programs("send_each", states)
        group_calls.send("send_each", zip(states, values.values(), strict=True), timeout)

    def receive(self, timeout: float | None = None, into: Mapping[int, Any] | None = None) -> dict[int, Any]:
        """Receive one value from each member.

        If the call raises an exception, the next ``receive`` returns the values that had already arrived.

        Args:
            timeout: Seconds to wait for all members (default: no limit).
            into: Maps numbers of members to arrays or tensors to fill (default: none). Their dtypes and
                shapes must match the values.

        Returns:
            A dict that maps the number of each member to its value.

        Raises:
            TimeoutError: A member sent nothing in time.
            ChildDied: A member has died.
            StageError: A member's function has raised an exception.
            Closed: A member has exited or was closed.
            RuntimeError: A member has no function to run.
            ValueError: A value does not fit its array or tensor.
            KeyError: A key of ``into`` is not the number of a member.
            TypeError: ``into`` is not a mapping, or one of its values is neither an array nor a tensor.

        Example:
            >>> from flowchan.pipelines import children
            >>> with children.start(2) as kids:
            ...     kids.run(lambda parent: parent.send(parent.number))
            ...     kids.receive()
            {1: 1, 2: 2}
        """
        if into is not None and not isinstance(into, Mapping):
            raise TypeError(
                "receive: into must be a mapping from child numbers to arrays, got "
                f"{type(into).__name__}; use kids[1].receive(into=…) to fill one array"
            )
        return group_calls.receive(self._states, timeout, into or {})

    def wait(self, timeout: float | None = None) -> dict[int, Any]:
        """Wait until the functions of all members have finished, or a member has died.

        Args:
            timeout: Seconds to wait (default: no limit).

        Returns:
            A dict that maps the number of each member to the return value of its function.

        Raises:
            TimeoutError: A function did not finish in time.
            ChildDied: A member has died.
            StageError: A member's function has raised an exception.
            Closed: A member was closed.
            RuntimeError: A member has no function to run.

        Example:
            >>> from flowchan.pipelines import children
            >>> with children.start(2) as kids:
            ...     kids.run(lambda parent: parent.number)
            ...     kids.wait()
            {1: 1, 2: 2}
        """
        return group_calls.wait(self._states, timeout, self._started.print_reports)

    def close(self) -> None:
        """Shut down all members that are alive, and discard unreceived values.

        The members' calls to their parent raise ``Closed``. If a function is still running after 2 seconds,
        its process gets SIGTERM. After 2 more seconds, the process gets SIGKILL. Further calls to ``close``
        have no effect.

        Example:
            >>> from flowchan.pipelines import children
            >>> kids = children.start(2)
            >>> kids.close()
            >>> len(kids.alive)
            0
        """
        self._started.close(self._states)

    def __enter__(self) -> Children:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Children {', '.join(map(str, self._numbers))}>"


def _checked(call: str, function: Program) -> Program:
    return function if isinstance(function, str) else callable_argument(call, "function", function)


@refuses_misspelt("children.start")
def start(n: int, *, on: PlacementOption = "process") -> Children:
    """Start ``n`` child processes, which wait for the function that :meth:`Children.run` sends.

    On a pool, the hosts take turns: each host gets one child per turn until it has one child per core.

    Args:
        n: Number of children, at least 1.
        on: ``"process"`` (default), or a pool from ``flowchan.hosts``.

    Returns:
        The group of all children.

    Raises:
        TypeError: ``n`` is not an int, or ``on`` is not a placement.
        ValueError: ``n`` is less than 1, or ``on`` is ``"thread"``.
        HostError: A host of the pool cannot be used.

    Example:
        >>> from flowchan.pipelines import children
        >>> def double(parent, number):
        ...     return number * 2
        >>> with children.start(2) as kids:
        ...     kids.run(double, 21)
        ...     kids.wait()
        {1: 42, 2: 42}
    """
    whole("children.start", "n", n, 1)
    placement = placement_argument("children.start", on)
    if not placement.own_process:
        raise ValueError(
            'children.start: on must be "process" or a pool from flowchan.hosts, got "thread"; a thread '
            "cannot be killed"
        )
    started = StartedChildren(n, placement)
    parent_handle.started.add(started)
    return Children(started, tuple(started.states))
