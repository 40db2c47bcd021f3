"""Finding the graph in a user's file or module, for the command line.

It is imported, not run: its ``if __name__ == "__main__"`` block stays asleep.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.machinery
import importlib.util
import inspect
import linecache
import os
import sys
import typing
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from flowchan.cli.conversion import converted
from flowchan.declare.blueprint import Blueprint
from flowchan.errors import FlowchanError, GraphError

STDIN = Path("-")


class LoadError(FlowchanError):
    """No graph came out of the file: it isn't there, is no Python, failed while it was imported, holds no
    graph or several, or the call does not fit its function. The message is one line; ``__cause__`` is the
    user's own error."""


def load(target: str, args: Sequence[str] = ()) -> Blueprint:
    """The graph that ``target``, ``FILE`` or ``FILE:NAME``, declares. ``FILE`` may also be ``-``, for what
    comes by standard input, or the name of a module: ``package.module:graph``.

    That is the module's only graph, or what its only function annotated ``-> Graph`` returns when it is
    called with ``args``, each converted to what its parameter is annotated with. An object that has a graph,
    in a property ``graph`` annotated ``-> Graph``, counts as that graph. ``NAME`` chooses among several, and
    may name a function without the annotation. Raises :class:`LoadError`.
    """
    path, name = split_target(target)
    module = load_module(path)
    found = _named(module, name, path) if name else _only(module, path)
    return _graph_of(f"{path}:{found}", getattr(module, found), args, Path(module.__file__ or path))


def split_target(target: str) -> tuple[Path, str | None]:
    """``FILE:NAME`` in its two parts. A file whose own name holds a colon is found all the same. The first
    part may also be ``-`` or a module's name."""
    file, colon, name = target.rpartition(":")
    if not colon or Path(target).exists():
        return Path(target), None
    if not name.isidentifier():
        raise LoadError(f"{target}: after the colon comes the name of a graph or function, not {name!r}")
    return Path(file), name


def picture_name(target: str) -> str:
    """What a picture of ``target`` is called if nobody says so."""
    path, _ = split_target(target)
    if path == STDIN:
        return "stdin.svg"
    return f"{path.name.rpartition('.')[2] if _names_module(path) else path.stem}.svg"


def load_module(path: Path) -> ModuleType:
    """Import the file as a module named like it, with its folder on ``sys.path``, as Python does for a
    script; a module by its name, and standard input, with the working directory there.

    Of a file and of standard input the functions are pickled by value from then on, because a worker process
    may not find them.
    """
    if path == STDIN:
        return _from_stdin()
    if _names_module(path):
        return _import(str(path))
    if not path.exists():
        raise LoadError(f"{path}: no such file")
    if not path.is_file():
        raise LoadError(f"{path}: not a file")
    file = path.resolve()
    _find_in(str(file.parent))
    name = _module_name(file)
    loader = _Loader(name, str(file))
    module = importlib.util.module_from_spec(importlib.machinery.ModuleSpec(name, loader, origin=str(file)))
    module.__file__ = str(file)
    sys.modules[name] = module
    try:
        with _one_line(path):
            loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return _by_value(module)


def _find_in(folder: str) -> None:
    if folder not in sys.path:
        sys.path.insert(0, folder)


def _by_value(module: ModuleType) -> ModuleType:
    import cloudpickle

    cloudpickle.register_pickle_by_value(module)
    return module


def _names_module(path: Path) -> bool:
    """Whether it is a module's name and not a file's. A package's folder is one."""
    parts = str(path).split(".")
    named = all(map(str.isidentifier, parts)) and parts[-1] != "py"
    return named and (not path.exists() or (path / "__init__.py").is_file())


def _import(name: str) -> ModuleType:
    _find_in(os.getcwd())
    with _one_line(Path(name)):
        try:
            spec = importlib.util.find_spec(name)
        except ModuleNotFoundError as error:
            if not f"{name}.".startswith(f"{error.name}."):
                raise
            spec = None
    if spec is None:
        raise LoadError(f"{name}: no file, and no module that can be imported from here, has that name")
    with _one_line(Path(spec.origin or name)):
        return importlib.import_module(name)


def _from_stdin() -> ModuleType:
    _find_in(os.getcwd())
    text, file = sys.stdin.read(), "<stdin>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)  # for tracebacks
    module = ModuleType("_stdin")
    module.__file__ = file
    sys.modules[module.__name__] = module
    try:
        with _one_line(Path(file)):
            exec(compile(text, file, "exec"), vars(module))
    except BaseException:
        del sys.modules[module.__name__]
        raise
    return _by_value(module)


class _Loader(importlib.machinery.SourceFileLoader):
    """Compiles the file as it is now, and leaves no ``__pycache__`` beside it, as when Python runs a
    script."""

    def get_code(self, fullname: str) -> CodeType:
        try:
            return self.source_to_code(self.get_data(self.path), self.path)
        except ValueError as error:  # what Python 3.11 says to a binary file
            raise SyntaxError(str(error)) from error


def _module_name(file: Path) -> str:
    """The file's stem, unless a module of that name is loaded already or belongs to Python: that one
    stays."""
    name = file.stem.replace(".", "_")
    while name in sys.stdlib_module_names or getattr(sys.modules.get(name), "__file__", str(file)) != str(
        file
    ):
        name += "_"
    return name


@contextlib.contextmanager
def _one_line(path: Path) -> Iterator[None]:
    """Turns whatever the user's code raises into a :class:`LoadError` that says what and where in one
    line."""
    try:
        yield
    except (KeyboardInterrupt, GraphError):
        raise
    except SyntaxError as error:
        raise LoadError(
            f"{error.filename or path}:{error.lineno or 0}: not valid Python: {error.msg}"
        ) from error
    except SystemExit as error:
        raise LoadError(
            f"{path}: calls exit when imported{_line_in(path, error)}; "
            'put that under `if __name__ == "__main__":`'
        ) from error
    except BaseException as error:
        raise LoadError(
            f"{path}: {type(error).__name__}: {_first_line(error)}{_line_in(path, error)}"
        ) from error


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), "(no message)")


def _line_in(path: Path, error: BaseException) -> str:
    """The last line of the user's own file in the traceback."""
    lines = []
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename in (str(path), str(path.resolve())):
            lines.append(trace.tb_lineno)
        trace = trace.tb_next
    return f" (line {lines[-1]})" if lines else ""


def _only(module: ModuleType, path: Path) -> str:
    names = list(_candidates(module))
    if not names:
        raise LoadError(
            f"{path}: no graph inside: neither a Graph object nor a function annotated `-> Graph`"
        )
    if len(names) > 1:
        raise LoadError(f"{path}: which graph? Say one of {', '.join(f'{path}:{name}' for name in names)}")
    return names[0]


def _candidates(module: ModuleType) -> Iterator[str]:
    """Public names of the module's graphs, each graph once, and of its functions that return one."""
    seen: set[int] = set()
    for name, value in vars(module).items():
        if name.startswith("_"):
            continue
        found = _graph_behind(value)
        if found is None and _builds_graph(value, module):
            found = value
        if found is not None and id(found) not in seen:
            seen.add(id(found))
            yield name


def _graph_behind(value: Any) -> Blueprint | None:
    """The graph that a value is or has."""
    if not isinstance(value, Blueprint) and _has_graph(type(value)):
        value = value.graph
    return value if isinstance(value, Blueprint) else None


def _has_graph(kind: type) -> bool:
    """Whether a class says of its objects that they have a graph."""
    found = inspect.getattr_static(kind, "graph", None)
    return isinstance(found, property) and found.fget is not None and _is_graph(_returned(found.fget))


def _builds_graph(value: Any, module: ModuleType) -> bool:
    if not inspect.isfunction(value) or value.__module__ != module.__name__:
        return False
    returned = _returned(value)
    return _is_graph(returned) or (isinstance(returned, type) and _has_graph(returned))


def _returned(function: Any) -> Any:
    """The annotation of what a function returns; as text where it can't be resolved."""
    annotation = getattr(function, "__annotations__", {}).get("return")
    with contextlib.suppress(Exception):
        annotation = typing.get_type_hints(function).get("return")
    return annotation


def _is_graph(annotation: Any) -> bool:
    if isinstance(annotation, str):
        return annotation.rpartition(".")[2] in ("Graph", "Blueprint")
    return isinstance(annotation, type) and issubclass(annotation, Blueprint)


def _named(module: ModuleType, name: str, path: Path) -> str:
    if hasattr(module, name):
        return name
    names = list(_candidates(module))
    known = f"; it has {', '.join(names)}" if names else ", and no graph either"
    raise LoadError(f"{path}: no {name!r} inside{known}")


def _graph_of(label: str, value: Any, args: Sequence[str], file: Path) -> Blueprint:
    graph = _graph_behind(value)
    if graph is not None:
        if args:
            raise LoadError(
                f"{label}: is a graph, not a function, so it takes no arguments: {' '.join(args)}"
            )
        return graph
    if not callable(value):
        raise LoadError(
            f"{label}: is neither a graph nor a function that returns one, but of type {_type(value)}"
        )
    converted = _converted(label, value, args)
    with _one_line(file):
        returned = value(*converted)
    graph = _graph_behind(returned)
    if graph is None:
        raise LoadError(f"{label}: returned an object of type {_type(returned)}, not a Graph")
    return graph


def _converted(label: str, function: Callable[..., Any], args: Sequence[str]) -> Sequence[Any]:
    """The arguments as the parameters are annotated."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # a callable that tells no signature
        return args
    try:
        bound = signature.bind(*args)
    except TypeError as error:
        takes = signature.replace(return_annotation=inspect.Signature.empty)
        raise LoadError(f"{label}: {error}: it takes {takes}, {len(args)} given") from error
    hints: dict[str, Any] = {}
    with contextlib.suppress(Exception):
        hints = typing.get_type_hints(function)
    for name, value in bound.arguments.items():
        try:
            if signature.parameters[name].kind is inspect.Parameter.VAR_POSITIONAL:
                bound.arguments[name] = tuple(converted(text, hints.get(name)) for text in value)
            else:
                bound.arguments[name] = converted(value, hints.get(name))
        except ValueError as error:
            raise LoadError(f"{label}: {name}: {error}") from error
    return bound.args


def _type(value: Any) -> str:
    return type(value).__name__
