"""Let a gang's worker join the gang's groups, one after another."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any, NamedTuple

from flowchan.channel.channel import Channel
from flowchan.errors import Broken, Closed, Empty, MemberDied, MemberLeft
from flowchan.run.policy.events import Event, Failure, GroupLost, WorkerId
from flowchan.run.policy.failures import Portable
from flowchan.run.worker.opening import Ports

POLL_INTERVAL_S = 0.05
"""Seconds between checks for broken channels while a worker waits for its next group."""


class Memberships(NamedTuple):
    """Memberships that a worker of a gang receives.

    Attributes:
        first: Membership in the first group; ``None`` for a worker that replaces a dead one.
        later: Channel that delivers the memberships in later groups; only elastic gangs have one.
    """

    first: Any = None
    later: Channel[Any] | None = None


NO_MEMBERSHIPS = Memberships()


class GangMembership:
    """Keeps a worker in the current group of its gang."""

    def __init__(
        self,
        worker: WorkerId,
        memberships: Memberships,
        tell: Callable[[Event], None],
        ports: Ports,
    ) -> None:
        self._worker, self._tell, self._ports = worker, tell, ports
        self._member, self._next = memberships
        self._group: Any = None

    def enter(self) -> None:
        """Join the first group."""
        if self._member is None:
            self._await_membership(None)
        self._join_group()

    def work(self, call: Callable[[Any], None]) -> None:
        """Call ``call`` with the group. Whenever a group fails, call it again with the next group."""
        while (over := self._run_in_group(call)) is not None:
            self._member._abandon()
            for reader in self._ports.inputs.values():
                reader._begin_again()
            self._await_membership(over)
            self._join_group()

    def _run_in_group(self, call: Callable[[Any], None]) -> Failure | None:
        """Call ``call`` once. Return the failure that ended the group, or ``None`` if it did not fail.

        This is a separate method so that the frame of ``call`` is released before the next group.
        """
        try:
            call(self._group)
        except MemberDied as error:
            return self._failure_of(error)
        return None

    def _join_group(self) -> None:
        """Join a group. If a member dies before all have joined, try the next group."""
        while True:
            try:
                self._group = self._member.__enter__()
                return
            except MemberDied as error:
                self._await_membership(self._failure_of(error))

    def _failure_of(self, error: MemberDied) -> Failure:
        """Return the failure to report for ``error``, or raise ``error`` if no group can follow."""
        if self._next is None:
            raise error
        return Failure(self._worker, Portable(error), None, os.getpid())

    def _await_membership(self, over: Failure | None) -> None:
        """Report that the worker's group has ended, and wait for the next membership.

        Raise :class:`Broken` if one of the worker's channels breaks first.
        """
        assert self._next is not None
        self._member = None
        self._tell(GroupLost(self._worker, over))
        while self._member is None:
            with contextlib.suppress(Empty):
                self._member = self._next.get(POLL_INTERVAL_S)
            if any(port.channel.broken for port in self._ports.everything()):
                raise Broken("the run has failed or was aborted, so the worker gets no new group")

    def close(self, ended_by: BaseException | None) -> None:
        """Leave the group, and let the other members know whether this worker failed.

        The worker leaves in an orderly way unless it has lost a member, its outputs have no readers, or one
        of its channels is broken. In these three cases, the worker abandons the group, because its agent may
        have died. The whole gang then restarts.
        """
        if self._member is None:
            return
        misses = isinstance(ended_by, MemberDied) and not isinstance(ended_by, MemberLeft)
        unread = isinstance(ended_by, Closed)
        if misses or unread or any(port.channel.broken for port in self._ports.everything()):
            self._member._abandon()
        else:
            self._member.close()
