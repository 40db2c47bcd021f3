"""Publish model weights from a trainer to inference workers on any host.

Readers on the trainer's machine copy the latest version from the trainer's memory (``weights_memory.py``).
Readers on other machines send requests over a channel, and a thread of the trainer answers them
(``weights_answers.py``). A remote reader keeps its own copy of the weights. The reader applies each delta to
this copy, and then copies the result into the model.
"""

from __future__ import annotations

import functools
import os
import threading
import time
import weakref
from dataclasses import dataclass
from typing import Any

from flowchan import Broken, Channel, ChannelError, Closed, Empty, HostError
from flowchan.hosts import open_channel
from flowchan.items.arguments import refuses_misspelt, seconds, text, whole
from flowchan.pipelines.parameter_server.deltas import apply_delta
from flowchan.pipelines.parameter_server.weights_answers import WeightsAnswer, WeightsAnswers, WeightsRequest
from flowchan.pipelines.parameter_server.weights_layout import Tensors, WeightsLayout, tensors_of
from flowchan.pipelines.parameter_server.weights_memory import WeightsAddress, WeightsMemory
from flowchan.public import public
from flowchan.transport.local_peers import machine

_MOST_STEPS = 2**63 - 1
CONNECT_TIMEOUT_S = 10.0
"""Maximum seconds to connect to a trainer on another machine."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.0005, 0.05
"""First and longest pause in seconds between two checks for the awaited version."""


@public
@dataclass(frozen=True, slots=True)
class WeightsStats:
    """Statistics of published weights.

    Readers on the trainer's machine copy the weights from shared memory. The counts therefore include only
    readers on other machines.

    Attributes:
        version: Number of the latest version; 0 if none has been published.
        size: Size of one version in bytes.
        full: Number of full versions sent to other machines.
        deltas: Number of deltas sent to other machines.
        bytes_sent: Total size of these versions and deltas in bytes.

    Example:
        >>> import numpy
        >>> from flowchan.pipelines import Weights
        >>> with Weights({"w": numpy.ones(16)}) as weights:
        ...     weights.publish()
        ...     weights.stats()
        1
        WeightsStats(version=1, size=128, full=0, deltas=0, bytes_sent=0)
    """

    version: int
    size: int
    full: int
    deltas: int
    bytes_sent: int


@dataclass(frozen=True, slots=True)
class _Source:
    """Information that a reader needs to access the weights.

    Attributes:
        machine: ID of the trainer's machine.
        memory: Address of the trainer's memory on that machine.
        layout: Layout of the tensors in this memory.
        requests: Address, secret and TLS setting of the request channel for readers on other machines.
    """

    machine: str
    memory: WeightsAddress
    layout: WeightsLayout
    requests: tuple[str, bytes, bool]


@public
class Weights:
    """Model weights that a trainer publishes to inference workers.

    Create the object in the trainer's process, and send a :meth:`reader` to each worker on any host. A reader
    always receives a complete version, and the trainer never waits for a reader.

    The trainer keeps two copies of the weights in memory, or three if readers are on other machines. The
    trainer keeps one more copy for each older version that a reader is copying.

    Readers on other machines connect to the address set by ``flowchan.hosts.serve``.

    Args:
        source: The ``nn.Module`` to publish, or a mapping from names to tensors or NumPy arrays. Each call to
            :meth:`publish` reads the current values. Names, dtypes and shapes must not change.
        name: Name of the weights in error messages (default: ``"weights"``).

    Raises:
        TypeError: ``source`` is neither a module nor a mapping, or a value is not a dense tensor or array.

    Example:
        >>> import numpy
        >>> from flowchan.pipelines import Weights
        >>> trained = {"w": numpy.zeros(3)}
        >>> with Weights(trained) as weights:
        ...     reader = weights.reader()  # pass it to a worker
        ...     trained["w"] += 1
        ...     weights.publish(step=10)
        ...     model = {"w": numpy.empty(3)}
        ...     print(reader.refresh(model), reader.step, model["w"])
        1
        1 10 [1. 1. 1.]
    """

    @refuses_misspelt("Weights")
    def __init__(self, source: Any, *, name: str = "weights") -> None:
        self.name = text("Weights", "name", name)
        self._source = source
        self._layout = WeightsLayout("Weights", tensors_of("Weights", "source", source))
        self._lock = threading.Lock()
        self._version, self._pid = 0, os.getpid()
        self._memory = WeightsMemory(name, self._layout.size)
        self._opened: list[WeightsAnswers] = []  # at most one element
        self._finalizer = weakref.finalize(self, _close, self._pid, self._memory, self._opened)

    def __repr__(self) -> str:
        return f"<Weights {self.name!r}, version {self._version}>"

    def publish(self, step: int | None = None) -> int:
        """Copy the weights, and publish the copy as the latest version without waiting for any reader.

        Do not change the weights during the call. If the call raises an exception, the previous version
        remains the latest.

        Args:
            step: Training step of the new version, shown to readers as :attr:`WeightsReader.step` (default:
                none).

        Returns:
            The number of the new version. The first version is 1.

        Raises:
            Closed: The weights were closed.
            OSError: There is not enough memory.
            RuntimeError: The caller is not in the process that created the weights.
            ValueError: A name, dtype or shape has changed.

        Example:
            >>> import numpy
            >>> from flowchan.pipelines import Weights
            >>> with Weights({"w": numpy.ones(3)}) as weights:
            ...     weights.publish(), weights.publish()
            (1, 2)
        """
        if step is not None:
            whole("publish", "step", step, 0, _MOST_STEPS)
        with self._lock:
            self._check("publish")
            tensors = self._layout.checked("publish", tensors_of("publish", "source", self._source))
            self._memory.publish(self._version + 1, step, functools.partial(self._layout.write, tensors))
            self._version += 1
            return self._version

    def reader(self) -> WeightsReader:
        """Return a reader for this or any other process.

        Send the reader to a process or host as an item or an argument, or use it in the trainer's process.

        Returns:
            The reader. Each process that receives it has a separate reader, which starts at version 0.

        Raises:
            Closed: The weights were closed.
            RuntimeError: The caller is not in the process that created the weights.

        Example:
            >>> import numpy
            >>> from flowchan.pipelines import Weights, map
            >>> def answer(reader, worker):
            ...     reader.refresh()
            ...     return reader.values["w"].sum()
            >>> with Weights({"w": numpy.ones(3)}) as weights:
            ...     version = weights.publish()
            ...     print(*map(2, answer, weights.reader(), on="process").join())
            3.0 3.0
        """
        with self._lock:
            self._check("reader")
            if not self._opened:
                self._opened.append(WeightsAnswers(self._memory))
            at = self._opened[0].at
            return WeightsReader(_Source(machine(), self._memory.address, self._layout, at))

    def stats(self) -> WeightsStats:
        """Return the current statistics.

        Returns:
            The latest version, its size, and the counts of data sent to other machines.

        Example:
            >>> import numpy
            >>> from flowchan.pipelines import Weights
            >>> with Weights({"w": numpy.ones(16)}) as weights:
            ...     weights.stats().version
            0
        """
        sent = (0, 0, 0)
        for answers in self._opened:
            sent = answers.full, answers.deltas, answers.bytes_sent
        return WeightsStats(self._version, self._layout.size, *sent)

    def close(self) -> None:
        """Release the memory. Later refreshes raise ``Broken``.

        Closing the weights more than once has no effect.

        Example:
            >>> import numpy
            >>> from flowchan.pipelines import Weights
            >>> weights = Weights({"w": numpy.ones(3)})
            >>> weights.close()
        """
        with self._lock:
            self._finalizer()

    def _check(self, call: str) -> None:
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"{self!r}: {call} must be called in the process that created the weights; use a reader here"
            )
        if not self._finalizer.alive:
            raise Closed(f"{self!r} is closed")

    def __enter__(self) -> Weights:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError(f"{self!r} can't be sent to another process; send {self.name}.reader()")


def _close(pid: int, memory: WeightsMemory, opened: list[WeightsAnswers]) -> None:
    if os.getpid() == pid:
        for answers in opened:
            answers.close()
        memory.close()


@public
class WeightsReader:
    """Reader of published weights, created by :meth:`Weights.reader`.

    Use a separate reader for each model. A reader starts at version 0 in each process that receives it.

    Example:
        >>> import numpy
        >>> from flowchan.pipelines import Weights
        >>> with Weights({"w": numpy.ones(3)}) as weights:
        ...     reader = weights.reader()
        ...     print(reader.refresh())
        ...     version = weights.publish(step=7)
        ...     print(reader.refresh(), reader.step, reader.values)
        None
        1 7 {'w': array([1., 1., 1.])}
    """

    def __init__(self, source: _Source) -> None:
        self._source = source
        self._version = 0
        self._step: int | None = None
        self._values: dict[str, Any] = {}
        self._remote: _RemoteCopy | None = None
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<WeightsReader of {self._source.memory.name!r}, version {self._version}>"

    @property
    def version(self) -> int:
        """Version that the last refresh copied; 0 before the first refresh."""
        return self._version

    @property
    def step(self) -> int | None:
        """Training step of :attr:`version`, or None if the trainer did not specify a step."""
        return self._step

    @property
    def values(self) -> dict[str, Any]:
        """Tensors and arrays that ``refresh()`` fills by default; empty before the first such call."""
        return self._values

    def refresh(
        self, model: Any = None, timeout: float | None = None, at_least: int | None = None
    ) -> int | None:
        """Copy the latest version into a model if this reader has an older version.

        If the call raises an exception, the model may contain parts of two versions. The next refresh
        overwrites all of its weights.

        Args:
            model: The ``nn.Module`` or mapping to overwrite, on any device. The names, dtypes and shapes must
                match the weights (default: :attr:`values`).
            timeout: Maximum seconds to wait for ``at_least`` and for a trainer on another machine (default:
                no limit).
            at_least: Lowest version to wait for (default: do not wait for a version).

        Returns:
            The version that was copied, or None if no newer version was available.

        Raises:
            Broken: The trainer has exited, has closed the weights or cannot be reached.
            Empty: ``timeout`` expired.
            TypeError: ``model`` is neither a module nor a mapping.
            ValueError: A name, dtype or shape in ``model`` differs from the weights.

        Example:
            >>> import numpy
            >>> from flowchan.pipelines import Weights
            >>> model = {"w": numpy.zeros(3)}
            >>> with Weights({"w": numpy.ones(3)}) as weights:
            ...     reader = weights.reader()
            ...     version = weights.publish()
            ...     print(reader.refresh(model), reader.refresh(model))
            1 None
        """
        limit = seconds("refresh", "timeout", timeout)
        until = None if limit is None else time.monotonic() + limit
        wanted = 0 if at_least is None else whole("refresh", "at_least", at_least, 0)
        tensors = self._tensors(model)
        with self._lock:
            pause = _FIRST_PAUSE_S
            while not self._copy_newer(tensors, max(self._version + 1, wanted), until):
                if self._version >= wanted:
                    return None
                left = _LONGEST_PAUSE_S if until is None else until - time.monotonic()
                if left <= 0:
                    raise Empty(f"{self!r}: version {wanted} was not published within {timeout:g} s")
                time.sleep(min(pause, left))
                pause = min(2 * pause, _LONGEST_PAUSE_S)
            return self._version

    def _tensors(self, model: Any) -> Tensors:
        if model is None:
            if not self._values:
                self._values = self._source.layout.new()
            return self._values
        return self._source.layout.checked("refresh", tensors_of("refresh", "model", model))

    def _copy_newer(self, tensors: Tensors, least: int, until: float | None) -> bool:
        """Copy the latest version unless it is older than ``least``, and return whether it was copied."""
        source = self._source
        if source.machine and source.machine == machine():
            if source.memory.latest() < least:
                return False
            with source.memory.pin() as pinned:
                # latest() may have read the number of a version that the trainer has not published yet.
                if pinned.version < least:
                    return False
                source.layout.fill(tensors, pinned.read)
                self._version, self._step = pinned.version, pinned.step
            return True
        if self._remote is None or self._remote.pid != os.getpid():
            self._remote = _RemoteCopy(source, until)
        copy = self._remote
        if not copy.update(least, until):
            return False
        source.layout.fill(tensors, copy.read)
        self._version, self._step = copy.version, copy.step
        return True

    def __reduce__(self) -> tuple[Any, ...]:
        return WeightsReader, (self._source,)


class _RemoteCopy:
    """Copy of the weights for a reader that is not on the trainer's machine.

    Args:
        source: Information about how to access the weights.
        until: Deadline for connecting to the trainer, or None for no deadline.
    """

    def __init__(self, source: _Source, until: float | None) -> None:
        self.pid = os.getpid()
        self.version = 0
        self.step: int | None = None
        self._memory = source.memory
        address, secret, tls = source.requests
        limit = CONNECT_TIMEOUT_S if until is None else min(_left(until) or 0, CONNECT_TIMEOUT_S)
        try:
            self._requests = open_channel(address, secret, tls=tls, timeout=limit)
            self._reply: Channel[WeightsAnswer | Exception] = self._requests._another(1)
        except (ChannelError, HostError) as error:
            if until is not None and time.monotonic() >= until:
                raise self._late() from error
            place = address.rpartition("/")[0]
            raise Broken(
                f"weights {self._memory.name!r}: cannot reach a trainer at {place}; if the trainer is on "
                "another machine, call flowchan.hosts.serve(address) there before you create the weights"
            ) from error
        self._block = bytearray(source.layout.size)
        self._is_waiting = False  # true while a request has no answer

    def read(self, into: memoryview, offset: int) -> None:
        """Fill ``into`` with the bytes of the copy from ``offset`` onwards."""
        into[:] = memoryview(self._block)[offset : offset + len(into)]

    def update(self, least: int, until: float | None) -> bool:
        """Request the latest version. Return whether the copy now has at least version ``least``."""
        try:
            if self._is_waiting:  # take the answer to an earlier call that was interrupted or timed out
                self._take(until)
            self._ask(max(least, self.version + 1), until)
            self._take(until)
        except TimeoutError as error:
            raise self._late() from error
        except ChannelError as error:
            raise self._memory.gone() from error
        return self.version >= least

    def _ask(self, least: int, until: float | None) -> None:
        self._is_waiting = True
        try:
            self._requests.put(WeightsRequest(self._reply.address, self.version, least), _left(until))
        except BaseException:
            self._is_waiting = False
            raise

    def _late(self) -> Empty:
        return Empty(f"weights {self._memory.name!r}: the trainer did not answer within the timeout")

    def _take(self, until: float | None) -> None:
        """Receive the next answer, and apply it to the copy."""
        answer = self._reply.get(_left(until))
        self._is_waiting = False
        if isinstance(answer, Exception):
            raise answer
        if not answer.version:
            return
        self.version = 0  # until the copy is complete, it has no valid version
        if answer.full is not None:
            memoryview(self._block)[:] = answer.full
        else:
            assert answer.delta is not None
            apply_delta(answer.delta, self._block)
        self.version, self.step = answer.version, answer.step


def _left(until: float | None) -> float | None:
    """Return the seconds until a deadline, or None without a deadline."""
    return None if until is None else max(until - time.monotonic(), 0.001)
