"""Servers that tests start, and that leave nothing behind."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest
from support.waiting import wait_until


def need(*programs: str, package: str) -> None:
    """Skip the test if a program is missing."""
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    missing = [program for program in programs if shutil.which(program, path=path) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not found: apt install {package}")


def need_root() -> None:
    if os.geteuid() != 0:
        pytest.skip("this takes root: network namespaces, or servers that change their user")


def program(name: str) -> str:
    """Return the path of a program. The sbin folders, which PATH may lack, are also searched."""
    found = shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
    assert found, name
    return found


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as held:
        found = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [int(sock.getsockname()[1]) for sock in found]


class Servers:
    """Foreground processes with logs, which end together with their children."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, command: Sequence[str], environment: dict[str, str] | None = None) -> int:
        with open(self.folder / f"{name}.log", "ab") as log:
            self._processes[name] = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
            )
        return self._processes[name].pid

    def pid(self, name: str) -> int:
        return self._processes[name].pid

    def wait_answering(self, name: str, port: int) -> None:
        def answers() -> bool:
            assert self._processes[name].poll() is None, self.log(name)
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
            except OSError:
                return False
            return True

        wait_until(answers, what=lambda: self.log(name))

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def end(self, name: str) -> None:
        process = self._processes.pop(name)
        family = [process, *family_of(process.pid)]
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            pass
        for one in family:
            try:
                one.kill()
            except psutil.NoSuchProcess:
                continue
        process.wait()
        wait_until(lambda: not any(runs(one) for one in family[1:]))

    def close(self) -> None:
        for name in reversed(list(self._processes)):
            self.end(name)


def family_of(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
