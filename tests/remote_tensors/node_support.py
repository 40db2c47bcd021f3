"""Helpers for tests of nodes: stop a node, and read its results without asking it."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import torch
from support.waiting import wait_until


@contextlib.contextmanager
def stopped(nodes: Any, place: int) -> Iterator[None]:
    """Stop the process of an idle node."""
    nodes.sync()
    process = psutil.Process(nodes.stats()[place].pid)
    process.send_signal(signal.SIGSTOP)
    try:
        wait_until(lambda: process.status() == psutil.STATUS_STOPPED, what=process.status)
        yield
    finally:
        os.kill(process.pid, signal.SIGCONT)


class SeenTensor:
    """Tensor with one number on a node, stored in a file that the test reads without asking the node."""

    def __init__(self, file: Path, device: Any) -> None:
        file.write_bytes(bytes(8))
        self.remote = torch.from_file(str(file), shared=True, size=1, dtype=torch.int64, device=device)
        self._file = file

    def value(self) -> int:
        return int.from_bytes(self._file.read_bytes(), "little", signed=True)

    def wait_for(self, value: int) -> None:
        wait_until(lambda: self.value() == value, what=self.value)
