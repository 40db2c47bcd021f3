"""Start and end one worker's process, and know for certain when it has ended.

While a pidfd is open it names exactly this process, even if the kernel uses its number again. It also reports
ends that Python can't know. If Python's forkserver has ended, ``multiprocessing`` says that its children have
ended, although they still run. If the system refuses pidfds, this module asks ``multiprocessing``, and kills
such a child.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import select
import signal
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from flowchan.run.crew.process_exit import exit_text
from flowchan.run.crew.process_start import forkserver_pid, start_process
from flowchan.transport.pidfd import open_pidfd

if TYPE_CHECKING:
    import psutil  # slow to import, and needed only if the system refuses pidfds

UNKNOWN = 255
"""The exit code that ``multiprocessing`` reports for a child whose forkserver has ended. It also stands for a
child that the program has collected."""


class WorkerProcess:
    """A process that has been started.

    ``pidfd`` is readable once it has ended; it is ``None`` if the system refuses one, or if the process had
    ended already.
    """

    def __init__(self, name: str, target: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        self._process = multiprocessing.get_context().Process(target=target, args=arguments, name=name)
        start_process(self._process)
        assert self._process.pid is not None
        self.pid = self._process.pid
        self.started_at = time.monotonic()
        self.pidfd: int | None = None
        self._is_of_server = self._process._start_method == "forkserver"
        self._server = forkserver_pid() or 0
        self._collected_elsewhere = False
        # identifies the process by its start time where the system has no pidfds
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
        """Tell whether the process ends for certain within ``timeout`` seconds.

        Then none of its threads runs any more.
        """
        if self.pidfd is not None:
            poll = select.poll()
            poll.register(self.pidfd, select.POLLIN)
            return bool(poll.poll(1000 * timeout))
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
            except OSError:  # the system refused it
                pass
        (self._process.kill if number == signal.SIGKILL else self._process.terminate)()

    def _end_lost(self) -> bool:
        """Kill a process that still runs although Python says that it has ended: its exit code is lost.

        Return True while it runs.
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
        except OSError:  # no descriptor is free for the check
            return True
        self._lost = True
        return True

    @property
    def exitcode(self) -> int:
        """The exit code of the process, once it has ended."""
        self._reap()
        return self._process.exitcode or 0

    def how_it_ended(self, lack_of_memory: bool) -> str:
        """Say in words how the process ended.

        ``lack_of_memory``: the kernel has killed a process for lack of memory.
        """
        if self._lost:
            return "was killed or ended: its exit code is unknown, because Python's forkserver was killed"
        if self.exitcode == UNKNOWN and self._collected_elsewhere:
            return (
                "ended, and its exit code is unknown, because the program ignores SIGCHLD or "
                "collects its children"
            )
        if self.exitcode == UNKNOWN and self._is_of_server and _has_ended(self._server) is not False:
            return "ended, and its exit code is unknown, because Python's forkserver was killed"
        return exit_text(self.exitcode, lack_of_memory)

    def _reap(self) -> None:
        """Wait for the exit code.

        Another thread may be collecting it, as ``multiprocessing`` does when a process is started or listed,
        and stores it here in a moment. Code of the program may also have collected it.
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
        """Release a process that has ended: its zombie and its descriptor."""
        self._reap()
        pidfd, self.pidfd = self.pidfd, None
        if pidfd is not None:
            os.close(pidfd)
        self._process.close()


def _has_ended(child: int) -> bool | None:
    """Tell whether a child of this process has ended and can be collected. None: it has been collected."""
    try:
        return os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None
    except ChildProcessError:
        return None
