"""Keep large outputs on the host that produced them until the reader's host fetches them.

The native link decides which outputs stay, and keeps ordering, leases and recovery in the driver
(``references.hpp``). This module connects agents to each other, so that they can fetch outputs.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import deque
from collections.abc import Collection
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
    therefore waits for the second stage. If the second stage has keys, its ``route`` stage passes the
    references on.

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
    writers = [one for one in plan.workers if channel in one.outputs.values()]
    readers = [one for one in plan.workers if channel in one.inputs.values()]
    routes = [one for one in readers if one.stage.operator.routes]
    if routes:
        if "readers" not in worker.stage.options:
            return False
        routed = {name for one in routes for name in one.outputs.values()}
        readers = [one for one in plan.workers if routed.intersection(one.inputs.values())]
    users = [*((one, False) for one in writers), *((one, bool(routes)) for one in readers)]
    return bool(readers) and all(one.id in pool and _handles_each_item(one, routed) for one, routed in users)


def _handles_each_item(worker: PlannedWorker, is_routed: bool = False) -> bool:
    stage = worker.stage
    plain = stage.gang is None and (is_routed or not stage.per_worker) and not stage.may_get_requests
    return plain and stage.operator.per_item and len(worker.inputs) == 1 and not stage.output_per_worker


class _Peer:
    """Connection to another agent, and the outputs to fetch from it, oldest first."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.changed = threading.Condition()  # guards the other attributes
        self.locations: deque[bytes] = deque()
        self.sock: socket.socket | None = None
        self.retry_at = 0.0  # when it may be dialled again

    def oldest(self) -> bytes:
        """Wait for the next location, and return it without removing it."""
        with self.changed:
            self.changed.wait_for(lambda: self.locations)
            return self.locations[0]

    def disconnect(self) -> None:
        """Close the connection; the next one repeats all requests."""
        with self.changed:
            if self.sock is not None:
                self.sock.close()
                self.sock = None


class KeptOutputs:
    """Outputs that an agent keeps on its host, and outputs that it fetches from other hosts.

    An agent requests each output as soon as it gets the location. So it has requests in transit while it
    receives earlier outputs, and while its workers process them.

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
        link.set_fetch_address(self.address)
        self._peers: dict[str, _Peer] = {}

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
        peer = self._peers.get(address)
        if peer is None:
            peer = self._peers[address] = _Peer(address)
            threading.Thread(target=self._fetch_from, args=(peer,), daemon=True).start()
        with peer.changed:
            peer.locations.append(location)
            peer.changed.notify()
            if peer.sock is not None:
                with contextlib.suppress(OSError):  # the thread that receives also sees that it has ended
                    self._link.request(peer.sock.fileno(), location)

    def _fetch_from(self, peer: _Peer) -> None:
        while True:
            location = peer.oldest()
            found = False
            try:
                if peer.sock is None:
                    self._connect(peer)
                found = peer.sock is not None and self._link.fetch(peer.sock.fileno(), location)
            except Exception:  # for example, a lack of memory; the driver then sends the output
                peer.disconnect()
            with peer.changed:
                peer.locations.popleft()
            if not found:
                self._link.report_unreachable(location)

    def _connect(self, peer: _Peer) -> None:
        """Connect to another agent, and request its outputs. Do nothing if that failed recently."""
        if time.monotonic() < peer.retry_at:
            return
        why = "can't reach the host that made an item"
        try:
            sock = reach(peer.address, self._secret, {}, why=why, within=self._reach_within, tls=self._tls)[0]
        except OSError:
            peer.retry_at = time.monotonic() + RETRY_S
            raise
        with peer.changed:
            peer.sock = sock
            for location in peer.locations:
                self._link.request(sock.fileno(), location)
