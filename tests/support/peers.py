"""Run peers of a test: functions in a thread, a forked process or a separate program."""

from __future__ import annotations

import contextlib
import ctypes
import io
import multiprocessing
import os
import pickle
import select
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from typing import IO, Any, ClassVar, Protocol

import cloudpickle

from support.fork_server import ForkingProgram
from support.waiting import WAIT_LIMIT_S

FORK = multiprocessing.get_context("fork")
PR_SET_PDEATHSIG = 1


class Peer(Protocol):
    """Running function. Every peer must be ended with ``result()``, or with ``kill()`` and ``join()``."""

    def result(self) -> Any:
        """Wait until the function ends, and return its result or raise its error."""

    def join(self) -> Any:
        """Wait until the function ends, regardless of the outcome."""

    def running(self) -> bool:
        """Return whether the function is still running."""


class ThreadPeer:
    """A peer in this process."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self._future: Future[Any] = Future()
        self._thread = threading.Thread(target=self._run, args=(function, args), daemon=True)
        self._thread.start()

    def _run(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        try:
            self._future.set_result(function(*args))
        except BaseException as error:
            self._future.set_exception(error)

    def result(self) -> Any:
        self.join()
        # Drop the future, so that the exception and its frames are freed early.
        future, self._future = self._future, Future()
        return future.result(timeout=0)

    def join(self) -> None:
        self._thread.join(WAIT_LIMIT_S)
        assert not self._thread.is_alive(), "the peer is still running"

    def running(self) -> bool:
        return self._thread.is_alive()


class ProcessPeer:
    """A peer in a forked process.

    The process ends with ``os._exit``, so Python's shutdown does not clean up.
    """

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self._answer, answer = FORK.Pipe(duplex=False)
        process = FORK.Process(target=_run_in_child, args=(answer, function, args), daemon=True)
        process.start()
        self._process: ForkProcess | None = process
        answer.close()

    def result(self) -> Any:
        assert self._answer.poll(WAIT_LIMIT_S), "the peer is still running"
        try:
            raised, value = self._answer.recv()
        except EOFError:
            raise AssertionError(f"the peer ended without an answer, exit code {self.join()}") from None
        self.join()
        if raised:
            raise value
        return value

    def join(self) -> int | None:
        if self._process is None:
            return None
        wait_for_the_end_of(self._process.pid)
        self._process.join(0)
        exit_code = self._process.exitcode
        assert exit_code is not None, "the peer is still running"
        self._process.close()
        self._process = None
        self._answer.close()
        return exit_code

    def running(self) -> bool:
        return self._process is not None and self._process.is_alive()

    def pid(self) -> int | None:
        assert self._process is not None
        return self._process.pid

    def kill(self) -> None:
        """Send SIGKILL, but do not reap the dead process. ``join()`` reaps it."""
        assert self._process is not None
        assert self._process.pid is not None
        os.kill(self._process.pid, signal.SIGKILL)


def child_of_multiprocessing(function: Callable[..., Any], *args: Any) -> None:
    """Call the function in a forked ``multiprocessing`` process, which runs multiprocessing's finalizers but
    not atexit's."""
    child = FORK.Process(target=function, args=args)
    child.start()
    child.join()
    assert child.exitcode == 0
    child.close()


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """A pickler that also sends methods of native objects."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj).__name__ == "nb_bound_method":
            return getattr, (obj.__self__, obj.__name__)
        return super().reducer_override(obj)


class LaunchedElsewhere(ForkingProgram):
    """The parent program of peers on another host (peer_server.py).

    Each test file that uses such peers has one such program. The program starts before the first test lists
    processes.
    """

    running: ClassVar[LaunchedElsewhere | None] = None

    def __init__(self) -> None:
        super().__init__(
            "peer_server.py", OMP_NUM_THREADS="1"
        )  # one thread, so that libraries start none during their import

    def start(self, function: Callable[..., Any], args: tuple[Any, ...], descriptors: list[int]) -> int:
        """Run the function in a child, and return its pid.

        The descriptors have the same numbers in the child as in this process.
        """
        task = io.BytesIO()
        _Pickler(task, protocol=5).dump((function, args))
        modules = [name for name in sys.modules if name.startswith("flowchan.hosts")]
        modules.append(getattr(function, "__module__", None) or "builtins")
        return self.order((sys.path, modules, descriptors), descriptors, task.getvalue())

    @classmethod
    def begin(cls) -> None:
        if cls.running is None:
            cls.running = cls()

    @classmethod
    def end(cls) -> None:
        if cls.running is not None:
            cls.running.close()
            cls.running = None


class HostPeer:
    """A peer in a child of the separate program. The function's objects are sent like an item."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        own_end, answer = os.pipe()
        self._answer: IO[bytes] = os.fdopen(own_end, "rb")
        self._code: int | None = None
        assert LaunchedElsewhere.running is not None
        self._launch_elsewhere = LaunchedElsewhere.running
        gates = [fd for gate in Gate.all for fd in gate.descriptors]
        try:
            self._pid = self._launch_elsewhere.start(function, args, [answer, *gates])
        finally:
            os.close(answer)

    def result(self) -> Any:
        assert select.select([self._answer], [], [], WAIT_LIMIT_S)[0], "the peer is still running"
        data = self._answer.read()
        code = self.join()
        if not data:
            raise AssertionError(f"the peer ended without an answer, exit code {code}")
        raised, value = pickle.loads(data)
        if raised:
            raise value
        return value

    def join(self) -> int | None:
        if self._code is None:
            assert self._has_ended(WAIT_LIMIT_S), "the peer is still running"
            self._code = self._launch_elsewhere.reap(self._pid)
            self._answer.close()
        return self._code

    def running(self) -> bool:
        return self._code is None and not self._has_ended(0)

    def pid(self) -> int:
        return self._pid

    def kill(self) -> None:
        """Send SIGKILL."""
        os.kill(self._pid, signal.SIGKILL)

    def _has_ended(self, timeout: float) -> bool:
        """Return whether the process exits within ``timeout`` seconds.

        The process has not been reaped, so its pid is unique.
        """
        process = os.pidfd_open(self._pid)
        try:
            return bool(select.select([process], [], [], timeout)[0])
        finally:
            os.close(process)


def wait_for_the_end_of(pid: int | None) -> None:
    """Wait only for the exit of this process.

    ``multiprocessing`` waits until a pipe is closed, but the process's own children keep that pipe open.
    """
    assert pid is not None
    with contextlib.suppress(ProcessLookupError):  # the process may already have been reaped
        process = os.pidfd_open(pid)
        try:
            select.select([process], [], [], WAIT_LIMIT_S)
        finally:
            os.close(process)


def _run_in_child(answer: Connection, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    # End this child with its parent, so that it does not outlive a killed test run.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    try:
        message = (False, function(*args))
    except BaseException as error:
        error.add_note(f"in the peer process: {traceback.format_exc()}")
        message = (True, error)
    try:
        answer.send(message)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        answer.send((True, AssertionError(f"the peer's answer {message!r} cannot be sent: {error}")))
    answer.close()


class Gate:
    """A barrier for threads, forked processes and separate programs.

    Each peer calls ``arrive()``, and the test calls ``open()``. After all peers have arrived, they continue.
    The gate consists of two eventfds, which threads and forked processes share and separate programs inherit.
    """

    all: ClassVar[list[Gate]] = []

    def __init__(self, peers: int) -> None:
        self._peers = peers
        self._ready = os.eventfd(0, os.EFD_SEMAPHORE)
        self._go = os.eventfd(0, os.EFD_SEMAPHORE)
        self.all.append(self)

    @property
    def descriptors(self) -> tuple[int, int]:
        return self._ready, self._go

    def arrive(self) -> None:
        os.eventfd_write(self._ready, 1)
        os.eventfd_read(self._go)

    def open(self) -> None:
        for _ in range(self._peers):
            assert select.select([self._ready], [], [], WAIT_LIMIT_S)[0], "a peer has not come to its gate"
            os.eventfd_read(self._ready)
        os.eventfd_write(self._go, self._peers)

    def close(self) -> None:
        self.all.remove(self)
        os.close(self._ready)
        os.close(self._go)
