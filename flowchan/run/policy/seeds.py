"""Derive random seeds for workers (R9).

All random numbers in a worker's process derive from the worker's seed. The seed is a hash of the run's seed,
the stage, the worker's number and its incarnation. Runs with equal seeds therefore draw equal numbers, but a
replacement draws other numbers than the dead worker.

:func:`begin` seeds the global generators of ``random``, ``numpy.random`` and torch in a worker's process.
Already imported modules are seeded at once, because a forked process inherits their state. Other modules are
seeded when they are imported. Worker threads share the generators with the rest of the program. Nothing is
seeded for them.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from flowchan.public import public


@public
@dataclass(frozen=True, slots=True)
class Worker:
    """Identity and seed of the current worker.

    Attributes:
        stage: Name of its stage.
        number: Number of the worker in the stage, from 1.
        workers: Number of workers in the stage.
        seed: Random seed below 2 ** 63. The seed differs between workers and incarnations, but is the same in
            runs with equal seeds.
        incarnation: Number of earlier processes with this worker's number.
        host: Name of its host; empty on the program's machine.

    Example:
        >>> from flowchan import Graph, worker
        >>> graph = Graph()
        >>> stages = graph.source([0]).map(lambda _: worker().stage, name="find").collect()
        >>> graph.run()[stages]
        ['find']
    """

    stage: str
    number: int
    workers: int
    seed: int
    incarnation: int = 0
    host: str = ""


_current: ContextVar[Worker] = ContextVar("flowchan worker")
_of_process: Worker | None = None  # used by threads that user code starts in a worker process


@public
def worker() -> Worker:
    """Return the worker that runs the calling code.

    Returns:
        Its stage, number, seed and host.

    Raises:
        RuntimeError: The caller does not run in a worker.

    Example:
        >>> from flowchan import Graph, worker
        >>> graph = Graph("numbers")
        >>> numbers = graph.source(range(2)).map(lambda _: worker().number).collect()
        >>> graph.run()[numbers]
        [1, 1]
    """
    found = _current.get(_of_process)
    if found is None:
        raise RuntimeError(
            "flowchan.worker() must be called in the function or class of a stage; no worker is running here"
        )
    return found


def worker_text() -> str:
    """Describe the current worker for messages, for example ``the worker map 2 on host 'gpu1'``."""
    info = _current.get(_of_process)
    if info is None:
        return "the worker"
    return f"the worker {info.stage} {info.number}" + (f" on host {info.host!r}" if info.host else "")


def seed_of(run: int, stage: str, number: int, incarnation: int) -> int:
    """Return a worker's seed in a run with the seed ``run``."""
    import hashlib  # loads OpenSSL; imported late, but before the worker is forked

    parts = repr((run, stage, number, incarnation)).encode("utf-8", "surrogatepass")
    # The shift makes the seed fit into a signed 64-bit integer.
    return int.from_bytes(hashlib.blake2b(parts, digest_size=8).digest()) >> 1


def enter(info: Worker) -> None:
    """Set the current worker of this thread or task."""
    _current.set(info)


def begin(info: Worker) -> None:
    """Set the worker of this process and seed the generators before any user code is loaded."""
    global _of_process
    _of_process = info
    # Remove the finder that a forked process has inherited from its parent.
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _SeedOnImport)]
    sys.meta_path.insert(0, _SeedOnImport(info.seed))
    for name in SEEDED:
        if (module := sys.modules.get(name)) is not None:
            _seed(module, info.seed)


def _seed_numpy(module: Any, seed: int) -> None:
    # numpy.random.seed() could block forever, because another thread may have held the generator's lock
    # during the fork. Replacing the bit generator needs no lock.
    module.set_bit_generator(module.MT19937(seed))


SEEDED: dict[str, Callable[[Any, int], object]] = {
    "random": lambda module, seed: module.seed(seed),
    "numpy.random": _seed_numpy,
    # In a forked child of a process that has used CUDA, torch.manual_seed() does not touch CUDA.
    "torch": lambda module, seed: module.manual_seed(seed),
}


def _seed(module: ModuleType, seed: int) -> None:
    # The module may be only partly imported, or it may be a user's module of the same name.
    with contextlib.suppress(AttributeError):
        SEEDED[module.__name__](module, seed)


class _SeedOnImport:
    """Module finder that lets other finders locate a module, and seeds it after its import."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in SEEDED:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next(
            (spec for finder in others if (spec := finder.find_spec(name, path, target)) is not None), None
        )
        loader: Any = None if spec is None else spec.loader
        if loader is not None:
            execute = loader.exec_module

            def execute_and_seed(module: ModuleType) -> None:
                execute(module)
                _seed(module, self._seed)

            loader.exec_module = execute_and_seed
        return spec
