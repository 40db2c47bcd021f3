"""The seed of agents: a process that has imported what an agent is, and forks one whenever its program asks.

``python -m flowchan.hosts.fork_server`` is started by :mod:`flowchan.hosts.providers.forked_agents`, with
one end of a socket as its
standard input. Each message there asks for an agent, and comes with three descriptors: a socket of that agent
alone, a file whose beginning says what the agent is and whose rest is its standard input, and the program's
standard error. By its socket the program hears of the agent's process id, and how it ended; when the program
shuts its end, or has ended, the agent and all that it has started are killed.

The seed has one thread, so its children may be copies of it. It ends with the socket that it began with.
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
"""What each agent would import as soon as it dials, and starts a worker."""


class _Agent:
    """A child, until its end is known, its program has done with it, and nothing of it is left."""

    def __init__(self, pid: int, program: socket.socket) -> None:
        self.pid = pid
        self.program = program
        self.has_ended = False
        self.is_over = False  # its program has done with it

    def look(self) -> None:
        """Tells how it ended, if it has. It is left to be collected, so that its number means nobody else."""
        if self.has_ended:
            return
        end = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if end is not None:
            self.has_ended = True
            code = end.si_status if end.si_code == os.CLD_EXITED else -end.si_status
            _say(self.program, f"code {code}")

    def kill(self) -> None:
        # First alone, for it may not lead its group yet, and then never will.
        os.kill(self.pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def bury(self) -> None:
        """Leaves nothing of it. Waits, unless it has ended."""
        os.waitpid(self.pid, 0)
        self.program.close()


class _Order:
    """What a new process is to be."""

    def __init__(self, said: int, stderr: int) -> None:
        self._said, self._stderr = said, stderr

    def obey(self) -> None:
        """Becomes what ``python *arguments`` would be in the environment of the program."""
        length = int.from_bytes(os.read(self._said, LENGTH), "little")
        told: dict[str, Any] = json.loads(_read(self._said, length))
        for descriptor, stream in ((self._said, 0), (self._stderr, 1), (self._stderr, 2)):
            os.dup2(descriptor, stream)
        os.close(self._said)
        os.close(self._stderr)
        os.environ.clear()
        os.environ.update(told["environ"])
        time.tzset()
        arguments = tuple(told["arguments"])
        if arguments != AGENT:
            for number in (signal.SIGPIPE, signal.SIGXFSZ):  # which Python ignores
                signal.signal(number, signal.SIG_DFL)
            os.execv(sys.executable, (sys.executable, *arguments))
        show_name(f"agent {told['host']}")
        sys.argv[:] = [str(agent.__file__)]
        sys.stdout.reconfigure(line_buffering=os.isatty(1))  # type: ignore[union-attr]
        agent.main()


class Seed:
    """See above. ``control``: what asks for agents."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._pid = os.getpid()
        self._agents: dict[int, _Agent] = {}
        self._woken, self._wakes = socket.socketpair()  # whenever a child ends
        for end in (self._woken, self._wakes):
            end.setblocking(False)
        self._selector = selectors.DefaultSelector()
        for one in (control, self._woken):
            self._selector.register(one, selectors.EVENT_READ)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wakes.fileno(), warn_on_full_buffer=False)

    def grow(self) -> _Order:
        """Forks agents until the program has ended; returns only in these."""
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._control:
                    order = self._fork()
                    if order is not None:
                        return order
                elif key.fileobj is self._woken:
                    self._look()
                else:
                    self._let_go(key.data)

    def _fork(self) -> _Order | None:
        """In the new process, what it is to be."""
        try:
            word, got, _, _ = socket.recv_fds(self._control, 1, 3, socket.MSG_CMSG_CLOEXEC)
        except ConnectionError:
            word = b""
        if not word:
            self._end()
        if len(got) < 3:  # no descriptors are free, and the program sees that nothing comes
            for descriptor in got:
                os.close(descriptor)
            return None
        end, said, stderr = got
        program = socket.socket(fileno=end)
        try:
            pid = os.fork()
        except OSError as error:
            _say(program, f"refused {error.strerror}")
            program.close()
        else:
            if pid == 0:
                self._leave()
                program.close()
                return _Order(said, stderr)
            _say(program, f"pid {pid}")
            self._agents[pid] = _Agent(pid, program)
            self._selector.register(program, selectors.EVENT_READ, self._agents[pid])
        os.close(said)
        os.close(stderr)
        return None

    def _leave(self) -> None:
        """In a new process: what the seed has is none of its own, and it ends if the seed dies."""
        os.setsid()
        die_with(self._pid)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for one in (self._selector, self._control, self._woken, self._wakes):
            one.close()
        for other in self._agents.values():
            other.program.close()

    def _look(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._woken.recv(4096):
                pass
        for one in list(self._agents.values()):
            one.look()
            self._forget(one)

    def _let_go(self, one: _Agent) -> None:
        """Its program has done with it."""
        self._selector.unregister(one.program)
        one.is_over = True
        one.kill()
        one.look()
        self._forget(one)

    def _forget(self, one: _Agent) -> None:
        if one.has_ended and one.is_over:
            del self._agents[one.pid]
            one.bury()

    def _end(self) -> NoReturn:
        for one in self._agents.values():
            one.kill()
        for one in self._agents.values():
            one.bury()
        os._exit(0)


def _say(program: socket.socket, word: str) -> None:
    with contextlib.suppress(OSError):  # nobody listens any more
        program.send(word.encode(), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)


def _read(descriptor: int, length: int) -> bytes:
    parts = []
    while length and (part := os.read(descriptor, length)):
        parts.append(part)
        length -= len(part)
    return b"".join(parts)


def main() -> None:
    show_name("flowchan agents")
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    control = socket.socket(fileno=os.dup(0))
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):  # the program's standard error may end before the program
        os.dup2(nowhere, stream)
    os.close(nowhere)
    for name in SOON:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # else looking for cycles would copy what is shared
    Seed(control).grow().obey()


if __name__ == "__main__":
    from flowchan.hosts import fork_server

    fork_server.main()
