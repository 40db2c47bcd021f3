"""How a stage's code reaches a host: by reference where its modules are there, by value where the user's own
are not. What is installed (with pip, or with Python) always goes by reference."""

from __future__ import annotations

import contextlib
import importlib.util
import pickletools
import sys
import sysconfig
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle

from flowchan.declare.values import Stage

_INSTALLED = tuple(
    Path(path).resolve() for path in {sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")}
)
_PACKAGE = __name__.partition(".")[0]


def pack_stage(stage: Any, by_value: Iterable[str]) -> bytes:
    """The stage as bytes, with all that it uses of the modules ``by_value`` and of the main script."""
    modules = [sys.modules[name] for name in by_value]
    with _by_value(modules):
        classes = {module.__name__: _classes(module) for module in (*modules, sys.modules["__main__"])}
        packed: bytes = cloudpickle.dumps(_Bundle(classes, stage), protocol=5)
        return packed


def own_modules(packed: bytes) -> tuple[str, ...]:
    """The user's own modules to which a pickle may refer: every text in it that is the name of one."""
    texts = {argument for _, argument, _ in pickletools.genops(packed) if isinstance(argument, str)}
    return tuple(sorted(name for name in texts & sys.modules.keys() if _is_own(sys.modules[name])))


class PackedStages:
    """The stages of a run as bytes, each pickled once for the same lacking modules."""

    def __init__(self) -> None:
        self._packed: dict[tuple[str, tuple[str, ...]], tuple[bytes, tuple[str, ...]]] = {}

    def get(self, stage: Stage, without: Collection[str] = ()) -> tuple[bytes, tuple[str, ...]]:
        """Pickle a stage with what it uses of the modules that are lacking on a host. Return also the user's
        own modules that it needs besides."""
        key = stage.name, tuple(sorted(without))
        if key not in self._packed:
            packed = pack_stage(stage, key[1])
            self._packed[key] = packed, tuple(name for name in own_modules(packed) if name not in without)
        return self._packed[key]


def lacking(modules: Iterable[str]) -> tuple[str, ...]:
    """Those modules that can't be imported here. Imports none: a package is looked for, not what is in it."""
    return tuple(name for name in modules if not _is_there(name.partition(".")[0]))


def _is_there(name: str) -> bool:
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
    """The classes that a module defines, as far as they can be sent: items may be of them."""
    found = {
        name: value
        for name, value in list(vars(module).items())
        if isinstance(value, type) and value.__module__ == module.__name__ and value.__qualname__ == name
    }
    return {name: value for name, value in found.items() if _can_be_sent(value)}


def _can_be_sent(value: type) -> bool:
    try:
        cloudpickle.dumps(value, protocol=5)
    except Exception:  # whatever the user's own class raises
        return False
    return True


class _Bundle:
    """A stage with classes, by the module that defines them, which is not where they arrive. There they are
    put into a module of that name, so that items that are pickled by reference find their classes."""

    def __init__(self, classes: dict[str, dict[str, type]], stage: Any) -> None:
        self._classes, self._stage = classes, stage

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpack, (self._classes, self._stage)


class _Part(ModuleType):
    """Of a module that is not here, what has come along."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # asked for by Python itself
            raise AttributeError(name)
        raise AttributeError(
            f"module {self.__name__!r} is {self.__file__}, but not {name!r}: import it outside of the "
            "function that needs it, and it comes along as a whole"
        )


def _unpack(classes: dict[str, dict[str, type]], stage: Any) -> Any:
    for name, members in classes.items():
        if name not in sys.modules:
            sys.modules[name] = _Part(name)
            sys.modules[name].__file__ = "not on this host; its classes came along by value"  # import says it
        vars(sys.modules[name]).update(members)
    return stage
