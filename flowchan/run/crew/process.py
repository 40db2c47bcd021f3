"""Start and end one worker process, and detect its end reliably.

An open pidfd always refers to the same process, even if the kernel reuses the process ID. ``multiprocessing``
is less reliable: once Python's forkserver has ended, it reports that the forkserver's children have ended
too, although they still run. If the system refuses pidfds, this module relies on ``multiprocessing``. This
module then kills a child that ``multiprocessing`` wrongly reports as ended.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import select
import signal
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from flowchan.run.crew.process_exit import exit_text
from flowchan.run.crew.process_start import forkserver_pid, start_process
from flowchan.run.worker.stack_file import READY, SIGNAL, StackFile, serving_stacks
from flowchan.transport.pidfd import open_pidfd

if TYPE_CHECKING:
    import psutil  # slow to import, and needed only without pidfds

UNKNOWN = 255
"""Exit code that ``multiprocessing`` reports for a child whose forkserver has ended. It is also used for a
child that the program itself has reaped."""


class WorkerProcess:
    """Worker process that has been started.

    ``pidfd`` becomes readable when the process ends. ``pidfd`` is ``None`` if the system refuses pidfds, or
    if the process ended too early.
    """

    def __init__(self, name: str, target: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        self._stacks = StackFile()
        # Another thread may ask for stacks while the process is being closed.
        self._descriptors = threading.Lock()
        self._is_closed = False
        try:
            self._process = multiprocessing.get_context().Process(
                target=serving_stacks, args=(self._stacks, target, arguments), name=name
            )
            start_process(self._process)
        except BaseException:
            self._stacks.close()
            raise
        assert self._process.pid is not None
        self.pid = self._process.pid
        self.started_at = time.monotonic()
        self.pidfd: int | None = None
        self._is_of_server = self._process._start_method == "forkserver"
        self._server = forkserver_pid() or 0
        self._collected_elsewhere = False
        # Identifies the process by its start time if the system refuses pidfds.
        self._known: psutil.Process | None = None
        self._lost = False
        try:
            self._find()
        except BaseException:
            self._process.kill()
            self.close()
            raise

    def _find(self) -> None:
        try:
            self.pidfd = open_pidfd(self.pid)
        except ProcessLookupError:
            return
        if self.pidfd is None:
            import psutil

            with contextlib.suppress(psutil.NoSuchProcess):
                self._known = psutil.Process(self.pid)

    def ended(self, timeout: float = 0.0) -> bool:
        """Wait up to ``timeout`` seconds, and return whether the process and all its threads have ended."""
        if self.pidfd is not None:
            return _is_readable(self.pidfd, timeout)
        deadline = time.monotonic() + timeout
        self._process.join(timeout)
        while self._process.exitcode is not None and self._end_lost():
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.001)
        return self._process.exitcode is not None

    def terminate(self) -> None:
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        self._send(signal.SIGKILL)

    def _send(self, number: signal.Signals) -> None:
        if self.pidfd is not None:
            try:
                signal.pidfd_send_signal(self.pidfd, number)
                return
            except ProcessLookupError:
                return
            except OSError:  # the system refuses to send signals through pidfds
                pass
        (self._process.kill if number == signal.SIGKILL else self._process.terminate)()

    def _end_lost(self) -> bool:
        """Kill a process that Python wrongly reports as ended. Its exit code is lost.

        Return True while the process is still running.
        """
        if self._known is None:
            return False
        import psutil

        try:
            if not self._known.is_running() or self._known.status() == psutil.STATUS_ZOMBIE:
                return False
            self._known.kill()
        except psutil.NoSuchProcess:
            return False
        except OSError:  # no file descriptor is left for the check
            return True
        self._lost = True
        return True

    @property
    def exitcode(self) -> int:
        """Return the exit code of a process that has ended."""
        self._reap()
        return self._process.exitcode or 0

    def how_it_ended(self, lack_of_memory: bool) -> str:
        """Describe how the process ended.

        ``lack_of_memory`` is true if the kernel has just killed a process because memory ran out.
        """
        if self._lost:
            return "was killed or ended: its exit code is unknown, because Python's forkserver was killed"
        if self.exitcode == UNKNOWN and self._collected_elsewhere:
            return (
                "ended, and its exit code is unknown, because the program ignores SIGCHLD or reaps its "
                "child processes"
            )
        if self.exitcode == UNKNOWN and self._is_of_server and _has_ended(self._server) is not False:
            return "ended, and its exit code is unknown, because Python's forkserver was killed"
        return exit_text(self.exitcode, lack_of_memory)

    def _reap(self) -> None:
        """Wait until the exit code is known.

        Another thread may be reaping the process right now, because ``multiprocessing`` does this whenever it
        starts or lists processes. The exit code then becomes known shortly. User code may also have reaped
        the process.
        """
        polls = 100
        while self._process.exitcode is None:
            time.sleep(0.001)
            if not self._is_of_server and _has_ended(self.pid) is None:
                polls -= 1
                if polls == 0:
                    self._collected_elsewhere = True
                    self._process._popen.returncode = UNKNOWN  # type: ignore[attr-defined]

    def close(self) -> None:
        """Reap a process that has ended, and close its descriptors."""
        self._reap()
        with self._descriptors:
            self._is_closed = True
            pidfd, self.pidfd = self.pidfd, None
            if pidfd is not None:
                os.close(pidfd)
            self._stacks.close()
        self._process.close()

    # --- stacks; any thread may call the following methods ---

    def is_gone(self) -> bool:
        """Return whether the process has exited."""
        with self._descriptors:
            return self._is_closed or (self.pidfd is not None and _is_readable(self.pidfd))

    def is_starting(self) -> bool:
        """Return whether the process cannot write its stacks yet."""
        with self._descriptors:
            return not self._is_closed and not self._stacks.state

    def ask_for_stacks(self) -> str:
        """Ask the process to write its stacks. If this is impossible, return the reason, otherwise ""."""
        with self._descriptors:
            if self.pidfd is None:
                return "it has ended, or the system does not allow pidfds"
            if self._stacks.state != READY:
                return f"it uses signal {SIGNAL:d} for something else"
            self._stacks.clear()
            try:
                signal.pidfd_send_signal(self.pidfd, SIGNAL)
            except OSError as error:
                return f"it cannot be sent a signal: {error.strerror}"
        return ""

    def written_stacks(self) -> str | None:
        """Return the stacks that the process wrote after the request, or None while they are incomplete.

        Return an empty string if the process has been closed.
        """
        with self._descriptors:
            return "" if self._is_closed else self._stacks.answer()

    def last_stacks(self) -> str:
        """Return the stacks that the process wrote just before a time limit killed it, or an empty string."""
        with self._descriptors:
            return "" if self._is_closed else self._stacks.last_words()


def _is_readable(fd: int, timeout: float = 0.0) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(1000 * timeout))


def _has_ended(child: int) -> bool | None:
    """Return whether a child of this process can be reaped, or None if it was already reaped."""
    try:
        return os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None
    except ChildProcessError:
        return None
