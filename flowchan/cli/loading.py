"""Find the graph in the user's file or module, for the command line.

The file is imported rather than run, so its ``if __name__ == "__main__"`` block does not run.
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
    """Raised if no graph could be loaded from the target.

    The file does not exist, is not valid Python, fails during its import, or does not define exactly one
    graph. The arguments may also not match the function in the file. The message is one line, and
    ``__cause__`` is the error of the user's code.
    """


def load(target: str, args: Sequence[str] = ()) -> Blueprint:
    """Return the graph that ``target`` defines.

    ``target`` is ``FILE`` or ``FILE:NAME``. ``FILE`` may also be ``-`` for standard input, or a module name,
    as in ``package.module:graph``.

    The graph is the only graph in the module, or the result of the only function annotated ``-> Graph``. Such
    a function is called with ``args``, converted to the types of its parameters. An object whose ``graph``
    property is annotated ``-> Graph`` counts as that graph. ``NAME`` selects one of several graphs or
    functions; a function selected by name needs no annotation.

    Args:
        target: Name of the file or module, optionally with the name of the graph in it.
        args: Arguments for a function that returns the graph.

    Returns:
        The graph.

    Raises:
        LoadError: The target defines no graph, or it defines several and ``NAME`` does not select one.
    """
    path, name = split_target(target)
    module = load_module(path)
    found = _named(module, name, path) if name else _only(module, path)
    return _graph_of(f"{path}:{found}", getattr(module, found), args, Path(module.__file__ or path))


def split_target(target: str) -> tuple[Path, str | None]:
    """Split ``FILE:NAME`` into the file and the name, which is None if it is omitted.

    The file may also be ``-`` or a module name. The name of the file may itself contain a colon.
    """
    file, colon, name = target.rpartition(":")
    if not colon or Path(target).exists():
        return Path(target), None
    if not name.isidentifier():
        raise LoadError(
            f"{target}: the name after the colon must be the name of a graph or function, got {name!r}"
        )
    return Path(file), name


def picture_name(target: str) -> str:
    """Return the file name that a picture of the graph gets by default."""
    path, _ = split_target(target)
    if path == STDIN:
        return "stdin.svg"
    stem = path.name.removesuffix(".json.gz") if path.name.endswith(".json.gz") else path.stem
    return f"{path.name.rpartition('.')[2] if _names_module(path) else stem}.svg"


def load_timeline(path: str) -> str:
    """Draw a run's timeline from its trace file, and return it as SVG."""
    from flowchan.viz import timeline

    try:
        return timeline(path)
    except OSError as error:
        raise LoadError(f"can't read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise LoadError(str(error)) from error


def load_module(path: Path) -> ModuleType:
    """Import a file, a module or standard input.

    A file is imported as a module that is named after it. The file's folder is on ``sys.path``, as if Python
    ran the file. For a module or standard input, the working directory is on ``sys.path``.

    Worker processes may be unable to import a file or standard input. From then on, functions defined there
    are pickled by value.
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
    find_in(str(file.parent))
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


def find_in(folder: str) -> None:
    """Put a folder on ``sys.path``, so that the program can import modules from this folder."""
    if folder not in sys.path:
        sys.path.insert(0, folder)


def _by_value(module: ModuleType) -> ModuleType:
    import cloudpickle

    cloudpickle.register_pickle_by_value(module)
    return module


def _names_module(path: Path) -> bool:
    """Return whether the path is the name of a module or the folder of a package."""
    parts = str(path).split(".")
    named = all(map(str.isidentifier, parts)) and parts[-1] != "py"
    return named and (not path.exists() or (path / "__init__.py").is_file())


def _import(name: str) -> ModuleType:
    find_in(os.getcwd())
    with _one_line(Path(name)):
        try:
            spec = importlib.util.find_spec(name)
        except ModuleNotFoundError as error:
            if not f"{name}.".startswith(f"{error.name}."):
                raise
            spec = None
    if spec is None:
        raise LoadError(f"{name}: no file or importable module has that name")
    with _one_line(Path(spec.origin or name)):
        return importlib.import_module(name)


def _from_stdin() -> ModuleType:
    find_in(os.getcwd())
    text, file = sys.stdin.read(), "<stdin>"
    # Tracebacks need this entry to show source lines.
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
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
    """Loader that always compiles the file and writes no ``__pycache__``, as Python does for scripts."""

    def get_code(self, fullname: str) -> CodeType:
        try:
            return self.source_to_code(self.get_data(self.path), self.path)
        except ValueError as error:  # how Python 3.11 reports a binary file
            raise SyntaxError(str(error)) from error


def _module_name(file: Path) -> str:
    """Return the file's stem, with underscores appended if another module already has this name."""
    name = file.stem.replace(".", "_")
    while name in sys.stdlib_module_names or getattr(sys.modules.get(name), "__file__", str(file)) != str(
        file
    ):
        name += "_"
    return name


@contextlib.contextmanager
def _one_line(path: Path) -> Iterator[None]:
    """Turn every exception of user code into a :class:`LoadError` with its line number and cause."""
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
            f"{path} exits when it is imported{_line_in(path, error)}; put the call that exits under `if "
            '__name__ == "__main__":`'
        ) from error
    except BaseException as error:
        raise LoadError(
            f"{path}: {type(error).__name__}: {_first_line(error)}{_line_in(path, error)}"
        ) from error


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), "(no message)")


def _line_in(path: Path, error: BaseException) -> str:
    """Return " (line N)" for the last traceback entry in the user's file, or an empty string."""
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
        raise LoadError(f"{path}: no graph found; declare a Graph object or a function annotated `-> Graph`")
    if len(names) > 1:
        raise LoadError(
            f"{path} defines several graphs; choose one of {', '.join(f'{path}:{name}' for name in names)}"
        )
    return names[0]


def _candidates(module: ModuleType) -> Iterator[str]:
    """Yield one public name for each graph, and for each function that returns a graph."""
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
    """Return the value if it is a graph. Otherwise, return the graph in its ``graph`` property, if any."""
    if not isinstance(value, Blueprint) and _has_graph(type(value)):
        value = value.graph
    return value if isinstance(value, Blueprint) else None


def _has_graph(kind: type) -> bool:
    """Return whether the instances of a class have a graph, according to its annotations."""
    found = inspect.getattr_static(kind, "graph", None)
    return isinstance(found, property) and found.fget is not None and _is_graph(_returned(found.fget))


def _builds_graph(value: Any, module: ModuleType) -> bool:
    if not inspect.isfunction(value) or value.__module__ != module.__name__:
        return False
    returned = _returned(value)
    return _is_graph(returned) or (isinstance(returned, type) and _has_graph(returned))


def _returned(function: Any) -> Any:
    """Return the annotation of a function's result, or its source text if it cannot be resolved."""
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
    known = f"; its graphs are {', '.join(names)}" if names else ", and it defines no graphs"
    raise LoadError(f"{path} has no {name!r}{known}")


def _graph_of(label: str, value: Any, args: Sequence[str], file: Path) -> Blueprint:
    graph = _graph_behind(value)
    if graph is not None:
        if args:
            raise LoadError(
                f"{label}: only a function that returns a graph takes arguments, got {' '.join(args)}"
            )
        return graph
    if not callable(value):
        raise LoadError(
            f"{label} must be a graph or a function that returns one, got an object of type {_type(value)}"
        )
    converted = _converted(label, value, args)
    with _one_line(file):
        returned = value(*converted)
    graph = _graph_behind(returned)
    if graph is None:
        raise LoadError(f"{label}: the function must return a Graph, got an object of type {_type(returned)}")
    return graph


def _converted(label: str, function: Callable[..., Any], args: Sequence[str]) -> Sequence[Any]:
    """Return the arguments, converted to their parameters' types."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # Python finds no signature for this callable
        return args
    try:
        bound = signature.bind(*args)
    except TypeError as error:
        takes = signature.replace(return_annotation=inspect.Signature.empty)
        raise LoadError(
            f"{label}: {error}; the function takes {takes}, got {len(args)} argument{'s' * (len(args) != 1)}"
        ) from error
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
