"""``flowchan launch``: several processes of one script on this host, with torchrun's variables.

Each rank is the leader of a process group of its own, so what it has started ends with it, and Ctrl-C reaches
it through this process. If this process is killed, the kernel kills the ranks, and a guard what they have
started.
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
from flowchan.transport.tcp import joined, listen

KILL_DELAY_S = 5.0  # seconds from the request to end until the kill
_OWN_END = 1.0  # seconds in which the others may end by themselves when one has failed
_LOOK = 0.05
_FOLLOWED = ("MemberDied", "MemberLeft")  # what a rank says that failed because another one had

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
"""Gets a line that a rank has said: its number, the line, whether it is of its standard error."""


def show(rank: int, line: str, is_error: bool) -> None:
    click.echo(f"[{rank}] {line}", err=is_error)


class Logs:
    """Writes what each rank says to files of its own in ``folder``. Raises ``BadParameter`` when it can't."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[tuple[int, bool], TextIO] = {}
        self._open = contextlib.ExitStack()
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise self._refused(error) from None

    def __call__(self, rank: int, line: str, is_error: bool) -> None:
        try:
            if (rank, is_error) not in self._files:
                place = self._folder / str(rank)
                place.mkdir(exist_ok=True)
                name = "stderr.log" if is_error else "stdout.log"
                file = (place / name).open("w", buffering=1, encoding="utf-8")
                self._files[rank, is_error] = self._open.enter_context(file)
            self._files[rank, is_error].write(line + "\n")
        except OSError as error:
            raise self._refused(error) from None

    def _refused(self, error: OSError) -> click.BadParameter:
        where = error.filename or str(self._folder)
        return click.BadParameter(f"can't write {where}: {error.strerror}", param_hint="--log-dir")

    def __enter__(self) -> Logs:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()


def cores_for(local: int, count: int) -> list[int]:
    """The cores that number ``local`` of ``count`` ranks on this host has for itself; none in particular
    where there are too few."""
    cores = sorted(os.sched_getaffinity(0))
    return (
        cores[len(cores) * local // count : len(cores) * (local + 1) // count] if len(cores) >= count else []
    )


class Guard:
    """A process that kills all that is in the process groups which it was told, once this process is gone."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _GUARD],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            process_group=0,  # Ctrl-C is not for it
        )

    def tell(self, group: int) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(b"%d\n" % group)
        self._process.stdin.flush()

    def close(self) -> None:
        """There is nothing left to be killed."""
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()


class Rank:
    """One of the processes, and what it has said last. ``cores``: where it runs, if not anywhere."""

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

    def say(self, data: bytes, is_error: bool) -> None:
        """Passes on whole lines with the rank before them; ``data`` is empty at the end."""
        *lines, rest = (self._unfinished[is_error] + data).split(b"\n")
        if not data and rest:
            lines, rest = [rest], b""
        self._unfinished[is_error] = rest
        for line in lines:
            text = line.decode(errors="replace")
            self._tell(self.number, text, is_error)
            self.last = text if is_error and text.strip() else self.last

    def code(self) -> int | None:
        """How it ended, as ``Popen`` says it. It is not collected before :meth:`close`, so that its number,
        and that of its group, mean nobody else."""
        if self._code is None:
            end = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if end is not None:
                self._code = end.si_status if end.si_code == os.CLD_EXITED else -end.si_status
        return self._code

    def close(self) -> None:
        """Leaves nothing of it."""
        self.signal(signal.SIGKILL)
        self.process.wait()
        for pipe in (self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def failure(self) -> str:
        """Why it failed, in a line; empty if it did not, or has not ended."""
        code = self.code()
        if not code:
            return ""
        how = f"was killed by {signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
        return f"rank {self.number} (process {self.process.pid}) {how}{f': {self.last}' if self.last else ''}"


class LaunchJob:
    """The ranks of a script on this host, ``first`` and those after it, from their start until none is
    left. ``pin``: each has cores of its own, if there are enough."""

    def __init__(
        self,
        count: int,
        command: Sequence[str],
        environ: dict[str, str],
        tell: Tell,
        pin: bool,
        first: int = 0,
    ) -> None:
        self.interrupts = 0
        self._failed: list[Rank] = []  # by themselves, in the order in which it was noticed
        self._end_by = float("inf")
        self._kill_by = float("inf")
        self._selector = selectors.DefaultSelector()
        self.ranks: list[Rank] = []
        self._guard = Guard()
        try:
            for local in range(count):
                cores = cores_for(local, count) if pin else []
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
        """Who failed first, and why; empty if nobody did."""
        return first_of([rank.failure() for rank in self._failed])

    def run(self) -> None:
        """Returns when all have ended and all that they said is passed on."""
        while self.goes_on():
            try:
                self.look()
            except KeyboardInterrupt:
                self.interrupt()

    def goes_on(self) -> bool:
        return bool(self._selector.get_map()) or any(rank.code() is None for rank in self.ranks)

    def close(self) -> None:
        """Leaves nothing, whatever has happened."""
        for rank in self.ranks:
            rank.close()
        self._guard.close()
        self._selector.close()

    def look(self) -> None:
        """Passes on what they have said, and ends them when one has failed. Waits a moment for more."""
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

    def interrupt(self) -> None:
        """As Ctrl-C; once more kills them."""
        self.interrupts += 1
        self._end(signal.SIGINT if self.interrupts == 1 else signal.SIGKILL, time.monotonic())

    def _end(self, number: int, now: float) -> None:
        self._end_by, self._kill_by = float("inf"), now + KILL_DELAY_S
        for rank in self.ranks:
            if rank.code() is None or number == signal.SIGKILL:
                rank.signal(number)


def variables(
    count: int, here: int, master: str, job: str, group: int = 0, groups: int = 1
) -> dict[str, str]:
    """The environment of all ranks on a host, as torchrun sets it; what says which rank it is comes in
    addition. ``here``: of ``count`` ranks, how many are on this host, which is number ``group`` of
    ``groups``. ``master``: an address of rank 0's host that is free."""
    address, _, port = master.rpartition(":")
    return {
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        **os.environ,
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(here),
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
    """Who fails because another one left may end sooner than that one."""
    own = (text for text in failures if not any(word in text for word in _FOLLOWED))
    return next(own, (*failures, "")[0])


def free_address(host: str) -> str:
    """With a port that nobody listens at now."""
    with listen(joined((host, 0))) as listener:
        return listener.address


def launch(count: int, script: Sequence[str], tell: Tell, pin: bool) -> tuple[str, bool]:
    """Runs all ranks of a script, or after ``-m`` of a module, to their end; its arguments follow. Who failed
    first and why, empty if nobody did, and whether it was interrupted."""
    environ = variables(count, count, free_address("127.0.0.1"), secrets.token_hex(8))
    job = LaunchJob(count, [sys.executable, *script], environ, tell, pin)
    try:
        job.run()
    finally:
        job.close()
    return job.first_failure, bool(job.interrupts)
