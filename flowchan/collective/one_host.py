"""Implement a group whose members are on one host and share memory.

The core runs the rounds and the operations on contiguous arrays in that memory (``_core/group*.cpp``). This
module adds messages, splitting, shrinking and error messages.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from flowchan import _core
from flowchan.collective import array_access
from flowchan.collective.algorithms import number_of, wrong_device_message
from flowchan.collective.call_arguments import called
from flowchan.collective.deadline import countdown
from flowchan.collective.group import Group
from flowchan.collective.operations import ALLTOALL, COMBINING, MOVING, NAMES, REDUCE_SCATTER, TELL
from flowchan.collective.point_to_point import LocalPeers, Messages
from flowchan.collective.shrink import Shrinking
from flowchan.collective.value_bytes import dumps, loads
from flowchan.errors import GroupError, MemberDied, MemberLeft, Mismatch
from flowchan.transport.descriptors import Borrowed, Inherited, Sent, hand_over, now, take_over

MEMBER_LOST, MISMATCH, NO_MEMORY, TIMED_OUT, _INTERRUPTED, CLOSED, TAKEN, WITHIN, BUSY = range(1, 10)
"""Status codes with which the core reports how an operation ended."""

PRESENT, LEFT, _GAVE_UP = range(3)

Gather = Callable[[Any], list[Any]]
"""Function that sends a JSON value to all members, and returns all members' values in rank order."""

_HOW = {
    "exchange": "each member reads the inputs of the others",
    "slices": "each member combines a part of each chunk and reads the other parts",
    "chunks": "the members read one chunk at a time from the memory of the member that wrote it",
    "direct": "each member reads directly from the memory of the others",
}
_OF_PARTS = "each member combines its own part of all inputs"
_OF_VALUES = {
    "barrier": "each member waits for all others; no data is moved",
    "broadcast": "the root serializes its value, and each member reads the bytes",
    "reduce": "the members serialize their values, and the root reads them",
    "gather": "the members serialize their values, and the root reads them",
    "scatter": "the root serializes the values, and each member reads its own",
    "alltoall": "the members serialize their values, and each reads those for it",
    "reduce_scatter": "only arrays and tensors are allowed",
    "allreduce_with": "the members serialize their values, and each reads those of the others; with your "
    "own function, rank 0 combines them and sends the result",
}
_OF_ANY_VALUE = "the members serialize their values, and each reads those of the others"
_ALGORITHMS = ("", *_HOW)
"""Names of the algorithms, in the order of the core's numbers."""


def _plan(algorithm: int, piece: int, shows_past: bool, keeps_past: bool, by_two: bool) -> str:
    """Describe a plan that the core chose."""
    if _ALGORITHMS[algorithm] == "direct":
        return "direct" + " with two threads" * by_two
    past = " sent past the caches" * shows_past + " received past the caches" * keeps_past
    return f"{_ALGORITHMS[algorithm]} of {piece >> 10} KB{past}"


log = logging.getLogger("flowchan.collective")


_unused: weakref.WeakSet[SharedGroup] = weakref.WeakSet()
"""Members that this process created for threads or other processes but that have not joined yet."""


class SharedGroup(_core.Group, Group):
    """Member of a group on one host.

    ``_ranks`` lists the ranks to show in messages. If this group is a node of a larger group, these ranks
    differ from the core's ranks.
    """

    def __init__(self, fd: int, rank: int, name: str = "") -> None:
        super().__init__(fd, rank)
        self._begin(name)
        self._local = LocalPeers(self)
        self._messages = Messages(rank, self.size, self._local.peer)
        self._maker: int | None = None
        self._family = 0
        self._ranks: Sequence[int] = range(self.size)
        self._chosen: dict[int, str | None] = {}
        self._original_call: tuple[Any, Any] | None = None
        """Arguments of a call across hosts, while this group runs one step of that call with other
        arguments."""

    _remedy_in_a_stage = (
        "send each worker its member as an item, as in graph.source(members(n)).map(…), or declare a gang"
    )
    """Remedy to show when a stage's function or arguments contain a member."""

    # --- groups split off from this one, and the group of the survivors ---

    def _shrunk(self, name: str, give_up: float) -> SharedGroup:
        def member(fd: int, rank: int) -> SharedGroup:
            return SharedGroup(fd, rank, name)

        return Shrinking[SharedGroup](self, member, give_up).run()

    def _part(self, key: Any, name: str, timeout: float | None) -> SharedGroup | None:
        remaining = countdown(timeout)

        def gather(value: Any) -> list[Any]:
            return self._gathered(value, remaining())

        members = [rank for rank, other in enumerate(gather(key)) if other == key and key is not None]
        return share(gather, self.rank, members, name)

    # --- joining, leaving, and sending a member to another process ---

    def close(self) -> None:
        """Leave the group. Members may close in any order, and closing again has no effect.

        Later calls of other members raise :class:`MemberLeft`. If this member was sent to another process,
        only the copy here is closed.
        """
        if not self._joined:
            self._let_go()
        self._leave()
        if self.leaders is not None:
            self.leaders.close()
        if self._later is not None:
            self._later.close()
            self._later = None
        self._local.close()
        self._close_backends()

    def _abandon(self) -> None:
        """Leave the group after a failure; later calls of other members raise :class:`MemberDied`."""
        self._take_slot()
        self._give_up()
        self._local.close(wait=False)
        self.close()

    def _overseer(self) -> Overseer:
        """Return an overseer for the process that creates this member and sends it to another process."""
        return Overseer(os.open(f"/proc/self/fd/{self._fd}", os.O_RDWR | os.O_CLOEXEC))

    def _disbanding(self) -> Callable[[], None]:
        """Return a function with which one thread can end the group while another thread uses the group.

        Calls in that thread then raise :class:`MemberDied`.
        """
        return self._overseer().disband

    def _explain(self, operation: str, x: Any) -> str:
        number = number_of("explain", operation)
        size = array_access.size_of(x)
        if size is None or operation not in (*COMBINING, *MOVING, NAMES[REDUCE_SCATTER]):
            how = _OF_VALUES.get(operation, _OF_ANY_VALUE)
        elif not array_access.is_here(x):
            how = wrong_device_message(operation, x)
        else:
            size //= self.size if number in (REDUCE_SCATTER, ALLTOALL) else 1
            plan = self._plan(number, size)
            algorithm = _ALGORITHMS[plan[0]]
            took = {_plan(*one): f"{round(ns / 1000)} µs" for one, ns in self._took(number, size)}
            how = f"{_plan(*plan) if took else algorithm}: "
            how += _OF_PARTS if number == REDUCE_SCATTER else _HOW[algorithm]
            if took:
                how += ", as measured: " + ", ".join(map(" ".join, took.items()))
        members = "1 member" if self.size == 1 else f"{self.size} members"
        return f"{operation}: {how}; shared memory, {members} on this host"

    def _set_algorithm(self, doing: int, name: str | None) -> None:
        self._choose(doing, 0 if name is None else _ALGORITHMS.index(name))
        self._chosen[doing] = name

    def __reduce__(self) -> tuple[Any, ...]:
        if self._joined or self._broken:
            raise TypeError(
                f"{self!r} is in use by process {os.getpid()}; send a member to another process before its "
                "first use"
            )
        if now.for_several:
            raise TypeError(
                f"{self!r} is a single member, but the function that contains it goes to several workers"
            )
        return _arrive, (hand_over(self._fd, -1, self), self.rank, self.name)

    # --- methods that the core calls ---

    def _failed(self, end: int, doing: int, x: Any, more: Any) -> NoReturn:
        """Raise the exception that matches an operation's status."""
        call = NAMES[doing]
        if end == MISMATCH:
            x, more = self._original_call or (x, more)
            chosen = self._chosen.get(doing) or self._chosen_backends.get(doing)
            own = dumps(called(call, x, more) + (f" with {chosen}" if chosen else ""))
            descriptions = [loads(b) for b in self._exchange(TELL, 0, own, -1, None, None, None)]
            calls = "; ".join(
                f"rank {rank} called {text}" for rank, text in zip(self._ranks, descriptions, strict=True)
            )
            raise Mismatch(f"members of {self._title()} made calls that do not match: {calls}")
        if end == NO_MEMORY:
            raise MemoryError(
                f"{call} of {self._title()} failed: the system granted no more shared memory; "
                "free some memory"
            )
        if end == TAKEN:
            raise GroupError(f"{self!r} is already used by another process; give each process its own member")
        if end == CLOSED:
            raise GroupError(f"{self!r} was closed; create a new group")
        if end == WITHIN:
            raise GroupError(
                f"{call} was called by a signal handler during another operation of {self!r}; set a flag in "
                f"the handler, and call {call} later"
            )
        if end == BUSY:
            raise TimeoutError(
                f"{call} of {self._title()} timed out before it began: another thread was running an "
                "operation"
            )
        if self._failure is None:
            self._failure = self._late(call) if end == TIMED_OUT else self._death(call)
            raise self._failure
        raise self._failed_before(call) from self._failure

    def _stalled(self, doing: int, seconds: float) -> None:
        """Log a warning that names the members for which an operation has been waiting."""
        log.warning(
            "%s of %s has been waiting %.0f s for these members: %s",
            NAMES[doing],
            self._title(),
            seconds,
            self._absent(),
        )

    def _take_slot(self) -> None:
        if self._joined:
            return
        if self._join():
            raise GroupError(f"{self!r} is already used by another process; give each process its own member")
        # A forked process has also inherited the descriptors of other members. Replace each of them with a
        # duplicate of this member's descriptor.
        if self._maker not in (None, os.getpid()):
            for other in list(_unused):
                if other is not self and other._family == self._family and not other._joined:
                    os.dup2(self._fd, other._fd, inheritable=False)

    def _hold_slot(self) -> None:
        """Lock this member's descriptor until a process joins as this member.

        The lock shows the other members that a process can still join as this member.
        """
        self._maker, self._family = os.getpid(), os.fstat(self._fd).st_ino
        _unused.add(self)
        if self._let_go():
            self._hold()

    def _let_go(self) -> bool:
        """Replace this member's descriptor with an unlocked one. Return False if the system refuses.

        The locked descriptor is never mapped, because a memory mapping would keep the lock.
        """
        try:
            other = os.open(f"/proc/self/fd/{self._fd}", os.O_RDWR)
        except OSError:
            return False
        os.dup2(other, self._fd, inheritable=False)
        os.close(other)
        return True

    def _absent(self) -> str:
        """Describe the members that the current operation waits for, and what they did last."""
        return "; ".join(
            f"rank {self._ranks[rank]} {_state(*self._see(rank)[:6])}"
            for rank in range(self.size)
            if rank != self.rank and not self._see(rank)[6]
        )

    # --- methods that torch backends call during an operation ---

    def _reached_at(self) -> str:
        return "127.0.0.1"

    def _has_lost_any(self) -> bool:
        """Return whether the group has lost a member that has not completed the current operation.

        A member that has completed the operation is already in a later round.
        """
        begun = self._see(self.rank)[2]
        states = (self._see(rank) for rank in range(self.size) if rank != self.rank)
        return any(state[2] <= begun and (state[1] != PRESENT or not state[5]) for state in states)

    def _cut_off(self, call: str) -> None:
        pass  # nothing to do: the next round detects the lost member

    def _give_up_all(self) -> None:
        self._give_up()

    def _late(self, call: str) -> TimeoutError:
        return TimeoutError(f"{call} of {self._title()} timed out: {self._absent()}")

    def _death(self, call: str) -> MemberDied:
        seen = {rank: self._see(rank) for rank in range(self.size) if rank != self.rank}
        if self._disbanded:
            died = [rank for rank, s in seen.items() if s[1] != LEFT and not s[5]]
            states_text = "".join(f"; rank {self._ranks[rank]} {_state(*seen[rank][:6])}" for rank in died)
            return MemberDied(
                f"{call} of {self._title()} failed: the group has ended, because a member on another host "
                f"died or the gang is forming a new group{states_text}",
                tuple(self._ranks[rank] for rank in died),
                call,
            )
        if self._gave_up_alone(seen):
            return MemberDied(f"{self!r} gave up during an operation", (self._ranks[self.rank],), call)
        lost = {rank: s for rank, s in seen.items() if not s[6] and (s[1] != PRESENT or not s[5])}
        kind = MemberLeft if lost and all(s[1] == LEFT for s in lost.values()) else MemberDied
        states_text = "; ".join(f"rank {self._ranks[rank]} {_state(*s[:6])}" for rank, s in lost.items())
        return kind(
            f"{call} of {self._title()} failed: {states_text}",
            tuple(self._ranks[rank] for rank in lost),
            call,
        )

    @staticmethod
    def _gave_up_alone(seen: dict[int, Any]) -> bool:
        return all(s[6] or (s[1] == PRESENT and s[5]) for s in seen.values())


class Overseer:
    """Controls a group from a process that is not a member.

    ``fd`` is a separate descriptor of the group's memory, so it holds none of the members' locks.
    """

    def __init__(self, fd: int) -> None:
        self._group = _core.Group(fd, 0)

    def count_out(self, rank: int) -> None:
        """Tell the group that a member's process has ended.

        If the member never joined, the other members stop waiting for it.
        """
        self._group._count_out(rank)

    def disband(self) -> None:
        """End the group: later calls of its members raise :class:`MemberDied`."""
        self._group._disband()


def _state(pid: int, status: int, operation: int, doing: int, inside: bool, alive: bool) -> str:
    last = f"{NAMES[doing]} (operation {operation})" if doing < len(NAMES) and operation else "no operation"
    if not pid:
        return "has not joined" if alive else "ended before it joined"
    if status == LEFT:
        return f"(process {pid}) has left after {last}"
    if status != PRESENT:
        return f"(process {pid}) gave up in {last}"
    if not alive:
        return f"(process {pid}) died {'in' if inside else 'after'} {last}"
    return f"(process {pid}) {'is in' if inside else 'is between operations, after'} {last}"


def _arrive(handle: Inherited | Sent | Borrowed, rank: int, name: str) -> SharedGroup:
    fd, _ = take_over(handle)
    member = SharedGroup(fd, rank, name)
    member._take_slot()
    return member


def share(gather: Gather, rank: int, members: Sequence[int], name: str) -> SharedGroup | None:
    """Form a group of ``members`` in shared memory.

    All processes that ``gather`` connects must call this function.

    Args:
        gather: Exchanges a value with all these processes.
        rank: Rank of this process.
        members: Ranks of the members.
        name: Name of the group in messages.

    Returns:
        This process's member, or None if ``members`` is empty.

    Raises:
        GroupError: A process cannot create or open the memory. All processes raise this error.
    """
    member, place, error = None, None, ""
    try:
        try:
            if rank in members[:1]:
                member = SharedGroup(_core.Group._make(len(members)), 0, name)
                place = os.getpid(), member._fd, os.fstat(member._fd).st_ino
        except OSError as failed:
            error = f"rank {rank} cannot create the group's shared memory: {failed}"
        places = gather(place)
        try:
            if members and member is None and places[members[0]] is not None:
                pid, fd, inode = places[members[0]]
                opened, _ = take_over(Borrowed(pid, fd, -1, inode))
                member = SharedGroup(opened, members.index(rank), name)
        except OSError as failed:
            error = f"rank {rank} cannot open the shared memory that rank {members[0]} created: {failed}"
        if member is not None:
            # Take the slot before the last gather. From then on, the other members notice when this process
            # ends.
            member._take_slot()
        if errors := [text for text in gather(error) if text]:
            raise GroupError("; ".join(errors))
    except BaseException:
        if member is not None:
            member._abandon()
        raise
    return member


def make_all(size: int, name: str) -> list[Group]:
    """Create all members of a new group."""
    made = _core.Group._make(size)
    try:
        members = [SharedGroup(os.dup(made), rank, name) for rank in range(size)]
    finally:
        os.close(made)
    for member in members:
        member._hold_slot()
    return [*members]


Group._make_all = staticmethod(make_all)
