"""Carry the calls of clients on other machines to a parameter server.

Algorithm. For each remote client, the server's program runs one thread, called a *session*. Each session has
two channels: the remote client sends calls, and the session sends answers. The session performs the calls in
order, through a local client. The program owns both channels, so no call is lost or repeated when the
connection breaks. A session ends when the remote client closes its ports or dies.

Invariants. A remote client has at most ``MOST_OPEN`` calls without an answer. The answer channel has room for
all these answers. A session therefore waits for a client that does not read only if large answers use up the
memory.

The end. A worker that ends normally first waits until its calls have arrived. The gateway closes the channels
of calls, and waits until the sessions have performed the calls in them. It does not wait for a call that
waits for other clients: these clients may have ended, and the waiting client may be dead. If a client stops
in the middle of sending a large call, the session ends when the program gives up the connection.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import pickle
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from flowchan import Channel, ChannelError, Closed, Drained, Empty, Full, Out
from flowchan.pipelines.channel_backed import Shared
from flowchan.pipelines.parameter_server.server_connection import late_after, left_until
from flowchan.transport.interrupts import append_result

MOST_OPEN = 32
"""Maximum number of unanswered calls of one client."""

CLOSE_TIMEOUT_S = 10.0
"""Maximum seconds that the end of a server waits for a client that does not read its answers, and for a call
behind a call that waits for other clients."""

POLL_INTERVAL_S = 0.005
"""Seconds between two checks whether the sessions have performed all calls."""

MOST_STARTED = 2
"""Maximum number of pushes of one client that a session sends before it knows their outcomes."""

SHORT_WAIT_S = 0.05
"""Maximum seconds that a thread waiting for an answer blocks the calls of other threads."""

Perform = Callable[[Any, tuple[Any, ...]], Any]
"""Function ``(client, call)`` that performs a call through a local client, and returns the answer,
:class:`Unfinished` or :class:`WaitingCall`."""


class Gateway(Shared):
    """Entry point of a parameter server for clients on other machines.

    The process that owns the server's memory creates the gateway. A process that receives the gateway can
    open a session.

    Args:
        make_client: Function that creates a client in the gateway's process.
        perform: Function that performs a call through this client.
        arrivals: Channel across hosts that carries the channels of new sessions (default: a new channel).
    """

    def __init__(
        self, make_client: Callable[[], Any], perform: Perform, arrivals: Channel[Any] | None = None
    ) -> None:
        arrivals = Channel(across="hosts") if arrivals is None else arrivals
        self._open((arrivals,))
        self.sessions = SessionThreads(make_client, perform)
        self._welcoming = threading.Thread(
            target=_welcome, args=(arrivals, self.sessions), name="flowchan parameters", daemon=True
        )
        self._welcoming.start()

    def _renew(self) -> None:
        """Do nothing, because the gateway has no state other than the channel."""

    def session(self) -> Session:
        """Open a session between this process and the gateway.

        Raises:
            Broken: The server's program has died.
            Closed: The server was closed.
        """
        calls, answers = self._another(2 * MOST_OPEN), self._another(2 * MOST_OPEN)
        session = Session(calls, answers)
        self.channels[0].put((calls, answers))
        self.channels[0].flush()
        return session

    def close(self, timeout: float | None = None) -> None:
        """Refuse new sessions, and end each session after it has performed all calls received so far.

        A session that waits for other clients ends later.

        Args:
            timeout: Maximum seconds to wait (default: no limit).

        Raises:
            TimeoutError: ``timeout`` expired. The sessions continue, and end later.
        """
        late = late_after(timeout)
        self.channels[0].close()
        self.sessions.close()
        waiting_late = time.monotonic() + CLOSE_TIMEOUT_S
        while self._welcoming.is_alive() or self.sessions.are_busy(waiting_late):
            if late is not None and time.monotonic() >= late:
                raise TimeoutError(f"the sessions did not perform all calls within {timeout:g} s")
            time.sleep(POLL_INTERVAL_S)


class RunningSession(NamedTuple):
    """Describe a session that a thread serves.

    Attributes:
        calls: Weak reference to the channel of calls.
        thread: Thread that serves the session.
        waits: Set while the thread waits for other clients, or for its own client to read answers.
    """

    calls: weakref.ref[Channel[Any]]
    thread: threading.Thread
    waits: threading.Event

    def has_calls(self) -> bool:
        """Return whether further calls have arrived."""
        calls = self.calls()
        return calls is not None and len(calls) > 0


class SessionThreads:
    """Threads that serve the sessions of a gateway.

    Args:
        make_client: Function that creates a client in this process.
        perform: Function that performs a call through this client.
    """

    def __init__(self, make_client: Callable[[], Any], perform: Perform) -> None:
        self._make_client, self._perform = make_client, perform
        self._changing = threading.Lock()
        self._running: list[RunningSession] = []
        self._closed = False

    def begin(self, calls: Channel[Any], answers: Channel[Any]) -> None:
        """Serve a session until its client closes the channel of calls or dies."""
        waits = threading.Event()
        thread = threading.Thread(
            target=_serve, args=(calls, answers, self._make_client, self._perform, waits),
            name="flowchan session", daemon=True,
        )  # fmt: skip
        with self._changing:
            self._running = [one for one in self._running if one.thread.is_alive()]
            self._running.append(RunningSession(weakref.ref(calls), thread, waits))
            thread.start()
            if self._closed:
                calls.close()

    def close(self) -> None:
        """Let each session end after it has performed its calls."""
        with self._changing:
            self._closed, running = True, list(self._running)
        for one in running:
            calls = one.calls()
            if calls is not None:
                calls.close()
            del calls

    def are_busy(self, late: float) -> bool:
        """Return whether a session performs calls.

        A session that waits for a client counts only if further calls have arrived, and only until ``late``.
        """
        is_late = time.monotonic() >= late
        with self._changing:
            return any(
                one.thread.is_alive() and (not one.waits.is_set() or (one.has_calls() and not is_late))
                for one in self._running
            )

    def join(self) -> None:
        """Wait, for a limited time, until all sessions have sent their last answers and ended."""
        late = time.monotonic() + CLOSE_TIMEOUT_S
        with self._changing:
            running = list(self._running)
        for one in running:
            one.thread.join(max(0.0, late - time.monotonic()))


def _welcome(arrivals: Channel[Any], sessions: SessionThreads) -> None:
    for calls, answers in arrivals:
        sessions.begin(calls, answers)
        del calls, answers


class Unfinished:
    """Placeholder for the answer of an unfinished call.

    Args:
        finish: Function that waits until the call finishes, and returns the answer.
    """

    def __init__(self, finish: Callable[[], Any]) -> None:
        self.finish = finish


class WaitingCall:
    """Call that waits until other clients have pushed or pulled.

    ``Gateway.close`` does not wait for such a call.

    Args:
        finish: Function that waits, and returns the answer.
    """

    def __init__(self, finish: Callable[[], Any]) -> None:
        self.finish = finish


def waiting_for(version: int | None, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function that waits for a version. Return its answer, or the call if there is a version."""
    call = functools.partial(function, *arguments)
    return call() if version is None else WaitingCall(call)


def _serve(
    calls: Channel[Any],
    answers: Channel[Any],
    make_client: Callable[[], Any],
    perform: Perform,
    waits: threading.Event,
) -> None:
    with contextlib.suppress(ChannelError):  # the remote client may have died
        client = make_client()
        # Open counted ports, so that a client on this machine notices the death of this process.
        reader, writer = calls.reader(), answers.writer()
        started: deque[tuple[int, Unfinished]] = deque()
        try:
            while True:
                if started and not len(calls):
                    _answer_first(started, writer, waits)
                    continue
                number, call = reader.get()
                # Receive the next push while the server is still applying the last one.
                while started and (call[0] != "push" or len(started) == MOST_STARTED):
                    _answer_first(started, writer, waits)
                found, error = _outcome(functools.partial(perform, client, call))
                if isinstance(found, WaitingCall):
                    with _set(waits):
                        found, error = _outcome(found.finish)
                if isinstance(found, Unfinished):
                    started.append((number, found))
                else:
                    _send(writer, (number, found, error), waits)
                del call, found
        finally:
            client.close()
            reader.close()
            writer.close()  # a call that arrives later gets no answer


def _answer_first(started: deque[tuple[int, Unfinished]], answers: Out[Any], waits: threading.Event) -> None:
    number, unfinished = started.popleft()
    _send(answers, (number, *_outcome(unfinished.finish)), waits)


def _send(answers: Out[Any], answer: tuple[int, Any, BaseException | None], waits: threading.Event) -> None:
    with contextlib.suppress(Closed):  # the client may have closed its session after its last calls
        try:
            answers.put(answer, CLOSE_TIMEOUT_S)
        except Full:
            with _set(waits):
                answers.put(answer)


@contextlib.contextmanager
def _set(event: threading.Event) -> Iterator[None]:
    event.set()
    try:
        yield
    finally:
        event.clear()


def _outcome(function: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    try:
        return function(), None
    except Exception as error:
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:
            return None, RuntimeError(f"{type(error).__name__}: {error}")
        return None, error


class Session:
    """A session, as the client sees it.

    The session's ports are open before the server can use the channels. The server therefore notices if this
    process dies.

    Args:
        calls: Channel that carries the calls.
        answers: Channel that carries the answers.
    """

    def __init__(self, calls: Channel[Any], answers: Channel[Any]) -> None:
        self._calls, self._answers = calls.writer(), answers.reader()
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._sent = self._answered = 0
        self._unread: deque[tuple[int, Any, BaseException | None]] = deque()
        self._waiting: weakref.WeakValueDictionary[int, Call] = weakref.WeakValueDictionary()

    def send(self, call: tuple[Any, ...], timeout: float | None = None) -> Call:
        """Send a call, and return its handle.

        Raises:
            Empty: ``timeout`` expired while too many calls were unanswered.
            Broken: The server's program has died.
            Closed: The server was closed.
        """
        late = late_after(timeout)
        with _locked(self._lock, timeout):
            while self._sent - self._answered >= MOST_OPEN:
                self._read(late)
            while self._answered < self._sent and self._read_now():
                pass
            handle = Call(self, next(self._numbers))
            self._waiting[handle.number] = handle
            try:
                self._calls.put((handle.number, call), left_until(late))
            except Closed:
                # A channel without a reader is closed, even if the reader died. Only the answers end with the
                # reason.
                while True:
                    self._read(late)
            self._sent += 1
            return handle

    def wait(self, handle: Call, timeout: float | None) -> None:
        """Read answers until this call's answer arrives."""
        late = late_after(timeout)
        while not handle.answered:
            with _locked(self._lock, left_until(late)):
                if handle.answered:
                    return
                # Wait in short steps, so that other threads can send calls.
                soon = time.monotonic() + SHORT_WAIT_S
                try:
                    self._read(soon if late is None else min(soon, late))
                except Empty:
                    if late is not None and time.monotonic() >= late:
                        raise

    def poll(self, handle: Call) -> None:
        """Read the answers that have arrived."""
        held: list[bool] = []
        try:
            append_result(held, self._lock.acquire, False)
            while held[0] and not handle.answered and self._read_now():
                pass
        finally:
            if True in held:
                self._lock.release()

    def _read(self, late: float | None) -> None:
        if not self._unread:
            try:
                # Receive and store the answer in one step of the interpreter, so that no Ctrl-C can come
                # between.
                self._unread.extend(map(self._answers.get, (left_until(late),)))
            except Drained:
                raise Closed("the parameter server has shut down") from None
            except Empty:
                raise Empty("the parameter server did not answer in time") from None
        number, value, error = self._unread[0]
        handle = self._waiting.pop(number, None)
        if handle is not None:
            handle.value, handle.error, handle.answered = value, error, True
        self._answered += 1
        self._unread.popleft()

    def _read_now(self) -> bool:
        try:
            self._read(time.monotonic())
        except Empty:
            return False
        return True

    def flush(self, timeout: float | None = None) -> None:
        """Wait until the server has received all calls."""
        self._calls.flush(timeout)

    def close(self) -> None:
        """End the session after the server has performed all sent calls. Further calls have no effect."""
        self._calls.close()
        self._answers.close()

    def leave(self) -> None:
        """End the session like :meth:`close`, but do not wait for the server, which may be lost."""
        for port in (self._calls, self._answers):
            getattr(port, "leave", port.close)()  # other ports never wait


class Call:
    """Handle of a call that was sent.

    Args:
        session: Session of the call.
        number: Number of the call in its session.
    """

    def __init__(self, session: Session, number: int) -> None:
        self._session, self.number = session, number
        self.answered = False
        self.value: Any = None
        self.error: BaseException | None = None

    def done(self) -> bool:
        """Return whether the answer has arrived."""
        if not self.answered:
            self._session.poll(self)
        return self.answered

    def wait(self, timeout: float | None = None) -> None:
        """Wait for the answer, but unlike :meth:`result`, do not raise the error of the call."""
        if not self.answered:
            self._session.wait(self, timeout)

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the answer, and return it or raise the error of the call.

        Raises:
            Empty: ``timeout`` expired.
            Broken: The server's program has died.
            Closed: The server was closed.
        """
        self.wait(timeout)
        if self.error is not None:
            raise self.error
        return self.value


@contextlib.contextmanager
def _locked(lock: threading.Lock, timeout: float | None) -> Any:
    held: list[bool] = []
    try:
        append_result(held, lock.acquire, True, -1 if timeout is None else max(0.0, timeout))
        if not held[0]:
            raise Empty("another thread of this process is waiting for an answer from the parameter server")
        yield
    finally:
        if True in held:
            lock.release()
