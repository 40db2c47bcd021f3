"""Start agents on this machine: the program's side of the fork server.

The fork server (:mod:`flowchan.hosts.fork_server`) has already imported flowchan and forks each agent. A fork
takes a tenth of the time of a new Python process.

The first agent starts the fork server, which always ends with the program. Some settings take effect only
when a process starts or imports modules. Agents therefore have the fork server's values of these settings. If
the program has changed one of them, the next agent starts another server.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flowchan.errors import HostError
from flowchan.hosts.providers.provider import Launch
from flowchan.run.crew.process_exit import exit_text
from flowchan.run.unfinished_runs import abort_unfinished

LENGTH = 8  # size in bytes of the length field before an agent's description
GENTLY = 5.0  # seconds that a fork server has to end before it is sent a signal
AT_START = ("PYTHON", "LD_", "LC_", "LANG", "HOME", "GLIBC_", "MALLOC_", "OPENSSL_")
"""Prefixes of environment variables that take effect when a process starts, or when it imports the server's
modules."""
LIMITS = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]


def _inherited() -> tuple[Any, ...]:
    """Return the settings that a child inherits from this process and cannot change afterwards."""
    folder = os.stat(".")  # unlike its path, "." works even if the folder was removed
    return (
        sys.executable,
        (folder.st_dev, folder.st_ino),
        {name: value for name, value in os.environ.items() if name.startswith(AT_START)},
        [resource.getrlimit(limit) for limit in LIMITS],
        (os.getresuid(), os.getresgid(), os.getgroups()),
        (os.sched_getaffinity(0), os.getpriority(os.PRIO_PROCESS, 0)),
        _umask(),
    )


def _umask() -> str:
    """Read the umask. ``os.umask`` would change the umask of all threads for a moment."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("Umask:"):
                return line
    return ""


@contextlib.contextmanager
def _errors() -> Iterator[int]:
    """Yield a descriptor that refers to the program's standard error.

    If standard error was closed before Python started, descriptor 2 may be any other file. In that case,
    yield a descriptor of ``/dev/null``.
    """
    if sys.__stderr__ is not None:
        yield 2
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        yield nowhere
    finally:
        os.close(nowhere)


class _Seed:
    """Fork server of this program."""

    def __init__(self, inherited: tuple[Any, ...]) -> None:
        self.inherited = inherited
        self.agents = 0  # agents that have not been closed
        self._control, child_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with child_end, _errors() as errors:
                self._process: subprocess.Popen[bytes] = subprocess.Popen(
                    (sys.executable, "-m", "flowchan.hosts.fork_server"),
                    stdin=child_end.fileno(),
                    stdout=errors,
                    stderr=errors,
                    start_new_session=True,  # Ctrl-C in a terminal does not end the server
                )
        except BaseException:
            self._control.close()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def descriptor(self) -> int:
        return self._control.fileno()

    def serves(self, inherited: tuple[Any, ...]) -> bool:
        return self.inherited == inherited and self._process.poll() is None

    def ask(self, agent: socket.socket, launch_fd: int) -> None:
        """Request an agent."""
        with _errors() as errors:
            given = [agent.fileno(), launch_fd, errors]
            socket.send_fds(self._control, [b"+"], given, socket.MSG_NOSIGNAL)

    def how_it_ended(self) -> str:
        """Explain why a request got no answer.

        If the server is still running, it could not receive the descriptors.
        """
        try:
            return exit_text(self._process.wait(GENTLY))
        except subprocess.TimeoutExpired:
            return "has no file descriptors left"

    def was_killed(self) -> bool:
        return (self._process.poll() or 0) < 0

    def end(self) -> None:
        """End the server and all its remaining agents."""
        self._control.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(GENTLY)
        self._process.kill()
        self._process.wait()

    def leave(self) -> None:
        """Detach a forked child of the program from its parent's server."""
        self._control.close()
        self._process.returncode = 0


class Forked:
    """Agent on this machine, whose end this process always notices.

    Killing the agent also kills all processes that it started. To kill it, shut down this end of its socket.
    Closing this end may have no effect, because a process forked in the meantime may have a copy of it.
    """

    def __init__(self, host: str, launch: Launch) -> None:
        self._host = host
        self._is_closed = False
        self._lock = threading.RLock()
        try:
            launch_fd = _written(host, launch)
            try:
                self._begin(launch_fd)
                # Try once more if the server was killed while the request was pending.
                if self._pid is None and self._seed.was_killed():
                    self.close()
                    self._is_closed = False
                    self._begin(launch_fd)
            finally:
                os.close(launch_fd)
        except OSError as error:
            python = sys.executable
            raise HostError(f"{host}: {python} can't be started here: {error.strerror}", host) from error

    def _begin(self, launch_fd: int) -> None:
        """Request a fork, and wait until the agent has been forked."""
        self._pid: int | None = None
        self._why: str | None = None
        os.lseek(launch_fd, 0, os.SEEK_SET)  # a dead server may have read part of the file
        self._seed, self._socket = _request_agent(launch_fd)
        try:
            self._receive()
        except BaseException:  # for example Ctrl-C during the wait
            self.close()
            raise

    def ended(self) -> str | None:
        with self._lock:
            while self._why is None and self._receive(socket.MSG_DONTWAIT):
                pass
            return self._why

    def waits(self) -> bool:
        return False

    def _receive(self, how: int = 0) -> bool:
        """Receive the next message about the agent. Return False if none arrived."""
        try:
            word, _, about = self._socket.recv(4096, how).decode().partition(" ")
        except BlockingIOError:
            return False
        except ConnectionError:
            word = about = ""
        if word == "pid":
            self._pid = int(about)
        elif word == "code":
            self._why = f"the agent {self._host} {exit_text(int(about))}"
        elif word == "refused":
            self._why = f"the agent {self._host} can't be started here: {about}"
        elif self._why is None:
            self._lose()
        return word != ""

    def _lose(self) -> None:
        """Handle the loss of an agent whose server died or had too few descriptors to start the agent.

        When the server dies, the kernel ends the agent and its workers, but processes that the workers
        started may survive.
        """
        self._why = f"the agent {self._host} was lost with the fork server, which "
        self._why += self._seed.how_it_ended()
        if self._pid is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._pid, signal.SIGKILL)

    def kill(self) -> None:
        with self._lock, contextlib.suppress(OSError):  # the socket may be closed, or the server dead
            self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            self.kill()
            while self._receive():
                pass
            _held.pop(id(self._socket), None)
            self._socket.close()
        _done_with(self._seed)


def _written(host: str, launch: Launch) -> int:
    """Write the agent's description and its standard input to an in-memory file."""
    described = json.dumps(
        {"host": host, "arguments": launch.arguments, "environ": dict(os.environ)}
    ).encode()
    launch_fd = os.memfd_create("flowchan agent")
    try:
        with open(launch_fd, "wb", closefd=False) as file:
            file.write(len(described).to_bytes(LENGTH, "little") + described + launch.stdin)
    except BaseException:
        os.close(launch_fd)
        raise
    return launch_fd


_lock = threading.Lock()
_seeds: list[_Seed] = []
"""Fork servers. The last server starts the next agent, and the others still have agents."""
_held: dict[int, socket.socket] = {}
"""This program's ends of the agents' sockets. A child must not keep copies, or the agents would outlive this
program."""


def _request_agent(launch_fd: int) -> tuple[_Seed, socket.socket]:
    """Request an agent. Return the server that got the request, and this end of the agent's socket."""
    ours, agent_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    _held[id(ours)] = ours
    try:
        with agent_end, _lock:
            seed = _seed()
            try:
                seed.ask(agent_end, launch_fd)
            except ConnectionError:  # the server may have died just now
                seed = _seed(new=True)
                seed.ask(agent_end, launch_fd)
            seed.agents += 1
    except BaseException:
        _held.pop(id(ours))
        ours.close()
        raise
    return seed, ours


def _seed(*, new: bool = False) -> _Seed:
    inherited = _inherited()
    if new or not _seeds or not _seeds[-1].serves(inherited):
        _seeds.append(_Seed(inherited))
        atexit.unregister(_end_at_exit)
        atexit.register(_end_at_exit)
        _end_unused()
    return _seeds[-1]


def _end_unused() -> None:
    for seed in _seeds[:-1]:
        if not seed.agents:
            _seeds.remove(seed)
            seed.end()


def _done_with(seed: _Seed) -> None:
    with _lock:
        seed.agents -= 1
        _end_unused()


def end_seeds() -> None:
    """End all fork servers with their agents."""
    with _lock:
        seeds = [*_seeds]
        _seeds.clear()
    for seed in seeds:
        seed.end()


def _end_at_exit() -> None:
    abort_unfinished()  # first, so that no run replaces the agents that end now
    end_seeds()


def seeds() -> list[_Seed]:
    """Return this program's fork servers."""
    return [*_seeds]


def _reset_in_child() -> None:
    """Drop the parent's servers and agents in a forked child, which starts its own."""
    global _lock
    _lock = threading.Lock()
    for seed in _seeds:
        seed.leave()
    for ours in _held.values():
        ours.close()
    _seeds.clear()
    _held.clear()


os.register_at_fork(after_in_child=_reset_in_child)
