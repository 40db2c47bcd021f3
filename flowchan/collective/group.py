"""Implement one member of a group: its messages, the groups split from it, and how it leaves.

The collective operations are in ``collectives.py``.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar

from flowchan.collective.call_arguments import received
from flowchan.collective.collectives import Collectives
from flowchan.collective.deadline import countdown
from flowchan.collective.exchange import ConnectionStats
from flowchan.collective.point_to_point import Messages
from flowchan.collective.value_bytes import loads
from flowchan.errors import MemberDied


class Group(Collectives):
    """Member of a group of processes or threads, created by :func:`group` or :func:`members`.

    All members call the same operations in the same order. An operation returns when this member's part is
    done. As a context manager, the member closes at the end of the ``with`` block.

    Attributes:
        rank: Rank of this member, counting from 0.
        size: Number of members.
        local_rank: Index of this member among those on its host (counting from 0), for example to choose a
            device.
        local_size: Number of members on the host of this member.
        name: Name of the group, for messages; may be empty.
        leaders: On rank 0 of a group made by :meth:`split`, the group of the first members of all new groups;
            otherwise None.

    Raises:
        MemberDied: A member died before it completed its part. On one host, either all survivors raise this
            error, or none does. The group is unusable afterwards.
        MemberLeft: A member that the call needs has closed the group. The group is unusable afterwards.
        Mismatch: The members made different calls. The group stays usable.
        TimeoutError: The call took longer than its ``timeout`` (seconds; None by default, which means no
            limit). The group is unusable afterwards.
        GroupError: This member was closed, or belongs to another process.

    Example:
        >>> from concurrent.futures import ThreadPoolExecutor
        >>> from flowchan.collective import members
        >>> def work(g):
        ...     with g:
        ...         return g.allreduce(g.rank + 1)
        >>> with ThreadPoolExecutor(3) as threads:
        ...     list(threads.map(work, members(3)))
        [6, 6, 6]
    """

    name: str
    leaders: Group | None = None
    """On rank 0 of a group made by ``split``, the group of the first members of all new groups, in rank
    order; otherwise None. Closing this member also closes its member of that group."""

    def _begin(self, name: str) -> None:
        self.name = name
        self._failure: BaseException | None = None
        self._later = None
        self._begin_algorithms()

    @property
    def local_rank(self) -> int:
        """Return the index of this member among those on its host, counting from 0."""
        return self.rank

    @property
    def local_size(self) -> int:
        """Return the number of members on the host of this member."""
        return self.size

    _loads = staticmethod(loads)

    _make_all: ClassVar[Callable[[int, str], Sequence[Group]]]
    """Create all members of a new group for threads or processes. Graphs call this function for gangs."""

    _membership: ClassVar[Callable[..., Any]]
    """Create one membership in a new group across hosts. Graphs call this function for gangs."""

    if TYPE_CHECKING:  # methods and attributes that SharedGroup and LinkedGroup define
        _messages: Messages

        def close(self) -> None:
            """Leave the group. Later operations of other members raise ``MemberLeft``."""

        def _shrunk(self, name: str, give_up: float) -> Group: ...
        def _part(self, key: Any, name: str, timeout: float | None) -> Group | None: ...
        def _reached_at(self) -> str: ...
        def _has_lost_any(self) -> bool: ...
        def _cut_off(self, call: str) -> None: ...
        def _take_slot(self) -> None: ...
        def _abandon(self) -> None: ...
        def _disbanding(self) -> Callable[[], None]: ...

    # --- messages between two members ---

    def send(self, x: Any, to: int, *, timeout: float | None = None) -> None:
        """Send a value to one member without waiting for its receipt.

        The call blocks only while the receiver has 64 unread messages, or while its unread messages fill half
        of the machine's memory.

        Args:
            x: Any value.
            to: Rank of another member.
            timeout: Seconds to wait; None means no limit.

        Raises:
            MemberDied: The receiver is gone. The error is :class:`MemberLeft` if the receiver closed the
                group.
            TimeoutError: The receiver still had too many unread messages after ``timeout`` seconds.

        Example:
            >>> from concurrent.futures import ThreadPoolExecutor
            >>> from flowchan.collective import members
            >>> def work(g):
            ...     with g:
            ...         if g.rank == 0:
            ...             g.send("hello", to=1)
            ...         else:
            ...             return g.receive(0)
            >>> with ThreadPoolExecutor(2) as threads:
            ...     list(threads.map(work, members(2)))
            [None, 'hello']
        """
        self._check_other("send", "to", to)
        self._take_slot()
        self._messages.send(x, to, timeout)

    def receive(
        self, source: int, *, out: Any = None, timeout: float | None = None, wait: bool = True
    ) -> Any:
        """Receive the next value that another member sent to this one.

        If Ctrl-C interrupts the call, the value is not lost: the next call returns it.

        Args:
            source: Rank of another member.
            out: Array with the same type and number of elements, to fill and return.
            timeout: Seconds to wait; None means no limit.
            wait: If False, return a :class:`Handle` at once. The handle receives only while its ``wait`` or
                ``done`` runs. Receives from the same member stay in order.

        Returns:
            ``out`` if given, otherwise the value; a :class:`Handle` with ``wait=False``.

        Raises:
            MemberDied: The sender is gone, and all its messages have been received. The error is
                :class:`MemberLeft` if the sender closed the group.
            Mismatch: The value does not fit into ``out``.
            TimeoutError: No message arrived in time.
            ValueError: ``timeout`` is given with ``wait=False``.

        Example:
            >>> from concurrent.futures import ThreadPoolExecutor
            >>> import numpy
            >>> from flowchan.collective import members
            >>> def work(g):
            ...     with g:
            ...         if g.rank == 0:
            ...             g.send(numpy.ones(2), to=1)
            ...         else:
            ...             return g.receive(0, out=numpy.zeros(2)).tolist()
            >>> with ThreadPoolExecutor(2) as threads:
            ...     list(threads.map(work, members(2)))
            [None, [1.0, 1.0]]
        """
        self._check_receive(source, out)
        self._take_slot()
        rank = self.rank  # a local variable, so that a handle does not keep this member alive

        def use(x: Any) -> Any:
            return received(x, source, out, rank)

        if not wait:
            if timeout is not None:
                raise ValueError(
                    f"receive: timeout must be None with wait=False, got {timeout}; pass it to handle.wait()"
                )
            return self._messages.start(source, use)
        # Return the result directly: the message would be lost if Ctrl-C came between two statements.
        return self._messages.receive(source, timeout, use)

    def receive_any(self, *, timeout: float | None = None) -> tuple[Any, int]:
        """Receive the next value that any other member sent to this one.

        If Ctrl-C interrupts the call, the value is not lost: a later call returns it.

        Args:
            timeout: Seconds to wait; None means no limit.

        Returns:
            The value and the rank of its sender.

        Raises:
            MemberDied: All messages that arrived have been received, and a member died. A remote member that
                ended before this member first connected to it counts as having left.
            MemberLeft: All messages that arrived have been received, and all other members left.
            GroupError: A receive with ``wait=False`` is in progress.
            TimeoutError: No message arrived in time.
            ValueError: The group has no other member.

        Example:
            >>> from concurrent.futures import ThreadPoolExecutor
            >>> from flowchan.collective import members
            >>> def work(g):
            ...     with g:
            ...         if g.rank:
            ...             g.send(f"from {g.rank}", to=0)
            ...         else:
            ...             return sorted(g.receive_any() for _ in range(2))
            >>> with ThreadPoolExecutor(3) as threads:
            ...     next(threads.map(work, members(3)))
            [('from 1', 1), ('from 2', 2)]
        """
        self._take_slot()
        if self.size == 1:
            raise ValueError("receive_any: the group must have another member, got a group of 1")
        return self._messages.receive_any(timeout)

    def sendreceive(self, x: Any, *, to: int, source: int, timeout: float | None = None) -> Any:
        """Send a value to one member and receive one from the same or another member.

        Args:
            x: Any value.
            to: Rank of the receiver.
            source: Rank of the sender. If both ``to`` and ``source`` are this member, ``x`` is returned.
            timeout: Seconds for the whole call; None means no limit.

        Returns:
            The value from ``source``.

        Raises:
            MemberDied: A member is gone, as for :meth:`send` and :meth:`receive`.
            TimeoutError: The call took longer than ``timeout`` seconds.

        Example:
            >>> from concurrent.futures import ThreadPoolExecutor
            >>> from flowchan.collective import members
            >>> def shift(g):
            ...     with g:
            ...         return g.sendreceive(g.rank, to=(g.rank + 1) % g.size, source=(g.rank - 1) % g.size)
            >>> with ThreadPoolExecutor(3) as threads:
            ...     list(threads.map(shift, members(3)))
            [2, 0, 1]
        """
        if to == self.rank == source:
            return x
        remaining = countdown(timeout)
        self.send(x, to, timeout=remaining())
        return self.receive(source, timeout=remaining())

    # --- groups within the group ---

    def split(self, key: Any, *, name: str = "", timeout: float | None = None) -> Group | None:
        """Divide the group into one new group for each key. All members must make this call.

        Args:
            key: Members with equal keys form a group, in the same order as before.
            name: Name of the new groups, for messages.
            timeout: Seconds to wait; None means no limit.

        Returns:
            This process's member of its new group, or None if ``key`` is None. On rank 0 of each new group,
            ``leaders`` is a group of the first members of all new groups.

        Raises:
            MemberDied: A member died during the call. If a survivor has already received its new group, the
                first operation of that group raises this error.
            GroupError: A member cannot connect to another host. All members raise this error, which names
                that member; they may call ``split`` again.

        Example:
            >>> from concurrent.futures import ThreadPoolExecutor
            >>> from flowchan.collective import members
            >>> def work(g):
            ...     with g, g.split(g.rank % 2) as part:
            ...         return part.allgather(g.rank)
            >>> with ThreadPoolExecutor(4) as threads:
            ...     list(threads.map(work, members(4)))
            [[0, 2], [1, 3], [0, 2], [1, 3]]
        """
        remaining = countdown(self._settle(timeout))
        part = self._part(key, name, remaining())
        leads = part is not None and part.rank == 0
        try:
            leaders = self._part(leads or None, f"leaders of {name}" if name else "leaders", remaining())
        except BaseException:
            if part is not None:
                part._abandon()
            raise
        if part is not None:
            part.leaders = leaders
        return part

    # --- failures and closing ---

    def shrink(self, *, name: str = "", timeout: float | None = None) -> Group:
        """Return a new group of the remaining members after others died or left.

        All remaining members must make this call. The members keep their order. The old group is closed, and
        members that still use it get :class:`MemberDied`. A member that dies during the call is left out.

        In a group across hosts, members reconnect at the old group's address (``at=``), and rank 0 decides
        which members remain.

        Args:
            name: Name of the new group (default: the name of this group).
            timeout: Seconds to wait; None means no limit.

        Returns:
            This process's member of the new group.

        Raises:
            GroupError: The group spans several hosts, and either rank 0 is gone or unreachable, or the group
                was created without an address.
            TimeoutError: A remaining member did not call ``shrink`` in time.

        Example:
            >>> from concurrent.futures import ThreadPoolExecutor
            >>> from flowchan import MemberDied
            >>> from flowchan.collective import members
            >>> def work(g):
            ...     if g.rank == 1:
            ...         return g.close()
            ...     try:
            ...         g.barrier()
            ...     except MemberDied:
            ...         g = g.shrink()
            ...     return g.size
            >>> with ThreadPoolExecutor(3) as threads:
            ...     list(threads.map(work, members(3)))
            [2, None, 2]
        """
        give_up = math.inf if timeout is None else time.monotonic() + timeout
        return self._shrunk(name or self.name, give_up)

    def _has_met(self, timeout: float | None) -> bool:
        """Return True when all members have joined this new group, or False if a member dies first.

        If the method returns False or raises, this member is closed.
        """
        try:
            self._wait_for_all(timeout)
            return True
        except BaseException as error:
            self.close()
            if isinstance(error, MemberDied):
                return False
            raise

    def __enter__(self) -> Group:
        self._take_slot()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._settle()
        self.close()

    def stats(self) -> dict[int, ConnectionStats]:
        """Return the traffic on each connection to another host, by the rank of that host's leader.

        Returns:
            The statistics. Only the first member on each host has connections; other members get an empty
            dictionary.

        Example:
            >>> from flowchan.collective import group
            >>> with group() as g:
            ...     g.stats()
            {}
        """
        return {}

    def __repr__(self) -> str:
        return f"<Group{f' {self.name!r}' if self.name else ''} rank {self.rank} of {self.size}>"
