"""Check the rules "ports" and "type": streams and item types must match the stage's function.

The checks use an annotation only if its meaning is certain. The checks compare classes and the origins of
generic types, such as ``list`` for ``list[int]``. Types that are unknown, very abstract, or different
but convertible are accepted.

The module does not use beartype.door. That library can prove that one type is a subtype of another, but not
that two types might match. The library also raises for protocols, TypedDicts and unresolved names. The import
takes 77 ms, and the use of the library would save only 35 lines.
"""

from __future__ import annotations

import dataclasses
import inspect
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from flowchan.declare.annotations import call_signature, known, ports_of, returned_type, type_name
from flowchan.declare.callables import bare, is_async, is_callable_class, name_of
from flowchan.declare.values import Origin, Output, Stage
from flowchan.errors import Problem

_ITEMS = {"item": 1, "fold": 2}
_CALLED_WITH = {**_ITEMS, "leaves": 2}
_WIDER = {(int, float), (int, complex), (float, complex), (bool, float), (bool, complex)}
_BYTES = {bytes, bytearray, memoryview}
_ARGUMENTS = {1: "one argument, the item", 2: "two arguments, the result so far and the item"}


def port_problems(stage: Stage) -> Iterator[Problem]:
    """Yield a problem for each stream or argument that does not match the function's parameters."""
    if stage.function is None:
        return
    if stage.operator.calls == "ports":
        found = _port_messages(stage)
    elif stage.operator.calls == "arguments":
        found = _source_messages(stage)
    else:
        found = _call_messages(stage)
    yield from (Problem("ports", stage.name, stage.where, message) for message in found)


def type_problems(stage: Stage, outputs: Mapping[Origin, Output]) -> Iterator[Problem]:
    """Yield a problem for each stream whose items do not match the annotation of their parameter.

    ``outputs`` maps each origin in the graph to its output.
    """
    if stage.operator.iterates and stage.function is not None:
        given = returned_type(stage.function)
        if not _iterable(given) and not is_async(stage.function):
            yield Problem(
                "type",
                stage.name,
                stage.where,
                f"{stage.kind} iterates over the result of {_named(stage.function)}, but that result has "
                f"type {type_name(given)}; return an iterable, or yield the items",
            )
    for stream, port, wanted in _port_types(stage, outputs):
        if not fits(stream.item, wanted):
            yield Problem(
                "type",
                stage.name,
                stage.where,
                f"{port!r} of {_named(stage.function)} takes {type_name(wanted)}, but stream "
                f"{stream.name!r} has items of type {type_name(stream.item)}; add a map between them "
                "that converts the items, or correct one of the annotations",
            )


def fits(given: Any, wanted: Any) -> bool:
    """Return whether a value of type ``given`` may be passed to a parameter annotated with ``wanted``.

    If this cannot be decided, return True.
    """
    given, wanted = _bare(given), _bare(wanted)
    if isinstance(given, tuple):
        return any(fits(member, wanted) for member in given)
    if isinstance(wanted, tuple):
        return any(fits(given, member) for member in wanted)
    if given is None or wanted is None or (given, wanted) in _WIDER or {given, wanted} <= _BYTES:
        return True
    try:
        if getattr(wanted, "_is_protocol", False) or getattr(given, "_is_protocol", False):
            return True
        if issubclass(given, wanted) or issubclass(wanted, given):
            return True
        # The number types of NumPy and other libraries are interchangeable with each other and with Python's
        # own. Among Python's own types, an int parameter rejects a float.
        foreign = not {given, wanted} <= {bool, int, float, complex}
        from numbers import Number  # imported late, because few graphs get here

        return foreign and issubclass(given, Number) and issubclass(wanted, Number)
    except Exception:  # some types, such as TypedDict, do not support issubclass
        return True


def _iterable(annotation: Any) -> bool:
    """Return whether a value with this annotation is iterable. If that is unclear, return True."""
    kind = _bare(annotation)
    if isinstance(kind, tuple):
        return any(_iterable(member) for member in kind)
    return kind in (None, object) or hasattr(kind, "__iter__") or hasattr(kind, "__getitem__")


def _bare(annotation: Any) -> Any:
    """Return the class of an annotation, the members of a union, or ``None`` for any other annotation."""
    while isinstance(annotation, typing.NewType):
        annotation = annotation.__supertype__
    annotation = known(annotation) if annotation is not None else None
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        return _bare(typing.get_args(annotation)[0])
    if origin in (typing.Union, types.UnionType):
        return typing.get_args(annotation)
    return next((kind for kind in (origin, annotation) if inspect.isclass(kind)), None)


def _port_types(stage: Stage, outputs: Mapping[Origin, Output]) -> Iterator[tuple[Output, str, Any]]:
    """Yield each stream whose item type is known, its parameter, and the parameter's annotation."""
    if stage.function is None:
        return
    read = {port: outputs[origin] for port, origin in stage.read if origin in outputs}
    if stage.operator.calls == "ports":
        items = {port.name: port.item for port in ports_of(stage.function) if port.reads}
        for port, stream in read.items():
            if stream.item is not None and items.get(port) is not None:
                pair = port in stage.per_worker
                yield _in_pairs(stream, port, items[port]) if pair else (stream, port, items[port])
    elif stage.operator.calls in _ITEMS:
        parameters = _positional(stage.function)
        index = _ITEMS[stage.operator.calls] - 1
        wanted = known(parameters[index].annotation) if len(parameters) > index else None
        for stream in read.values():
            if stream.item is not None and wanted is not None:
                yield stream, parameters[index].name, wanted


def _in_pairs(stream: Output, port: str, wanted: Any) -> tuple[Output, str, Any]:
    """Return a stream of pairs ``(worker, item)``, and the annotation to which the pairs must fit.

    The parameter receives only the item of each pair.
    """
    args = typing.get_args(stream.item)
    if typing.get_origin(stream.item) is tuple and len(args) == 2 and fits(args[0], int):
        return dataclasses.replace(stream, item=args[1]), port, wanted
    return stream, port, types.GenericAlias(tuple, (int, wanted))


def _positional(function: Any) -> list[inspect.Parameter]:
    signature = _item_signature(function)
    if signature is None:
        return []
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [parameter for parameter in signature.parameters.values() if parameter.kind in kinds]


def _item_signature(function: Any) -> inspect.Signature | None:
    """Return the signature of the call that a worker makes for each item, or ``None`` for a plain class.

    Because of ``__new__`` or a metaclass, the constructor of a plain class often has the wrong signature.
    """
    made = bare(function)
    return None if inspect.isclass(made) and not is_callable_class(made) else call_signature(function)


def _call_messages(stage: Stage) -> Iterator[str]:
    """Yield messages about an operator that calls its function with each item."""
    count = _CALLED_WITH.get(stage.operator.calls or "")
    if count is None:
        return
    arguments = _ARGUMENTS[count]
    if "state" in stage.options:
        count, arguments = 2, "two arguments, the item and the state of its key"
    signature = _item_signature(stage.function)
    if signature is not None:
        reason = _refused(signature, ("",) * count, {})
        if reason:
            yield (
                f"{stage.kind} calls {_named(stage.function)} with {arguments}, but its "
                f"parameters are {_shown(signature)}: {reason}; bind the other parameters with "
                "functools.partial"
            )
    yield from _construction_messages(stage)


def _source_messages(stage: Stage) -> Iterator[str]:
    signature = _item_signature(stage.function)
    if signature is not None:
        reason = _refused(signature, stage.args, dict(stage.kwargs))
        if reason:
            yield (
                f"source can't call {_named(stage.function)}, whose parameters are {_shown(signature)}: "
                f"{reason}"
            )
    yield from _construction_messages(stage)


def _construction_messages(stage: Stage) -> Iterator[str]:
    """Check that a worker can create an instance of a callable class without arguments."""
    if not is_callable_class(stage.function):
        return
    try:
        signature = inspect.signature(typing.cast(Any, stage.function))
    except (TypeError, ValueError):
        return
    reason = _refused(signature, (), {})
    if reason:
        yield (
            f"class {_named(stage.function)} is built once per worker without arguments, but its "
            f"parameters are {_shown(signature)}: {reason}; bind its parameters with functools.partial"
        )


def _port_messages(stage: Stage) -> Iterator[str]:
    """Check a general stage: ``In`` parameters need streams, and other parameters need arguments."""
    name = _named(stage.function)
    signature = call_signature(stage.function)
    if signature is None:
        yield (
            f"the signature of {name} can't be read, so its ports are unknown; wrap it in a function with "
            "In and Out parameters"
        )
        return
    ports = {port.name: port for port in ports_of(typing.cast(Any, stage.function))}
    readers = [port.name for port in ports.values() if port.reads]
    if not ports:
        yield (
            f"{name} has no parameter annotated In[...] or Out[...], so it has no ports: {_shown(signature)}"
        )
    elif len(stage.inputs) != len(readers):
        wanted = f"{len(readers)} In parameter{'s' * (len(readers) != 1)}"
        listed = f" ({', '.join(readers)})" if readers else ""
        given = "1 stream was" if len(stage.inputs) == 1 else f"{len(stage.inputs)} streams were"
        yield f"{name} has {wanted}{listed}, but {given} passed; pass one stream for each In parameter"
    group = None if stage.gang is None else stage.gang.parameter
    for parameter in signature.parameters.values():
        if parameter.name != group:
            yield from _parameter_messages(stage, name, parameter, parameter.name in ports)
        elif group in stage.kwargs:
            yield (
                f"parameter {group!r} of {name} is the worker's membership in a group, which the run passes; "
                "remove the argument"
            )
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values())
    for given in stage.kwargs:
        if given not in signature.parameters and not takes_all:
            yield f"{name} has no parameter {given!r}: {_shown(signature)}"
    yield from _construction_messages(stage)


def _parameter_messages(
    stage: Stage, name: str, parameter: inspect.Parameter, is_port: bool
) -> Iterator[str]:
    """Check one parameter of a general stage.

    A port needs a stream, and any other parameter needs an argument or a default.
    """
    given = parameter.name in stage.kwargs
    optional = parameter.default is not parameter.empty or parameter.kind in (
        parameter.VAR_POSITIONAL,
        parameter.VAR_KEYWORD,
    )
    if parameter.kind is parameter.POSITIONAL_ONLY and (is_port or given):
        yield f"parameter {parameter.name!r} of {name} is positional-only; remove the '/' from the signature"
    if is_port and given:
        yield (
            f"parameter {parameter.name!r} of {name} is a port, so its argument must be a stream; pass the "
            "stream by position"
        )
    if not is_port and not given and not optional:
        yield (
            f"parameter {parameter.name!r} of {name} is not a port and has no argument; annotate it "
            f"In[...] or Out[...], or pass {parameter.name}=..."
        )


def _refused(signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        return str(error)
    return None


def _named(function: Any) -> str:
    return repr(name_of(function))


def _shown(signature: inspect.Signature) -> str:
    return "(" + ", ".join(parameter.name for parameter in signature.parameters.values()) + ")"
