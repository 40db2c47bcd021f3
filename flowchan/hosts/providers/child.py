"""Run a remote agent through a local process, such as ``ssh`` or ``srun``."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Sequence

from flowchan.errors import HostError
from flowchan.hosts.providers.output import OutputRelay, ProcessOutput
from flowchan.hosts.providers.provider import Launch

Explain = Callable[[int, ProcessOutput], str | None]
"""Function that returns why an agent ended, given the exit code (negative for a signal) and the output.

``None`` means that the agent may still be running, although the local process has ended.
"""

GENTLY = 5.0  # seconds in which a process may end its remote processes before it is sent SIGKILL
UNKNOWN_EXIT = (
    "ended with an unknown exit code, because the program ignores SIGCHLD or reaps its child processes"
)


class AgentProcess:
    """Child process through which an agent runs.

    The child runs in a new session, so Ctrl-C in a terminal does not end it; the driver decides when to end
    it. The child's output is relayed line by line, prefixed with the host's name. The signal ``kill_by``
    makes the child end the agent.
    """

    def __init__(
        self,
        host: str,
        command: Sequence[str],
        launch: Launch,
        explain: Explain,
        *,
        kill_by: signal.Signals = signal.SIGKILL,
    ) -> None:
        self._kill_by = kill_by
        self._host = host
        self._explain = explain
        self._why: str | None = None
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise HostError(f"{host}: {command[0]} can't be started here: {error.strerror}", host) from error
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._relay = OutputRelay(host, self._process.stdout)
        with contextlib.suppress(BrokenPipeError):  # if the child has already ended, ended() reports why
            os.write(self._process.stdin.fileno(), launch.stdin)
        self._process.stdin.close()

    def ended(self) -> str | None:
        if self._why is None and self._process.returncode is None and (code := self._exitcode()) is not None:
            self._why = self._explain(code, self._relay.finish())
        return self._why

    def waits(self) -> bool:
        return False

    def _exitcode(self) -> int | None:
        """Return the exit code if the child has ended.

        The child stays a zombie until :meth:`close`, so that its process ID is not reused.
        """
        try:
            end = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            self._process.wait()  # other code has reaped the process, so this returns at once
            self._why = f"{self._host}: {UNKNOWN_EXIT}"
            return None
        if end is None:
            return None
        return end.si_status if end.si_code == os.CLD_EXITED else -end.si_status

    def kill(self) -> None:
        self._signal(self._kill_by)

    def _signal(self, number: signal.Signals) -> None:
        if self._process.returncode is None:  # after the process is reaped, another process may get its id
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, number)

    def close(self) -> None:
        if self._process.returncode is None:
            self.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(GENTLY)
            self._signal(signal.SIGKILL)
            code = self._process.wait()
            self._why = self._why or self._explain(code, self._relay.finish())
        self._relay.close()
