"""Keep large outputs on the host that produced them until the reader's host fetches them.

The native link decides which outputs stay, and keeps ordering, leases and recovery in the driver
(``references.hpp``). This module connects agents to each other, so that they can fetch outputs.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Collection
from queue import SimpleQueue
from typing import Any

from flowchan.run.policy.events import WorkerId
from flowchan.run.policy.plan import Plan, PlannedWorker
from flowchan.transport.dial import reach
from flowchan.transport.listener import AuthenticatedListener
from flowchan.transport.tcp import joined, listen, route_to, split

LOCATION_BYTES = 32
"""Size of a location without the address after it (``Location`` in ``references.hpp``)."""

RETRY_S = 30.0
"""An unreachable agent is not dialled again for this many seconds."""


def keeps_outputs(plan: Plan, worker: PlannedWorker, pool: Collection[WorkerId]) -> bool:
    """Return whether a worker's large outputs may stay on its host.

    Both stages of the channel must run in the same pool and process items one at a time. Otherwise, the
    stages could deadlock. A second stage that collects many items before it emits one may wait for the end of
    the first stage. The first stage, however, keeps its input items until their outputs have been read, and
    therefore waits for the second stage.

    Args:
        plan: Plan of the run.
        worker: Worker that makes the outputs.
        pool: Workers of its pool.

    Returns:
        True if large outputs may stay.
    """
    if len(worker.outputs) != 1 or not _handles_each_item(worker):
        return False
    (channel,) = worker.outputs.values()
    users = [one for one in plan.workers if channel in (*one.inputs.values(), *one.outputs.values())]
    readers = [one for one in users if channel in one.inputs.values()]
    return bool(readers) and all(one.id in pool and _handles_each_item(one) for one in users)


def _handles_each_item(worker: PlannedWorker) -> bool:
    stage = worker.stage
    plain = stage.gang is None and not stage.per_worker and not stage.may_get_requests
    return plain and stage.operator.per_item and len(worker.inputs) == 1 and not stage.output_per_worker


class KeptOutputs:
    """Outputs that an agent keeps on its host, and outputs that it fetches from other hosts.

    Args:
        link: Agent's link to the driver.
        driver: Driver's address.
        secret: Secret of the run.
        tls: Encrypt the connections between agents.
        peer_timeout: Seconds after which another agent counts as unreachable.

    Raises:
        OSError: The driver's name cannot be resolved within the peer timeout, or this host cannot listen.

    Attributes:
        address: Address at which other agents fetch outputs from this one.
    """

    def __init__(self, link: Any, driver: str, secret: bytes, tls: bool, peer_timeout: float) -> None:
        self._link, self._secret, self._tls = link, secret, tls
        self._reach_within = peer_timeout / 4
        place = route_to(split(driver)[0], peer_timeout)
        self._listener = AuthenticatedListener(listen(joined((place, 0))), secret, {}, tls=tls)
        self.address = self._listener.address
        self._queues: dict[str, SimpleQueue[bytes]] = {}
        self._unreachable: dict[str, float] = {}  # for each of these addresses, when to dial it again

    def serve(self) -> None:
        """Send outputs to the agents that fetch them. This method does not return."""
        while True:
            sock, _ = self._listener.accept()
            threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        with sock:
            self._link.serve_fetches(sock.fileno())

    def fetch(self, location: bytes) -> None:
        """Fetch the output at this location in the background.

        If its host is unreachable, the driver sends the output.
        """
        address = location[LOCATION_BYTES:].decode()
        queue = self._queues.get(address)
        if queue is None:
            queue = self._queues[address] = SimpleQueue()
            threading.Thread(target=self._fetch_from, args=(address, queue), daemon=True).start()
        queue.put(location)

    def _fetch_from(self, address: str, queue: SimpleQueue[bytes]) -> None:
        sock: socket.socket | None = None
        while True:
            location = queue.get()
            found = False
            try:
                if sock is None:
                    sock = self._dial(address)
                found = sock is not None and self._link.fetch(sock.fileno(), location)
            except Exception:  # for example, a lack of memory; the driver then sends the output
                if sock is not None:
                    sock.close()
                    sock = None
            if not found:
                self._link.report_unreachable(location)

    def _dial(self, address: str) -> socket.socket | None:
        """Connect to another agent; return None if that failed recently."""
        if time.monotonic() < self._unreachable.get(address, 0.0):
            return None
        why = "can't reach the host that made an item"
        try:
            return reach(address, self._secret, {}, why=why, within=self._reach_within, tls=self._tls)[0]
        except OSError:
            self._unreachable[address] = time.monotonic() + RETRY_S
            raise
