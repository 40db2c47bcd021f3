"""Read item types and ports from the annotations of a user function.

Annotations are hints. If an annotation cannot be resolved, its type counts as unknown (``None``), and no
function of this module raises an exception.
"""

from __future__ import annotations

import builtins
import collections.abc
import inspect
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from flowchan.channel.ports import In, Out
from flowchan.declare.callables import bare, is_callable_class

Parameter = inspect.Parameter
_STANDARD = ("builtins", "collections", "collections.abc")


@dataclass(frozen=True, slots=True)
class Port:
    """Port of a general stage, as a parameter of its function declares it."""

    name: str
    reads: bool
    item: Any


class _Names(dict[str, Any]):
    """Names that an annotation written as a string can use.

    Names that exist only for type checkers count as ``Any``, so that the rest of the annotation can be
    evaluated. ``In`` and ``Out`` are always known, even if the user's module did not import them.
    """

    def __missing__(self, name: str) -> Any:
        return {"In": In, "Out": Out}.get(name, Any)


def plain_function(function: Any) -> Any:
    """Return the Python function behind partials, decorators, bound methods and callable objects.

    If the argument wraps no Python function, return the argument.
    """
    function = bare(function)
    if inspect.isclass(function):
        return function.__call__ if is_callable_class(function) else function
    function = inspect.unwrap(function)
    if inspect.ismethod(function):
        return function.__func__
    # Do not use ``callable()``, because the ``__call__`` method is needed below.
    if not inspect.isroutine(function) and hasattr(type(function), "__call__"):  # noqa: B004
        return inspect.unwrap(type(function).__call__)
    return function


def call_signature(function: Any) -> inspect.Signature | None:
    """Return the signature of the call that a worker makes, with resolved annotations.

    For a callable class, the signature is that of ``__call__``. Return ``None`` if Python finds no signature.
    """
    try:
        if is_callable_class(function):
            signature = inspect.signature(plain_function(function))
            signature = signature.replace(parameters=list(signature.parameters.values())[1:])
        else:
            signature = inspect.signature(function)
        names = _names_of(function)
        parameters = [
            p.replace(annotation=_resolved(p.annotation, names)) for p in signature.parameters.values()
        ]
        return signature.replace(
            parameters=parameters, return_annotation=_resolved(signature.return_annotation, names)
        )
    except Exception:  # a user's __signature__, decorator or lazy annotation may raise anything
        return None


def returned_type(function: Any) -> Any:
    """Return the result type of a call: the return annotation or, for a class, the class itself."""
    made = bare(function)
    if inspect.isclass(made) and not is_callable_class(made):
        return made
    signature = call_signature(function)
    return None if signature is None else known(signature.return_annotation)


def element_type(kind: Any) -> Any:
    """Return the element type of a standard container or iterator type, or ``None`` for any other type."""
    if kind is str:
        return str
    if kind in (bytes, bytearray, range):
        return int
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if not inspect.isclass(origin) or not args or origin.__module__ not in _STANDARD:
        return None
    if origin is tuple:
        members = [arg for arg in args if arg is not ...]
        return known(members[0]) if all(member == members[0] for member in members) else None
    iterables = (collections.abc.Iterable, collections.abc.AsyncIterable)
    if not issubclass(origin, iterables) or issubclass(origin, collections.abc.ItemsView):
        return None
    return known(args[0])


def listed(item: Any) -> Any:
    """Return the type of a list of items of this type, such as ``list[int]``."""
    return list if item is None else types.GenericAlias(list, (item,))


def ports_of(function: Callable[..., Any]) -> tuple[Port, ...]:
    """Return the parameters annotated with ``In`` or ``Out``, in the order of the signature."""
    signature = call_signature(function)
    if signature is None:
        return ()
    found = []
    for parameter in signature.parameters.values():
        if parameter.kind in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD):
            continue
        annotation = parameter.annotation
        origin = typing.get_origin(annotation) or annotation
        if origin is In or origin is Out:
            args = typing.get_args(annotation)
            found.append(Port(parameter.name, origin is In, known(args[0]) if args else None))
    return tuple(found)


def group_parameter(function: Callable[..., Any]) -> tuple[str, Any] | None:
    """Return the name and the class of the parameter that receives the worker's group.

    The parameter's annotation is the class, for example ``flowchan.collective.Group``.
    """
    signature = call_signature(function)
    for parameter in () if signature is None else signature.parameters.values():
        if inspect.isclass(parameter.annotation) and hasattr(parameter.annotation, "_make_all"):
            return parameter.name, parameter.annotation
    return None


def known(annotation: Any) -> Any:
    """Return the annotation if it names the type of a value, or ``None`` otherwise.

    Only classes, generic types and unions name the type of a value.
    """
    if annotation is None:
        return type(None)
    if annotation is Parameter.empty or annotation is Any:
        return None
    is_type = inspect.isclass(annotation) or isinstance(annotation, typing.NewType)
    return annotation if is_type or typing.get_origin(annotation) is not None else None


def type_name(kind: Any) -> str:
    """Return the name of a type as a user would write it in code, such as ``list[str]``.

    Error messages and pictures show this name, which contains no module names.
    """
    if kind is ...:
        return "..."
    if kind is None or kind is type(None):
        return "None"
    if isinstance(kind, list):
        return f"[{', '.join(map(type_name, kind))}]"
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return " | ".join(map(type_name, arguments))
    if origin is typing.Annotated:
        return type_name(arguments[0])
    if origin is not None:
        name = getattr(origin, "__qualname__", None) or str(origin).removeprefix("typing.")
        return f"{name}[{', '.join(map(type_name, arguments))}]" if arguments else str(name)
    if isinstance(kind, type):
        return kind.__qualname__.rpartition("<locals>.")[2]
    return str(kind).removeprefix("typing.")


def _names_of(function: Any) -> _Names:
    plain = plain_function(function)
    names = _Names(vars(builtins))
    names.update(getattr(plain, "__globals__", {}))
    closure = getattr(plain, "__closure__", None) or ()
    for name, cell in zip(
        getattr(getattr(plain, "__code__", None), "co_freevars", ()), closure, strict=False
    ):
        try:
            names[name] = cell.cell_contents
        except ValueError:  # the variable has no value yet
            continue
    return names


def _resolved(annotation: Any, names: _Names) -> Any:
    # ``from __future__ import annotations`` turns a quoted annotation into a string inside a string.
    for _ in range(2):
        if isinstance(annotation, str):
            try:
                # typing.get_type_hints would fail for all annotations if one cannot be resolved.
                annotation = eval(annotation, {}, names)
            except Exception:
                return Parameter.empty
    if typing.get_origin(annotation) is typing.Annotated:
        return typing.get_args(annotation)[0]
    return annotation
