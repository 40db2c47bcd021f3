"""The driver's door. Who dials is an agent, or a worker that comes to meet those with whom it forms a group:
these tell each other here where they are, and connect to each other."""

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
POLL_INTERVAL_MS = 1000  # milliseconds; now and then those are sent away who say nothing


class DriverListener:
    """See above. Its thread is called ``name``, and runs ``within`` what hears of its failure. ``agent`` gets
    who has dialled as one."""

    def __init__(
        self,
        door: AuthenticatedListener,
        name: str,
        within: Callable[[Callable[[], None]], None],
        agent: Callable[[socket.socket, Hello], None],
    ) -> None:
        self.address = door.address
        self._door, self._agent = door, agent
        self._circles: dict[int, Coordinator] = {}
        self._groups = CLOSE
        # Groups that are to end, and whether only if they still meet.
        self._orders: SimpleQueue[tuple[int, bool]] = SimpleQueue()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=within, args=(self._run,), name=name, daemon=True)
        self._thread.start()

    def expect(self, size: int) -> int:
        """So many workers are to form a group, which has this number here."""
        self._groups += 1
        self._circles[self._groups] = Coordinator(size)
        return self._groups

    def dismiss(self, group: int, if_meeting: bool = False) -> None:
        """One of the group has ended, so those that wait for others wait in vain. ``if_meeting``: those of it
        who have met, and stayed, go on."""
        self._orders.put((group, if_meeting))
        os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        self.dismiss(CLOSE)
        self._thread.join()
        self._door.close()
        os.close(self._wake)

    def _run(self) -> None:
        try:
            while True:
                guests = {
                    sock.fileno(): (circle, rank)
                    for circle in list(self._circles.values())
                    for rank, sock in circle.sockets.items()
                }
                waiting = select.poll()
                for fd in (self._wake, self._door.fileno(), *guests):
                    waiting.register(fd, select.POLLIN)
                for fd, _ in waiting.poll(POLL_INTERVAL_MS):
                    if fd in guests:
                        circle, rank = guests[fd]
                        circle.hear(rank)
                if not self._obey():
                    return
                with contextlib.suppress(TimeoutError):
                    while True:
                        self._let_in(*self._door.accept(0))
        finally:
            for circle in list(self._circles.values()):
                circle.close()

    def _obey(self) -> bool:
        """Ends circles that are to end, and forgets those from which all have gone. Whether it is to go
        on."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        while not self._orders.empty():
            group, if_meeting = self._orders.get()
            if group == CLOSE:
                return False
            circle = self._circles.get(group)
            if circle is not None and not (circle.settled and if_meeting):
                circle.end("one of the members has ended")
        for group, one in list(self._circles.items()):
            if (one.over or one.settled) and not one.sockets:
                del self._circles[group]
        return True

    def _let_in(self, sock: socket.socket, hello: Hello) -> None:
        if "group" not in hello:
            self._agent(sock, hello)
        elif (circle := self._circles.get(hello["group"])) is not None:
            circle.come(hello["rank"], sock)
        else:
            sock.close()
