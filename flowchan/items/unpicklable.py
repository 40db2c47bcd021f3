"""Find the part of an object that cannot be pickled.

The search follows the parts that cloudpickle would visit, down to the smallest part that cannot be pickled.
The error shows the path to this part: "captured variable 'model', attribute 'lock'".
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType
from typing import Any

_DEEPEST = 20


def refusal(value: Any, pickler: Any = None) -> str | None:
    """Return one line that says why a pickler rejects the value, or ``None`` if it accepts the value.

    The default is the pickler of cloudpickle.
    """
    import cloudpickle

    try:
        (pickler or cloudpickle.Pickler)(_Nowhere(), protocol=5).dump(value)
    except Exception as error:  # a user's __reduce__ or __getstate__ may raise anything
        lines = str(error).splitlines()
        return lines[0] if lines else type(error).__name__
    return None


class _Nowhere:
    """File that discards its data, because only the error matters and a pickle may be large."""

    def write(self, data: Any) -> int:
        return memoryview(data).nbytes  # pickle passes large buffers without a copy


def children(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the parts that cloudpickle visits to pickle ``value``, each with a description."""
    if isinstance(value, FunctionType):
        yield from _captured(value)
    elif isinstance(value, functools.partial):
        yield f"function {_name(value.func)!r}", value.func
        yield from ((f"argument {place}", argument) for place, argument in enumerate(value.args, 1))
        yield from ((f"argument {name!r}", argument) for name, argument in value.keywords.items())
    elif inspect.ismethod(value):
        yield f"object, {a_kind_of(value.__self__)}", value.__self__
    elif inspect.isclass(value):
        yield from (
            (f"class attribute {name!r}", child) for name, child in vars(value).items() if name != "__dict__"
        )
    elif isinstance(value, dict):
        for key, child in value.items():
            yield "key", key
            yield f"item {key!r}" if isinstance(key, (str, int)) else "item", child
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from ((f"element {place}", child) for place, child in enumerate(value))
    else:
        yield from _state(value)


def smallest(
    value: Any,
    error: str,
    refusal: Callable[[Any], str | None] = refusal,
    children: Callable[[Any], Iterator[tuple[str, Any]]] = children,
) -> tuple[list[str], Any, str]:
    """Find the smallest part of ``value`` that cannot be pickled.

    Args:
        value: Value that cannot be pickled.
        error: Reason why the value cannot be pickled.
        refusal: Returns the reason why a part cannot be pickled, or None if it can.
        children: Yields the parts of a value, each with a description.

    Returns:
        The path to the part, the part, and the reason.
    """
    path: list[str] = []
    seen = {id(value)}
    while len(path) < _DEEPEST:
        for name, child in _listed(children, value):
            reason = None if id(child) in seen else refusal(child)
            if reason is not None:
                seen.add(id(child))
                path.append(name)
                value, error = child, reason
                break
        else:
            break
    return path, value, error


def _listed(children: Callable[[Any], Iterator[tuple[str, Any]]], value: Any) -> list[tuple[str, Any]]:
    """List the parts of a value. If the value's own code raises an exception, return an empty list.

    The value itself then counts as the smallest part.
    """
    try:
        return list(children(value))
    except Exception:
        return []


def _captured(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the variables that are sent along with a function that is pickled by value."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        try:
            yield f"captured variable {name!r}", cell.cell_contents
        except ValueError:  # the variable has no value yet
            continue
    for name in _names_used(function.__code__):
        if name in function.__globals__:
            yield f"global variable {name!r}", function.__globals__[name]
    positional = function.__code__.co_varnames[: function.__code__.co_argcount]
    defaults = function.__defaults__ or ()
    yield from (
        (f"default of {name!r}", value)
        for name, value in zip(reversed(positional), reversed(defaults), strict=False)
    )
    yield from ((f"default of {name!r}", value) for name, value in (function.__kwdefaults__ or {}).items())
    yield from ((f"attribute {name!r}", value) for name, value in vars(function).items())


def _names_used(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_used(constant)


def _state(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the arguments, attributes and elements that the ``__reduce__`` of an object passes to pickle."""
    reduced = value.__reduce_ex__(5)
    if not isinstance(reduced, tuple):
        return
    _, arguments, state, elements, items = (*reduced, None, None, None, None)[:5]
    for part in state if isinstance(state, tuple) else (state,):
        if isinstance(part, dict):
            yield from ((f"attribute {name!r}", child) for name, child in part.items())
        else:
            yield "state", part
    yield from (("part", argument) for argument in arguments)
    yield from ((f"element {place}", child) for place, child in enumerate(elements or ()))
    yield from ((f"item {key!r}", child) for key, child in items or ())


def a_kind_of(value: Any) -> str:
    """Return the name of a value's type with an article, such as "an int"."""
    kind = type(value)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def _name(function: Any) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__name__", type(function).__name__))
