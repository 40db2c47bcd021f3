"""Launch several processes of a script on this host, with the environment variables that torchrun sets.

Each rank leads its own process group, so that its children can be killed with it. Ctrl-C therefore reaches a
rank only through this process. If this process is killed, the kernel kills the ranks, and a guard process
kills their children.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO, TextIO

import click

from flowchan.run.crew.at_exit import die_with
from flowchan.run.crew.process_exit import signal_name
from flowchan.transport.interrupts import interrupts_deferred, signal_of, terminate_as_interrupt
from flowchan.transport.tcp import joined, listen

_OWN_END = 1.0  # seconds that the other ranks have to exit after a failure, before they get SIGTERM
_POLL_INTERVAL_S = 0.05
_FOLLOWED = ("MemberDied", "MemberLeft")  # errors that a rank raises only because another rank has failed

_GUARD = """
import os, sys
groups = [int(line) for line in sys.stdin]
for group in groups:
    try:
        os.killpg(group, 9)
    except OSError:
        pass
"""

Tell = Callable[[int, str, bool], None]
"""Function that receives a rank, a line that the rank wrote, and whether it wrote to standard error."""


def show(rank: int, line: str, is_error: bool) -> None:
    """Print a line that a rank wrote, with the rank as a prefix."""
    click.echo(f"[{rank}] {line}", err=is_error)


class Logs:
    """Writes the output of each rank to files in ``folder``.

    Args:
        folder: Folder of the files.

    Raises:
        BadParameter: A file cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[tuple[int, bool], TextIO] = {}
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _refused(error, folder) from None

    def __call__(self, rank: int, line: str, is_error: bool) -> None:
        """Append a line to the file of its rank and stream."""
        path = self._folder / str(rank) / ("stderr.log" if is_error else "stdout.log")
        try:
            if (rank, is_error) not in self._files:
                path.parent.mkdir(exist_ok=True)
                self._files[rank, is_error] = path.open("w", buffering=1, encoding="utf-8")
            self._files[rank, is_error].write(line + "\n")
        except OSError as error:
            raise _refused(error, path) from None

    def __enter__(self) -> Logs:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            # close() fails only if an earlier write failed, and that error has already been reported.
            with contextlib.suppress(OSError):
                file.close()


def _refused(error: OSError, path: Path) -> click.BadParameter:
    where = error.filename or str(path)
    return click.BadParameter(f"can't write {where}: {error.strerror}", param_hint="--log-dir")


def cores_for(local: int, count: int) -> list[int]:
    """Return the cores for one of ``count`` ranks on this host. The list is empty if there are too few."""
    cores = sorted(os.sched_getaffinity(0))
    return (
        cores[len(cores) * local // count : len(cores) * (local + 1) // count] if len(cores) >= count else []
    )


class Guard:
    """Process that kills all registered process groups when this process ends."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _GUARD],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            process_group=0,  # in its own group, so that Ctrl-C does not end the guard
        )

    def tell(self, group: int) -> None:
        """Register a process group."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"%d\n" % group)
        self._process.stdin.flush()

    def close(self) -> None:
        """End the guard after all processes that it would kill have ended."""
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()


class Rank:
    """Process of a rank, and the last line that the process wrote to standard error.

    The process runs on the listed ``cores``, or on all cores if the list is empty.
    """

    def __init__(
        self, number: int, command: Sequence[str], environ: dict[str, str], tell: Tell, cores: list[int]
    ) -> None:
        launcher = os.getpid()

        def prepare() -> None:
            die_with(launcher)
            if cores:
                os.sched_setaffinity(0, cores)

        self.number = number
        self._tell = tell
        self.process = subprocess.Popen(
            command,
            env=environ | {"RANK": str(number), "ROLE_RANK": str(number)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            process_group=0,
            preexec_fn=prepare,
        )
        self._code: int | None = None
        self.last = ""
        self._unfinished = {False: b"", True: b""}

    def print_line(self, data: bytes, is_error: bool) -> None:
        """Pass on the complete lines in ``data``. Empty ``data`` means that the output has ended."""
        *lines, rest = (self._unfinished[is_error] + data).split(b"\n")
        if not data and rest:
            lines, rest = [rest], b""
        self._unfinished[is_error] = rest
        for line in lines:
            text = line.decode(errors="replace")
            self._tell(self.number, text, is_error)
            self.last = text if is_error and text.strip() else self.last

    def code(self) -> int | None:
        """Return the exit code as ``Popen`` does, or ``None`` while the process runs.

        The process is reaped only in :meth:`close`. Until then, no other process can get its process ID or
        group ID.
        """
        if self._code is None:
            end = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if end is not None:
                self._code = end.si_status if end.si_code == os.CLD_EXITED else -end.si_status
        return self._code

    def close(self) -> None:
        """Kill the process group and close the pipes."""
        self.signal(signal.SIGKILL)
        self.process.wait()
        for pipe in (self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()

    def signal(self, number: int) -> None:
        """Send a signal to the process group, if the group still exists."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def failure(self) -> str:
        """Return one line that says why the rank failed, or an empty string if it has not failed."""
        code = self.code()
        if not code:
            return ""
        how = f"was killed by {signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
        return f"rank {self.number} (process {self.process.pid}) {how}{f': {self.last}' if self.last else ''}"


class LaunchJob:
    """Runs all ranks of a script on this host, from their start until all have ended.

    ``first`` is the number of the first rank. With ``pin``, each rank gets its own cores if the host has
    enough. Ranks still running ``shutdown_timeout`` seconds after they were asked to end are killed.
    """

    def __init__(
        self,
        count: int,
        command: Sequence[str],
        environ: dict[str, str],
        tell: Tell,
        pin: bool,
        shutdown_timeout: float,
        first: int = 0,
    ) -> None:
        self._shutdown_timeout = shutdown_timeout
        self.interrupted_by = 0  # number of the first signal, if any
        # Ranks that failed before any rank was asked to end, in the order in which the launcher noticed this.
        self._failed: list[Rank] = []
        self._end_by = float("inf")
        self._kill_by = float("inf")
        self._selector = selectors.DefaultSelector()
        self.ranks: list[Rank] = []
        self._guard = Guard()
        try:
            for local in range(count):
                cores = cores_for(local, count) if pin else []
                # An interrupt inside this block could leave a running rank that no process would kill.
                with interrupts_deferred():
                    self.ranks.append(
                        Rank(first + local, command, environ | {"LOCAL_RANK": str(local)}, tell, cores)
                    )
                    self._guard.tell(self.ranks[-1].process.pid)
        except BaseException:
            self.close()
            raise
        for rank in self.ranks:
            for pipe, is_error in ((rank.process.stdout, False), (rank.process.stderr, True)):
                assert pipe is not None
                self._selector.register(pipe, selectors.EVENT_READ, (rank, is_error))

    @property
    def first_failure(self) -> str:
        """Description of the failure that caused the others; empty if no rank failed."""
        return first_of([rank.failure() for rank in self._failed])

    def run(self) -> None:
        """Wait until all ranks have ended and all of their output has been passed on."""
        while True:
            try:
                if not self.goes_on():
                    return
                self.poll()
            except KeyboardInterrupt as interrupt:
                self.interrupt(signal_of(interrupt))

    def goes_on(self) -> bool:
        """Return whether a rank is still running or has output that has not been passed on."""
        return bool(self._selector.get_map()) or any(rank.code() is None for rank in self.ranks)

    def close(self) -> None:
        """Kill all ranks and end the guard."""
        for rank in self.ranks:
            rank.close()
        self._guard.close()
        self._selector.close()

    def poll(self) -> None:
        """Wait briefly for new output, and pass it on. If a rank has failed, end the others."""
        if not self._selector.get_map():
            time.sleep(_POLL_INTERVAL_S)
        for key, _ in self._selector.select(_POLL_INTERVAL_S):
            rank, is_error = key.data
            pipe: BinaryIO = key.fileobj  # type: ignore[assignment]
            data = os.read(pipe.fileno(), 1 << 16)
            rank.print_line(data, is_error)
            if not data:
                self._selector.unregister(pipe)
        now = time.monotonic()
        if self._kill_by == float("inf"):  # no rank has been asked to end yet
            new = [rank for rank in self.ranks if rank.failure() and rank not in self._failed]
            if new and not self._failed:
                self._end_by = now + _OWN_END
            self._failed += new
        if now > self._end_by:
            self._end(signal.SIGTERM, now)
        if now > self._kill_by:
            self._end(signal.SIGKILL, now)

    def interrupt(self, number: int) -> None:
        """Send the signal ``number`` (SIGINT or SIGTERM) to the ranks. A second call kills them."""
        self._end(signal.SIGKILL if self.interrupted_by else number, time.monotonic())
        self.interrupted_by = self.interrupted_by or number

    def _end(self, number: int, now: float) -> None:
        self._end_by, self._kill_by = float("inf"), now + self._shutdown_timeout
        for rank in self.ranks:
            if rank.code() is None or number == signal.SIGKILL:
                rank.signal(number)


def variables(
    count: int, local_count: int, master: str, job: str, group: int = 0, groups: int = 1
) -> dict[str, str]:
    """Return the environment that all ranks on a host share, including torchrun's variables.

    The variables that identify a single rank are missing. ``local_count`` of the ``count`` ranks run on this
    host, which is host number ``group`` of ``groups``. ``master`` is a free address on the host of rank 0.
    """
    address, _, port = master.rpartition(":")
    return {
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        **os.environ,
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(local_count),
        "GROUP_RANK": str(group),
        "GROUP_WORLD_SIZE": str(groups),
        "ROLE_NAME": "default",
        "ROLE_WORLD_SIZE": str(count),
        "MASTER_ADDR": address.strip("[]"),
        "MASTER_PORT": port,
        "TORCHELASTIC_RUN_ID": job,
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
    }


def first_of(failures: Sequence[str]) -> str:
    """Return the failure that caused the others, or an empty string if no rank failed.

    The rank that ended first may have failed only because of another rank, which ends later.
    """
    own = (text for text in failures if not any(word in text for word in _FOLLOWED))
    return next(own, (*failures, "")[0])


def free_address(host: str) -> str:
    """Return an address on this host with a free port."""
    with listen(joined((host, 0))) as listener:
        return listener.address


def launch(
    count: int, script: Sequence[str], tell: Tell, pin: bool, shutdown_timeout: float
) -> tuple[str, int]:
    """Run all ranks of a script until they end. The script may also be a module after ``-m``.

    Ranks still running ``shutdown_timeout`` seconds after they were asked to end are killed.

    Return a description of the first failure and the number of the signal that interrupted the job. The
    description is empty if no rank failed, and the number is 0 if no signal arrived.
    """
    environ = variables(count, count, free_address("127.0.0.1"), secrets.token_hex(8))
    with terminate_as_interrupt():
        job = LaunchJob(count, [sys.executable, *script], environ, tell, pin, shutdown_timeout)
        try:
            job.run()
        finally:
            job.close()
    return job.first_failure, job.interrupted_by
