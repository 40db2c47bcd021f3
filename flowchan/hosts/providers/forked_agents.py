"""Agents on this machine, as the program has them. They are forked by its *seed*, a process that has imported
flowchan for all of them (:mod:`flowchan.hosts.fork_server`): that takes a tenth of the time of a new Python.

The first agent starts the seed; the program's end ends it, whatever ends the program. What is settled when a
process starts, or when it imports, is the seed's; when it is another for the program by now, the next agent
starts another seed.
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
from flowchan.run.run import abort_unfinished

LENGTH = 8  # bytes, in which a file that says what an agent is says how long that is
GENTLY = 5.0  # seconds for a seed to end by itself
AT_START = ("PYTHON", "LD_", "LC_", "LANG", "HOME", "GLIBC_", "MALLOC_", "OPENSSL_")
"""How variables begin that count when a process starts, or when it imports what the seed has imported."""
LIMITS = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]


def _inherited() -> tuple[Any, ...]:
    """What a process started now would have from this one, and keep."""
    here = os.stat(".")  # is there even when it has no name any more
    return (
        sys.executable,
        (here.st_dev, here.st_ino),
        {name: value for name, value in os.environ.items() if name.startswith(AT_START)},
        [resource.getrlimit(limit) for limit in LIMITS],
        (os.getresuid(), os.getresgid(), os.getgroups()),
        (os.sched_getaffinity(0), os.getpriority(os.PRIO_PROCESS, 0)),
        _umask(),
    )


def _umask() -> str:
    """Without changing it, as ``os.umask`` does for all threads."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("Umask:"):
                return line
    return ""


@contextlib.contextmanager
def _errors() -> Iterator[int]:
    """The descriptor of the program's standard error. Where that was closed before Python began, its number
    means whatever was opened since, or nothing."""
    if sys.__stderr__ is not None:
        yield 2
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        yield nowhere
    finally:
        os.close(nowhere)


class _Seed:
    """A seed of this program."""

    def __init__(self, inherited: tuple[Any, ...]) -> None:
        self.inherited = inherited
        self.agents = 0  # that are not closed
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with theirs, _errors() as errors:
                self._process: subprocess.Popen[bytes] = subprocess.Popen(
                    (sys.executable, "-m", "flowchan.hosts.fork_server"),
                    stdin=theirs.fileno(),
                    stdout=errors,
                    stderr=errors,
                    start_new_session=True,  # Ctrl-C in a terminal does not end it
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

    def ask(self, agent: socket.socket, said: int) -> None:
        """Asks for an agent."""
        with _errors() as errors:
            given = [agent.fileno(), said, errors]
            socket.send_fds(self._control, [b"+"], given, socket.MSG_NOSIGNAL)

    def how_it_ended(self) -> str:
        """After it has left a request unanswered. One that goes on could not receive what came with it."""
        try:
            return exit_text(self._process.wait(GENTLY))
        except subprocess.TimeoutExpired:
            return "has no descriptors free"

    def was_killed(self) -> bool:
        return (self._process.poll() or 0) < 0

    def end(self) -> None:
        """With all agents that it still has."""
        self._control.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(GENTLY)
        self._process.kill()
        self._process.wait()

    def leave(self) -> None:
        """In a forked child of the program: it is none of its own."""
        self._control.close()
        self._process.returncode = 0


class Forked:
    """An agent on this machine. Its end is certain, and killing it kills all that it has started.

    Our end of its socket is shut, and not just closed, to kill it: a process that was forked here meanwhile
    may have a copy."""

    def __init__(self, host: str, launch: Launch) -> None:
        self._host = host
        self._is_closed = False
        self._lock = threading.RLock()
        try:
            said = _written(host, launch)
            try:
                self._begin(said)
                if self._pid is None and self._seed.was_killed():  # with what it was asked for
                    self.close()
                    self._is_closed = False
                    self._begin(said)
            finally:
                os.close(said)
        except OSError as error:
            python = sys.executable
            raise HostError(f"{host}: {python} can't be started here: {error.strerror}", host) from error

    def _begin(self, said: int) -> None:
        """Has it forked, and hears of that."""
        self._pid: int | None = None
        self._why: str | None = None
        os.lseek(said, 0, os.SEEK_SET)  # which one that was lost has perhaps begun to read
        self._seed, self._socket = _asked(said)
        try:
            self._hear()
        except BaseException:  # Ctrl-C
            self.close()
            raise

    def ended(self) -> str | None:
        with self._lock:
            while self._why is None and self._hear(socket.MSG_DONTWAIT):
                pass
            return self._why

    def waits(self) -> bool:
        return False

    def _hear(self, how: int = 0) -> bool:
        """Hears the next word of it; whether there was one."""
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
        """The seed has died, or it lacked descriptors and the agent never began. With a dead seed the kernel
        ended the agent, and with that its workers; but perhaps not what these have started."""
        self._why = f"the agent {self._host} was lost with the process that forks agents here, which "
        self._why += self._seed.how_it_ended()
        if self._pid is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._pid, signal.SIGKILL)

    def kill(self) -> None:
        with self._lock, contextlib.suppress(OSError):  # it is closed, or the seed is dead
            self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            self.kill()
            while self._hear():
                pass
            _held.pop(id(self._socket), None)
            self._socket.close()
        _done_with(self._seed)


def _written(host: str, launch: Launch) -> int:
    """A file in memory that says what the agent is to be; the rest of it is the standard input."""
    told = json.dumps({"host": host, "arguments": launch.arguments, "environ": dict(os.environ)}).encode()
    said = os.memfd_create("flowchan agent")
    try:
        with open(said, "wb", closefd=False) as file:
            file.write(len(told).to_bytes(LENGTH, "little") + told + launch.stdin)
    except BaseException:
        os.close(said)
        raise
    return said


_lock = threading.Lock()
_seeds: list[_Seed] = []
"""The last of them gets the next agent; the others still have some."""
_held: dict[int, socket.socket] = {}
"""Our ends of the agents' sockets. No child has copies of them, that they end with this program."""


def _asked(said: int) -> tuple[_Seed, socket.socket]:
    """Asks for an agent: of whom, and our end of its socket."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    _held[id(ours)] = ours
    try:
        with theirs, _lock:
            seed = _seed()
            try:
                seed.ask(theirs, said)
            except ConnectionError:  # it has died just now
                seed = _seed(new=True)
                seed.ask(theirs, said)
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
    """Leaves no seed, and no agent of theirs."""
    with _lock:
        seeds = [*_seeds]
        _seeds.clear()
    for seed in seeds:
        seed.end()


def _end_at_exit() -> None:
    abort_unfinished()  # which else would take their agents for lost, and start others
    end_seeds()


def seeds() -> list[_Seed]:
    """Those of this program."""
    return [*_seeds]


def _begin_anew() -> None:
    """A forked child has a seed of its own, and none of its parent's agents."""
    global _lock
    _lock = threading.Lock()
    for seed in _seeds:
        seed.leave()
    for ours in _held.values():
        ours.close()
    _seeds.clear()
    _held.clear()


os.register_at_fork(after_in_child=_begin_anew)
