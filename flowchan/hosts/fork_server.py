"""Fork agents on this machine from a server process.

The server has imported the agent's modules, and forks one agent per request.

:mod:`flowchan.hosts.providers.forked_agents` starts ``python -m flowchan.hosts.fork_server`` with one end of
a socket as its standard input. Each message on that socket requests an agent and carries three descriptors: a
socket for this agent, a file, and the program's standard error. The file contains a description of the agent,
followed by the agent's standard input. The server reports the agent's process ID and exit on the agent's
socket. When the program shuts down its end of that socket, or ends, the server kills the agent and all
processes that the agent started.

The server has a single thread, and can therefore fork safely. The server ends when its control socket closes.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import sys
import time
from typing import Any, NoReturn

from flowchan.hosts import agent
from flowchan.hosts.providers.forked_agents import LENGTH
from flowchan.hosts.providers.provider import AGENT
from flowchan.run.crew.at_exit import die_with
from flowchan.run.worker.process_main import show_name

SOON = ("encodings.idna", "multiprocessing.popen_fork")
"""Modules that the server imports in advance, because each agent would otherwise import them when it dials
and starts a worker."""


class _Agent:
    """Forked agent. It exists until the process has ended and the program has released it."""

    def __init__(self, pid: int, program: socket.socket) -> None:
        self.pid = pid
        self.program = program
        self.has_ended = False
        self.is_over = False  # true if the program has released the agent

    def check(self) -> None:
        """Report how the agent ended, if it has ended.

        The process stays a zombie, so that its process ID is not reused.
        """
        if self.has_ended:
            return
        end = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if end is not None:
            self.has_ended = True
            code = end.si_status if end.si_code == os.CLD_EXITED else -end.si_status
            _report(self.program, f"code {code}")

    def kill(self) -> None:
        # Kill the process before its group. If the process has not created its group yet, this order ensures
        # that it cannot create one after killpg().
        os.kill(self.pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def reap(self) -> None:
        """Reap the process and close its socket. If the process is still running, wait for its end."""
        os.waitpid(self.pid, 0)
        self.program.close()


class _Order:
    """Requested process. ``launch_fd`` is a file that describes it."""

    def __init__(self, launch_fd: int, stderr: int) -> None:
        self._launch_fd, self._stderr = launch_fd, stderr

    def obey(self) -> None:
        """Make this process behave like ``python *arguments`` in the program's environment."""
        length = int.from_bytes(os.read(self._launch_fd, LENGTH), "little")
        launch: dict[str, Any] = json.loads(_read(self._launch_fd, length))
        for descriptor, stream in ((self._launch_fd, 0), (self._stderr, 1), (self._stderr, 2)):
            os.dup2(descriptor, stream)
        os.close(self._launch_fd)
        os.close(self._stderr)
        os.environ.clear()
        os.environ.update(launch["environ"])
        time.tzset()
        arguments = tuple(launch["arguments"])
        if arguments != AGENT:
            for number in (signal.SIGPIPE, signal.SIGXFSZ):  # exec() would keep the signals ignored
                signal.signal(number, signal.SIG_DFL)
            os.execv(sys.executable, (sys.executable, *arguments))
        show_name(f"agent {launch['host']}")
        sys.argv[:] = [str(agent.__file__)]
        sys.stdout.reconfigure(line_buffering=os.isatty(1))  # type: ignore[union-attr]
        agent.main()


class Seed:
    """Forks agents on request; see the module docstring. Requests arrive on the socket ``control``."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._pid = os.getpid()
        self._agents: dict[int, _Agent] = {}
        self._woken, self._wakes = socket.socketpair()  # the exit of a child makes _woken readable
        for end in (self._woken, self._wakes):
            end.setblocking(False)
        self._selector = selectors.DefaultSelector()
        for one in (control, self._woken):
            self._selector.register(one, selectors.EVENT_READ)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wakes.fileno(), warn_on_full_buffer=False)

    def grow(self) -> _Order:
        """Fork agents until the program has ended. Only the forked processes return."""
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._control:
                    order = self._fork()
                    if order is not None:
                        return order
                elif key.fileobj is self._woken:
                    self._check_agents()
                else:
                    self._let_go(key.data)

    def _fork(self) -> _Order | None:
        """Fork an agent. Return its description in the new process, and None in the server."""
        try:
            word, got, _, _ = socket.recv_fds(self._control, 1, 3, socket.MSG_CMSG_CLOEXEC)
        except ConnectionError:
            word = b""
        if not word:
            self._end()
        if len(got) < 3:  # out of descriptors; the program notices that the server does not answer
            for descriptor in got:
                os.close(descriptor)
            return None
        end, launch_fd, stderr = got
        program = socket.socket(fileno=end)
        try:
            pid = os.fork()
        except OSError as error:
            _report(program, f"refused {error.strerror}")
            program.close()
        else:
            if pid == 0:
                self._leave()
                program.close()
                return _Order(launch_fd, stderr)
            _report(program, f"pid {pid}")
            self._agents[pid] = _Agent(pid, program)
            self._selector.register(program, selectors.EVENT_READ, self._agents[pid])
        os.close(launch_fd)
        os.close(stderr)
        return None

    def _leave(self) -> None:
        """Detach a new process from the server, but make the kernel kill it if the server dies."""
        os.setsid()
        die_with(self._pid)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for one in (self._selector, self._control, self._woken, self._wakes):
            one.close()
        for other in self._agents.values():
            other.program.close()

    def _check_agents(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._woken.recv(4096):
                pass
        for one in list(self._agents.values()):
            one.check()
            self._forget(one)

    def _let_go(self, one: _Agent) -> None:
        """Kill an agent that the program has released."""
        self._selector.unregister(one.program)
        one.is_over = True
        one.kill()
        one.check()
        self._forget(one)

    def _forget(self, one: _Agent) -> None:
        if one.has_ended and one.is_over:
            del self._agents[one.pid]
            one.reap()

    def _end(self) -> NoReturn:
        for one in self._agents.values():
            one.kill()
        for one in self._agents.values():
            one.reap()
        os._exit(0)


def _report(program: socket.socket, word: str) -> None:
    with contextlib.suppress(OSError):  # the program may have closed its end
        program.send(word.encode(), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)


def _read(descriptor: int, length: int) -> bytes:
    parts = []
    while length and (part := os.read(descriptor, length)):
        parts.append(part)
        length -= len(part)
    return b"".join(parts)


def main() -> None:
    """Import the modules of agents, then serve requests until the control socket closes."""
    show_name("flowchan agents")
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    control = socket.socket(fileno=os.dup(0))
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):  # the program's standard error may close before this process ends
        os.dup2(nowhere, stream)
    os.close(nowhere)
    for name in SOON:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # keep the garbage collector from copying pages that agents share
    Seed(control).grow().obey()


if __name__ == "__main__":
    from flowchan.hosts import fork_server

    fork_server.main()
