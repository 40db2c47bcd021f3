"""Pickle a stage's code for a host.

Code is pickled by reference if the host has its module. If the host lacks one of the user's own modules, code
from that module is pickled by value. Code from modules that pip or Python itself installed is always pickled
by reference.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import pickletools
import sys
import sysconfig
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle

from flowchan.declare.values import Stage
from flowchan.items.main_code import ByValuePickler
from flowchan.transport.descriptors import for_another_host

_INSTALLED = tuple(
    Path(path).resolve() for path in {sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")}
)
_PACKAGE = __name__.partition(".")[0]


def pack_stage(stage: Any, by_value: Iterable[str]) -> bytes:
    """Pickle a stage with everything that it uses from the main script and from the modules ``by_value``."""
    modules = [sys.modules[name] for name in by_value]
    with _by_value(modules), for_another_host():
        classes = {module.__name__: _classes(module) for module in (*modules, sys.modules["__main__"])}
        out = io.BytesIO()
        _StagePickler(out, protocol=5).dump(_Bundle(classes, stage))
        return out.getvalue()


def own_modules(packed: bytes) -> tuple[str, ...]:
    """Return the user's modules that a pickle may refer to: their names occur as strings in the pickle."""
    texts = {argument for _, argument, _ in pickletools.genops(packed) if isinstance(argument, str)}
    return tuple(sorted(name for name in texts & sys.modules.keys() if _is_own(sys.modules[name])))


class _StagePickler(ByValuePickler):
    keeps_classes = False  # false, because `own_modules` needs the names of classes in the pickle


class PackedStages:
    """Pickled stages of a run, each pickled once for each set of missing modules."""

    def __init__(self) -> None:
        self._packed: dict[tuple[str, tuple[str, ...]], tuple[bytes, tuple[str, ...]]] = {}

    def get(self, stage: Stage, without: Collection[str] = ()) -> tuple[bytes, tuple[str, ...]]:
        """Pickle a stage, and return the names of the user's other modules that it needs.

        The host lacks the modules in ``without``, so their code is pickled by value.
        """
        key = stage.name, tuple(sorted(without))
        if key not in self._packed:
            packed = pack_stage(stage, key[1])
            self._packed[key] = packed, tuple(name for name in own_modules(packed) if name not in without)
        return self._packed[key]


def lacking(modules: Iterable[str]) -> tuple[str, ...]:
    """Return the modules that this process cannot import.

    The function imports nothing, and therefore checks only whether the top-level package exists.
    """
    return tuple(name for name in modules if not _is_importable(name.partition(".")[0]))


def _is_importable(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def _is_own(module: ModuleType) -> bool:
    file = getattr(module, "__file__", None)
    if not file or module.__name__.partition(".")[0] in (_PACKAGE, "__main__"):
        return False
    path = Path(file).resolve()
    return path.suffix == ".py" and not any(path.is_relative_to(folder) for folder in _INSTALLED)


@contextlib.contextmanager
def _by_value(modules: list[ModuleType]) -> Iterator[None]:
    registered = cloudpickle.list_registry_pickle_by_value()
    added = [module for module in modules if module.__name__ not in registered]
    for module in added:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in added:
            cloudpickle.unregister_pickle_by_value(module)


def _classes(module: ModuleType) -> dict[str, type]:
    """Return the picklable classes that a module defines. Items may be instances of these classes."""
    found = {
        name: value
        for name, value in list(vars(module).items())
        if isinstance(value, type) and value.__module__ == module.__name__ and value.__qualname__ == name
    }
    return {name: value for name, value in found.items() if _can_be_sent(value)}


def _can_be_sent(value: type) -> bool:
    try:
        cloudpickle.dumps(value, protocol=5)
    except Exception:  # a user's class may raise anything
        return False
    return True


class _Bundle:
    """A stage, with classes from modules that the receiving host lacks.

    Unpickling puts the classes into modules of the same names, where items pickled by reference find them.
    """

    def __init__(self, classes: dict[str, dict[str, type]], stage: Any) -> None:
        self._classes, self._stage = classes, stage

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpack, (self._classes, self._stage)


class _Part(ModuleType):
    """Stand-in for a module that this host lacks. The stand-in contains the classes that were sent."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # Python itself looks up such names, and expects an AttributeError
            raise AttributeError(name)
        raise AttributeError(
            f"module {self.__name__!r} was sent to this host without {name!r}; import the module "
            "outside the function that needs it"
        )


def _unpack(classes: dict[str, dict[str, type]], stage: Any) -> Any:
    for name, members in classes.items():
        if name not in sys.modules:
            sys.modules[name] = _Part(name)
            # Python shows this text in import errors.
            sys.modules[name].__file__ = "not on this host; its classes were sent by value"
        vars(sys.modules[name]).update(members)
    return stage
