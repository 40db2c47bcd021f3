"""Listen in the driver for agents, and for the workers of groups.

The workers of a group exchange their addresses through the driver, and then connect to each other.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
from collections.abc import Callable
from queue import SimpleQueue

from flowchan.transport.authentication import Hello
from flowchan.transport.listener import AuthenticatedListener
from flowchan.transport.rendezvous import Coordinator

CLOSE = 0
POLL_INTERVAL_MS = 1000  # milliseconds between checks for connections that stay silent


class DriverListener:
    """Accepts connections from agents and from the workers of groups.

    Args:
        listener: Listener that authenticates connections.
        name: Name of the thread.
        within: Runs the thread's function, and handles its exceptions.
        agent: Receives each agent's connection.
    """

    def __init__(
        self,
        listener: AuthenticatedListener,
        name: str,
        within: Callable[[Callable[[], None]], None],
        agent: Callable[[socket.socket, Hello], None],
    ) -> None:
        self.address = listener.address
        self._listener, self._agent = listener, agent
        self._meetings: dict[int, Coordinator] = {}
        self._groups = CLOSE
        # Groups to end. If the flag is true, end the group only if its rendezvous is incomplete.
        self._orders: SimpleQueue[tuple[int, bool]] = SimpleQueue()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=within, args=(self._run,), name=name, daemon=True)
        self._thread.start()

    def expect(self, size: int) -> int:
        """Expect a group of ``size`` workers, and return its number."""
        self._groups += 1
        self._meetings[self._groups] = Coordinator(size)
        return self._groups

    def dismiss(self, group: int, if_meeting: bool = False) -> None:
        """End a group that has lost a worker, because the other members would wait for that worker forever.

        With ``if_meeting``, keep the group if its rendezvous is complete.
        """
        self._orders.put((group, if_meeting))
        os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """End the thread and close all connections."""
        self.dismiss(CLOSE)
        self._thread.join()
        self._listener.close()
        os.close(self._wake)

    def _run(self) -> None:
        try:
            while True:
                members = {
                    sock.fileno(): (meeting, rank)
                    for meeting in list(self._meetings.values())
                    for rank, sock in meeting.sockets.items()
                }
                waiting = select.poll()
                for fd in (self._wake, self._listener.fileno(), *members):
                    waiting.register(fd, select.POLLIN)
                for fd, _ in waiting.poll(POLL_INTERVAL_MS):
                    if fd in members:
                        meeting, rank = members[fd]
                        meeting.receive(rank)
                if not self._obey():
                    return
                with contextlib.suppress(TimeoutError):
                    while True:
                        self._let_in(*self._listener.accept(0))
        finally:
            for meeting in list(self._meetings.values()):
                meeting.close()

    def _obey(self) -> bool:
        """End the groups that must end, and remove groups whose members have all left.

        Return False if the listener must close.
        """
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        while not self._orders.empty():
            group, if_meeting = self._orders.get()
            if group == CLOSE:
                return False
            meeting = self._meetings.get(group)
            if meeting is not None and not (meeting.settled and if_meeting):
                meeting.end("one of the members has ended")
        for group, one in list(self._meetings.items()):
            if (one.over or one.settled) and not one.sockets:
                del self._meetings[group]
        return True

    def _let_in(self, sock: socket.socket, hello: Hello) -> None:
        if "group" not in hello:
            self._agent(sock, hello)
        elif (meeting := self._meetings.get(hello["group"])) is not None:
            meeting.come(hello["rank"], sock)
        else:
            sock.close()
