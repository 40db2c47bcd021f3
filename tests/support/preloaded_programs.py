"""Run programs in forks of a template process, which has imported torch for all of them.

Such a program starts seconds sooner than a new Python process (program_server.py). There is one other
difference: a missing import of a loaded module goes unnoticed.
"""

from __future__ import annotations

import inspect
import os
import select
import socket
import subprocess
import sys
import threading
from multiprocessing.connection import Connection
from typing import Any, ClassVar

from support.fork_server import ForkingProgram, started

TORCH = ("torch", "torch._dynamo", "sklearn.datasets", "flowchan.pipelines.sequential")
"""Modules to import, including ``torch._dynamo``, which the first optimizer of a process would import."""
ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
"""Settings that stop OpenBLAS from starting threads during its import. ``torch.set_num_threads`` does not
affect gloo's threads, and sums over several threads sometimes round differently."""
PIPE_ENDS = [(pipe, end) for pipe in ("p2c", "c2p", "err") for end in ("read", "write")]


class Template(ForkingProgram):
    """Process that has imported these modules and forks programs."""

    def __init__(self, *modules: str) -> None:
        super().__init__("program_server.py", *modules, **ONE_THREAD)

    def popen(self, *arguments: object, **options: Any) -> subprocess.Popen[Any]:
        """Start ``python *arguments``. The method takes the same options as ``subprocess.Popen``."""
        return _Program(self, [sys.executable, *map(str, arguments)], **options)

    def run(self, *arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run ``python *arguments`` until it exits."""
        pipe: Any = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        with self.popen(*arguments, text=True, **pipe, **options) as program:
            try:
                out, err = program.communicate(timeout=100)
            except BaseException:
                program.kill()
                raise
        return subprocess.CompletedProcess(program.args, program.returncode, out, err)

    def start(self, arguments: list[str], cwd: Any, env: Any, new_session: bool, streams: list[int]) -> int:
        """Start a program, and return its pid."""
        environment = dict(os.environ if env is None else env)
        folder = None if cwd is None else str(cwd)
        return self.order((arguments, folder, environment, new_session), streams)


class SharedTemplate:
    """Template shared by several processes that run tests.

    When the first process needs the modules, they are imported once for all processes.
    """

    def __init__(self, *modules: str) -> None:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind("")  # Linux chooses a free name
            listener.listen()
            self.name: bytes = listener.getsockname()
            self._program = started("program_server.py", listener, *modules, **ONE_THREAD)

    def close(self) -> None:
        self._program.kill()
        self._program.wait()


class OurTemplate(Template):
    """A child of a shared template that serves only this process."""

    pids: ClassVar[set[int]] = set()

    def __init__(self, shared: bytes) -> None:
        self._lock = threading.Lock()
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(shared)
        self._pid = int.from_bytes(connection.recv(4), sys.byteorder)
        self._orders = Connection(connection.detach())
        self.pids.add(self._pid)

    def close(self) -> None:
        self._orders.send(None)
        self._orders.close()
        self.pids.remove(self._pid)


class _Program(subprocess.Popen[Any]):
    """A child of the template, with the same interface as a child of this process."""

    def __init__(self, template: Template, arguments: list[str], **options: Any) -> None:
        self._template = template
        super().__init__(arguments, **options)

    def _execute_child(self, *args: Any, **kwargs: Any) -> None:
        told = inspect.signature(subprocess.Popen._execute_child).bind(self, *args, **kwargs).arguments
        ends = [told["p2cread"], told["c2pwrite"], told["errwrite"]]
        streams = [number if end == -1 else end for number, end in enumerate(ends)]
        arguments, cwd, env, session = (told[name] for name in ("args", "cwd", "env", "start_new_session"))
        self.pid = self._template.start(arguments[1:], cwd, env, session, streams)
        self._handle = os.pidfd_open(self.pid)  # no other process reaps it, so the pid is valid
        self._close_pipe_fds(*(told[f"{pipe}{end}"] for pipe, end in PIPE_ENDS))

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        if self.returncode is None and self._has_ended(0):
            self._reap()
        return self.returncode

    def _wait(self, timeout: float | None) -> int:
        if self.returncode is None:
            if not self._has_ended(timeout):
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            self._reap()
        return self.returncode

    def _has_ended(self, timeout: float | None) -> bool:
        return bool(select.select([self._handle], [], [], timeout)[0])

    def _reap(self) -> None:
        self.returncode = self._template.reap(self.pid)
        os.close(self._handle)
