"""Chance (R9): every worker has its own seed, and a worker's process draws its random numbers from it.

The seed is a hash of the run's seed, the stage, the worker's number and its incarnation: a run with an equal
seed draws the same numbers, and a replacement draws others than the worker that died. :func:`begin` seeds
what a process shares, the generators of ``random``, ``numpy.random`` and torch: those that are imported
already (a fork inherits them in the state of its parent) at once, the others when they are imported. Workers
on threads share them with the whole program, so there they are left alone.
"""

from __future__ import annotations

import contextlib
import hashlib
import sys
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


@dataclass(frozen=True, slots=True)
class Worker:
    """A worker as the code inside it sees itself: ``number`` (from 1) of the ``workers`` of ``stage``.
    ``incarnation`` is how many processes have done its work before this one. ``seed`` (below 2 ** 63) is
    different for each of them, and the same again in a run with the same seed. ``host`` is the name of the
    host, empty on the program's own machine."""

    stage: str
    number: int
    workers: int
    seed: int
    incarnation: int = 0
    host: str = ""


_here: ContextVar[Worker] = ContextVar("flowchan worker")
_of_process: Worker | None = None  # for the threads that the user's code starts in a worker's process


def worker() -> Worker:
    """The worker whose code is running. ``RuntimeError`` outside of one."""
    found = _here.get(_of_process)
    if found is None:
        raise RuntimeError(
            "flowchan.worker(): no worker runs here; call it in the function or class of a stage"
        )
    return found


def told() -> str:
    """Who runs here, for messages: ``the worker map 2 on host 'gpu1'``."""
    here = _here.get(_of_process)
    if here is None:
        return "the worker"
    return f"the worker {here.stage} {here.number}" + (f" on host {here.host!r}" if here.host else "")


def seed_of(run: int, stage: str, number: int, incarnation: int) -> int:
    """The seed of one worker in a run with the seed ``run``."""
    parts = repr((run, stage, number, incarnation)).encode("utf-8", "surrogatepass")
    # it fits into a signed 64-bit number
    return int.from_bytes(hashlib.blake2b(parts, digest_size=8).digest()) >> 1


def enter(here: Worker) -> None:
    """From now on this thread, or this task, is the worker's."""
    _here.set(here)


def begin(here: Worker) -> None:
    """From now on this process is the worker's. Comes before any code of the user's is loaded."""
    global _of_process
    _of_process = here
    # a fork has copied its parent's
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _SeedOnImport)]
    sys.meta_path.insert(0, _SeedOnImport(here.seed))
    for name in SEEDED:
        if (module := sys.modules.get(name)) is not None:
            _seed(module, here.seed)


def _seed_numpy(module: Any, seed: int) -> None:
    # A new bit generator and not numpy.random.seed(): a thread that drew during the fork left the old one
    # locked.
    module.set_bit_generator(module.MT19937(seed))


SEEDED: dict[str, Callable[[Any, int], object]] = {
    "random": lambda module, seed: module.seed(seed),
    "numpy.random": _seed_numpy,
    # leaves CUDA alone where the parent of a fork used it
    "torch": lambda module, seed: module.manual_seed(seed),
}


def _seed(module: ModuleType, seed: int) -> None:
    with contextlib.suppress(AttributeError):  # half imported, or the user's own module of that name
        SEEDED[module.__name__](module, seed)


class _SeedOnImport:
    """A finder of modules, which has the other finders look, and seeds the module once that is executed."""

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
