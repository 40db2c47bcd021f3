"""Operations that fail, block or kill their process on a node, for tests of failures.

Their meta kernels always succeed, so the failure happens on the node. A test's nodes are forked from the
process that imports this module, so they know the operations.
"""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.optional_packages import optional
from support.waiting import WAIT_LIMIT_S

torch = optional("torch")

_library: Any = None
_counts: dict[str, int] = {}


class Unpicklable(Exception):
    """Exception that cannot be pickled."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.lock = threading.Lock()


def end(how: str) -> None:
    """Raise an exception or kill this process."""
    if how == "value":
        raise ValueError("a bad value")
    if how == "unpicklable":
        raise Unpicklable("no pickle")
    if how == "exit":
        raise SystemExit(5)
    if how == "interrupt":
        raise KeyboardInterrupt
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "limit":
        signal.pthread_kill(threading.get_ident(), signal.SIGXCPU)
    if how == "_exit":
        os._exit(3)


def fail(x: Any, how: str) -> Any:
    """Fail as requested by ``how``."""
    end(how)
    return x.clone()


def fail_(x: Any, how: str) -> Any:
    """Write into ``x``, and then fail."""
    x.fill_(-1)
    end(how)
    return x


def count(x: Any) -> Any:
    """Return ``x`` plus 0, and count the calls in this process."""
    _counts["count"] = _counts.get("count", 0) + 1
    return x.clone()


def counted(x: Any) -> Any:
    """Return how often ``count`` has run in this process."""
    return torch.tensor(_counts.get("count", 0))


def process(x: Any) -> Any:
    """Return the process id of the node."""
    return torch.tensor(os.getpid())


def templates(x: Any) -> Any:
    """Return the number of templates in this process."""
    from flowchan.pipelines.remote_tensors.node_worker import Compiled

    return torch.tensor(sum(type(one) is Compiled for one in gc.get_objects()))


def wait(x: Any, path: str) -> Any:
    """Write the node's process id into the file ``path``, wait until the file is deleted, and copy ``x``."""
    latch = Path(path)
    if latch.with_suffix(".released").exists():
        return x.clone()
    latch.with_suffix(".new").write_text(str(os.getpid()))
    latch.with_suffix(".new").rename(latch)
    tick, waited = threading.Event(), 0.0
    while latch.exists() and waited < WAIT_LIMIT_S:
        tick.wait(0.002)
        waited += 0.002
    return x.clone()


def define() -> None:
    """Register the operations, once per process."""
    global _library
    if _library is not None:
        return
    _library = torch.library.Library("failing", "DEF")
    for schema, kernel, meta in (
        ("fail(Tensor x, str how) -> Tensor", fail, lambda x, how: torch.empty_like(x)),
        ("fail_(Tensor(a!) x, str how) -> Tensor(a!)", fail_, lambda x, how: x),
        ("count(Tensor x) -> Tensor", count, torch.empty_like),
        ("counted(Tensor x) -> Tensor", counted, _number),
        ("process(Tensor x) -> Tensor", process, _number),
        ("templates(Tensor x) -> Tensor", templates, _number),
        ("wait(Tensor x, str path) -> Tensor", wait, lambda x, path: torch.empty_like(x)),
    ):
        register(schema, kernel, meta)


def register(schema: str, kernel: Callable[..., Any], meta: Callable[..., Any]) -> None:
    """Register one operation with a CPU kernel and a meta kernel."""
    _library.define(schema)
    name = schema.partition("(")[0]
    _library.impl(name, kernel, "CPU")
    _library.impl(name, meta, "Meta")


def _number(x: Any) -> Any:
    return torch.empty((), dtype=torch.int64, device=x.device)


def pid_of(device: Any) -> int:
    """Return the process id of the node."""
    return int(torch.ops.failing.process(torch.zeros(1, device=device)).item())


class Latch:
    """Operation that occupies a node until it is released.

    Args:
        path: File that exists while the node is occupied.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def occupy(self, x: Any) -> Any:
        """Issue the operation, which returns a copy of ``x`` after the release."""
        return torch.ops.failing.wait(x, str(self.path))

    def wait(self) -> int:
        """Wait until the node executes the operation, and return the node's process id."""
        tick, waited = threading.Event(), 0.0
        while not self.path.exists():
            assert waited < WAIT_LIMIT_S, "the node has not reached the operation"
            tick.wait(0.002)
            waited += 0.002
        return int(self.path.read_text())

    def release(self) -> None:
        """Let the node continue."""
        self.path.with_suffix(".released").touch()
        self.path.unlink(missing_ok=True)


if torch:
    define()
