"""``flowchan launch``: several processes of one script on this host, with torchrun's variables.

Each rank is the leader of a process group of its own, so what it has started ends with it, and Ctrl-C reaches
it through this process. If this process is killed, the kernel kills the ranks.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import BinaryIO

import click

PATIENCE = 5.0  # seconds from the request to end until the kill
_OWN_END = 1.0  # seconds in which the others may end by themselves when one has failed
_LOOK = 0.05
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG
_FOLLOWED = ("MemberDied", "MemberLeft")  # what a rank says that failed because another one had
_libc = ctypes.CDLL(None)


class Rank:
    """One of the processes, and what it has said last."""

    def __init__(self, number: int, command: Sequence[str], environ: dict[str, str]) -> None:
        self.number = number
        self.process = subprocess.Popen(
            command,
            env=environ | {"RANK": str(number), "LOCAL_RANK": str(number)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            process_group=0,
            preexec_fn=lambda: _libc.prctl(_DIE_WITH_PARENT, signal.SIGKILL),
        )
        self.last = ""
        self._unfinished = {False: b"", True: b""}

    def say(self, data: bytes, is_error: bool) -> None:
        """Passes on whole lines with the rank before them; ``data`` is empty at the end."""
        *lines, rest = (self._unfinished[is_error] + data).split(b"\n")
        if not data and rest:
            lines, rest = [rest], b""
        self._unfinished[is_error] = rest
        for line in lines:
            text = line.decode(errors="replace")
            click.echo(f"[{self.number}] {text}", err=is_error)
            self.last = text if is_error and text.strip() else self.last

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def failure(self) -> str:
        """Why it failed, in a line; empty if it did not, or has not ended."""
        code = self.process.poll()
        if not code:
            return ""
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return f"rank {self.number} (process {self.process.pid}) {how}{f': {self.last}' if self.last else ''}"


class Job:
    """All ranks of a script, from their start until none is left."""

    def __init__(self, count: int, command: Sequence[str]) -> None:
        environ = variables(count)
        self.interrupts = 0
        self._failed: list[Rank] = []  # by themselves, in the order in which it was noticed
        self._end_by = float("inf")
        self._kill_by = float("inf")
        self._selector = selectors.DefaultSelector()
        self.ranks = [Rank(number, command, environ) for number in range(count)]
        for rank in self.ranks:
            for pipe, is_error in ((rank.process.stdout, False), (rank.process.stderr, True)):
                assert pipe is not None
                self._selector.register(pipe, selectors.EVENT_READ, (rank, is_error))

    @property
    def first_failure(self) -> str:
        """Who failed first, and why; empty if nobody did. Who fails because another one left may end sooner
        than that one."""
        texts = [rank.failure() for rank in self._failed]
        return next((text for text in texts if not any(word in text for word in _FOLLOWED)), (*texts, "")[0])

    def run(self) -> None:
        """Returns when all have ended and all that they said is passed on."""
        while self._selector.get_map() or any(rank.process.poll() is None for rank in self.ranks):
            try:
                self._look()
            except KeyboardInterrupt:
                self._interrupt()

    def close(self) -> None:
        """Leaves nothing, whatever has happened."""
        for rank in self.ranks:
            rank.signal(signal.SIGKILL)
            rank.process.wait()
            for pipe in (rank.process.stdout, rank.process.stderr):
                if pipe is not None:
                    pipe.close()
        self._selector.close()

    def _look(self) -> None:
        if not self._selector.get_map():
            time.sleep(_LOOK)
        for key, _ in self._selector.select(_LOOK):
            rank, is_error = key.data
            pipe: BinaryIO = key.fileobj  # type: ignore[assignment]
            data = os.read(pipe.fileno(), 1 << 16)
            rank.say(data, is_error)
            if not data:
                self._selector.unregister(pipe)
        now = time.monotonic()
        if self._kill_by == float("inf"):  # nobody was told to end
            new = [rank for rank in self.ranks if rank.failure() and rank not in self._failed]
            if new and not self._failed:
                self._end_by = now + _OWN_END
            self._failed += new
        if now > self._end_by:
            self._end(signal.SIGTERM, now)
        if now > self._kill_by:
            self._end(signal.SIGKILL, now)

    def _interrupt(self) -> None:
        self.interrupts += 1
        self._end(signal.SIGINT if self.interrupts == 1 else signal.SIGKILL, time.monotonic())

    def _end(self, number: int, now: float) -> None:
        self._end_by, self._kill_by = float("inf"), now + PATIENCE
        for rank in self.ranks:
            if rank.process.poll() is None or number == signal.SIGKILL:
                rank.signal(number)


def variables(count: int) -> dict[str, str]:
    """The environment of all ranks, as torchrun sets it; what says which rank it is comes in addition."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    return {
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        **os.environ,
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": secrets.token_hex(8),
    }


def launch(count: int, script: str, args: Sequence[str]) -> tuple[str, bool]:
    """Runs all ranks to their end. Who failed first and why, empty if nobody did, and whether it was
    interrupted."""
    job = Job(count, [sys.executable, script, *args])
    try:
        job.run()
    finally:
        job.close()
    return job.first_failure, bool(job.interrupts)
