"""Answer readers on machines other than the trainer's.

A thread in the trainer's process answers one request at a time. The thread keeps the version of its last
answer pinned, and compares that version with the latest one. A comparison has one bit per two bytes of the
weights. The thread keeps recent comparisons. The thread can therefore send a delta to each reader that has
refreshed recently. Other readers receive the full weights.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from flowchan import Channel, FlowchanError
from flowchan.hosts import open_channel
from flowchan.pipelines.parameter_server.deltas import Delta, changed_units, delta_of
from flowchan.pipelines.parameter_server.weights_memory import PinnedVersion, WeightsMemory

_MOST_COMPARISONS = 8
"""Maximum number of stored comparisons. Each takes 1/16 of the memory of the weights."""


class WeightsRequest(NamedTuple):
    """Request from a reader on another machine.

    Attributes:
        reply: Address of the reply channel. The trainer owns this channel, and the reader keeps it open.
        version: Version that the reader has; 0 for none.
        least: Lowest version that the reader accepts.
    """

    reply: str
    version: int
    least: int


@dataclass(frozen=True, slots=True)
class WeightsAnswer:
    """Answer to a request, sent as one message.

    Attributes:
        version: Version of the weights in the answer; 0 if the answer contains no weights.
        step: Training step of this version.
        full: The full weights, or None.
        delta: Difference from the reader's version, or None.
    """

    version: int
    step: int | None = None
    full: memoryview | None = None
    delta: Delta | None = None

    @property
    def nbytes(self) -> int:
        """Size of the weights or the delta in bytes."""
        return sum(part.nbytes for part in (self.full, self.delta) if part is not None)


class WeightsAnswers:
    """Thread that answers readers on other machines.

    Args:
        memory: The trainer's memory.
    """

    def __init__(self, memory: WeightsMemory) -> None:
        requests: Channel[WeightsRequest] = Channel(across="hosts")
        self.at = requests.address, requests.secret, requests._reached.tls
        """Address, secret and TLS setting of the request channel."""
        self.full = self.deltas = self.bytes_sent = 0
        self._memory = memory
        self._base: PinnedVersion | None = None
        self._comparisons: list[tuple[int, Any]] = []
        """Old version and bits of each comparison.

        The new version of a comparison is the old version of the next.
        """
        self._last: tuple[int, WeightsAnswer] | None = None
        """Latest delta and the version that it updates.

        Readers that send requests at about the same time get the same delta.
        """
        self._requests: Channel[WeightsRequest] | None = requests
        self._thread = threading.Thread(
            target=self._run, args=(requests,), name="flowchan weights", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Answer all pending requests, and stop the thread. Later requests fail."""
        if self._requests is not None:
            self._requests.close()
            self._requests = None
            # The garbage collector may call close() on the thread itself, which cannot join itself.
            if threading.current_thread() is not self._thread:
                self._thread.join()

    def _run(self, requests: Channel[WeightsRequest]) -> None:
        try:
            while True:
                try:
                    self._answer(requests.get())
                except FlowchanError:
                    if requests.closed or requests.broken:
                        return
                    # If the request channel is still open, only the reader has exited.
        finally:
            requests.close()  # if an unexpected error ends the thread, readers must not wait
            self._last = None
            if self._base is not None:
                self._base.close()

    def _answer(self, request: WeightsRequest) -> None:
        _, secret, tls = self.at
        reply = open_channel(request.reply, secret, tls=tls)  # raises an error if the reader has exited
        try:
            answer = self._answer_to(request)
        except Exception as error:
            reply.put_nowait(error)
            return
        # Count before the put, so that the statistics include every answer that a reader has received.
        self.bytes_sent += answer.nbytes
        self.full += answer.full is not None
        self.deltas += answer.delta is not None
        reply.put_nowait(answer)

    def _answer_to(self, request: WeightsRequest) -> WeightsAnswer:
        if self._memory.address.latest() < request.least:
            return WeightsAnswer(0)
        base = self._compared()
        block = self._memory.payload(base)
        before = [version for version, _ in self._comparisons]
        if request.version not in before:
            return WeightsAnswer(base.version, base.step, full=block)
        if self._last is None or (self._last[0], self._last[1].version) != (request.version, base.version):
            bits = [bits for version, bits in self._comparisons if version >= request.version]
            delta = delta_of(_union(bits), block)
            self._last = request.version, WeightsAnswer(base.version, base.step, delta=delta)
        return self._last[1]

    def _compared(self) -> PinnedVersion:
        """Pin and return the latest version, and compare it with the previously pinned version."""
        old, new = self._base, self._memory.address.pin()
        if old is not None and old.version == new.version:
            new.close()
            return old
        try:
            compare = _comparison()
            if old is not None and compare is not None:
                bits = compare(self._memory.payload(old), self._memory.payload(new))
                self._comparisons.append((old.version, bits))
                del self._comparisons[:-_MOST_COMPARISONS]
        except BaseException:
            new.close()
            raise
        self._base = new
        if old is not None:
            old.close()
        return new


def _comparison() -> Callable[[memoryview, memoryview], Any] | None:
    """Return the function that compares versions, or None if NumPy is not installed."""
    try:
        import numpy  # noqa: F401
    except ImportError:
        return None
    return changed_units


def _union(bits: list[Any]) -> Any:
    found = bits[0]
    for more in bits[1:]:
        found = found | more
    return found
