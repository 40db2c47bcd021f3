"""Start a group of children, and call all of them at once."""

from __future__ import annotations

import numbers
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from flowchan import Graph
from flowchan.declare.placements import PlacementOption, placement_argument
from flowchan.items.arguments import refuses_misspelt, whole
from flowchan.pipelines.children import group_calls, parent_handle
from flowchan.pipelines.children.child_handle import Child
from flowchan.pipelines.children.group_calls import Program
from flowchan.pipelines.children.started_children import StartedChildren
from flowchan.public import public


@public
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
        """Return a group of the members that are still running."""
        alive = (state.number for state in self._states if not state.ended.is_set())
        return Children(self._started, tuple(alive))

    @property
    def graph(self) -> Graph:
        """Return the graph in which the children form a stage, for drawing."""
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
        group_calls.run(self._states, (function, args, kwargs), self._started.remote)

    def join(self, message: Any = "", timeout: float | None = None) -> None:
        """Pass a message to ``parent.pause()`` in each member, and wait until all members have received it.

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
            into: Maps numbers of members to arrays or tensors to fill (default: none). The dtypes and shapes
                must match the values.

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


@public
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
