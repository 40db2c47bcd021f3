"""Answers to readers of weights on other machines.

A thread of the trainer's process answers the readers one after the other. It keeps the version of its last
answer pinned and compares it with the latest version. The comparison has one bit for each two bytes of the
weights. The thread keeps the last comparisons, so it can answer with a delta to every reader that has asked
recently. Other readers get the full weights.
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
"""Number of comparisons that are kept; each takes 1/16 of the memory of the weights."""


class WeightsRequest(NamedTuple):
    """Request of a reader on another machine.

    Attributes:
        reply: Address of the channel for the answer. The reader keeps this channel; the trainer owns it.
        version: Version that the reader has; 0 for none.
        least: Lowest version that the reader wants.
    """

    reply: str
    version: int
    least: int


@dataclass(frozen=True, slots=True)
class WeightsAnswer:
    """Answer to a request, in one message.

    Attributes:
        version: Version of the weights that the answer contains; 0 if it contains none.
        step: Training step of that version.
        full: All weights, or None.
        delta: Difference from the reader's version, or None.
    """

    version: int
    step: int | None = None
    full: memoryview | None = None
    delta: Delta | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the weights or of the delta."""
        return sum(part.nbytes for part in (self.full, self.delta) if part is not None)


class WeightsAnswers:
    """Thread that answers the readers on other machines.

    Args:
        memory: The trainer's memory.
    """

    def __init__(self, memory: WeightsMemory) -> None:
        requests: Channel[WeightsRequest] = Channel(across="hosts")
        self.at = requests.address, requests.secret, requests._reached.tls
        """Address, secret and TLS setting of the channel for requests."""
        self.full = self.deltas = self.bytes_sent = 0
        self._memory = memory
        self._base: PinnedVersion | None = None
        self._comparisons: list[tuple[int, Any]] = []
        """The version before each comparison, and its bits; the next comparison begins where it ends."""
        self._last: tuple[int, WeightsAnswer] | None = None
        """The last delta with the version that it changes, for readers that ask at about the same time."""
        self._requests: Channel[WeightsRequest] | None = requests
        self._thread = threading.Thread(
            target=self._run, args=(requests,), name="flowchan weights", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Answer the requests that have arrived, and end the thread. Later requests fail."""
        if self._requests is not None:
            self._requests.close()
            self._requests = None
            if threading.current_thread() is not self._thread:  # the garbage collector may call this method
                self._thread.join()

    def _run(self, requests: Channel[WeightsRequest]) -> None:
        try:
            while True:
                try:
                    self._answer(requests.get())
                except FlowchanError:
                    if requests.closed or requests.broken:
                        return
                    # otherwise, a reader has ended
        finally:
            self._last = None
            if self._base is not None:
                self._base.close()

    def _answer(self, request: WeightsRequest) -> None:
        _, secret, tls = self.at
        reply = open_channel(request.reply, secret, tls=tls)  # raises if the reader has ended
        try:
            answer = self._answer_to(request)
        except Exception as error:
            reply.put_nowait(error)
            return
        # before the put, so that a reader that has the answer sees it in the statistics
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
        """Pin the latest version, compare it with the one that was pinned, and return it."""
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
