"""Convert words of the command line to the types that a function or an option needs."""

from __future__ import annotations

import contextlib
import enum
import inspect
import re
import types
import typing
from typing import Any

import click

_ANY = (object, Any)
"""Annotations that accept the text as it is."""

_SEVERAL = (list, tuple, set, frozenset, dict)
"""Collections, which must be rejected because their constructors would split the text into characters."""

_BOOLEANS = ("true", "false", "yes", "no", "on", "off", "1", "0")


def converted(text: str, annotation: Any) -> Any:
    """Convert ``text`` to the annotated type.

    Supported types are numbers, booleans (yes, no, true, false, on, off, 1, 0), paths, members of an ``Enum``
    by name, and values of a ``Literal``. ``X | None`` and classes that can be constructed from one string are
    also supported. For any other annotation, the result is the unchanged text.

    Args:
        text: Word from the command line.
        annotation: The parameter's annotation.

    Returns:
        The value.

    Raises:
        ValueError: The text does not represent a value of the type, or the type is a collection.
    """
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return _any_of(text, [one for one in typing.get_args(annotation) if one is not types.NoneType])
    if typing.get_origin(annotation) is typing.Literal:
        return _chosen(text, {str(value): value for value in typing.get_args(annotation)})
    kind = typing.get_origin(annotation) or annotation
    if kind in _SEVERAL:
        raise ValueError(
            f"the value must be of type {kind.__name__}, got the single string {text!r}; annotate the "
            "parameter as str, or accept several strings: *names: str"
        )
    if not isinstance(annotation, type) or annotation in _ANY or inspect.isabstract(annotation):
        return text
    if issubclass(annotation, str):
        return text
    if issubclass(annotation, enum.Enum):
        return _chosen(text, dict(annotation.__members__))
    try:
        return click.types.convert_type(annotation).convert(text, None, None)
    except click.BadParameter as error:
        # Do not use click's message, which would list an empty word among the booleans.
        problem = (
            f"the value must be one of {', '.join(_BOOLEANS)}, got {text!r}"
            if annotation is bool
            else error.message
        )
        raise ValueError(problem) from error
    except Exception as error:
        raise ValueError(f"the value must be of type {annotation.__name__}, got {text!r}: {error}") from error


def _any_of(text: str, annotations: list[Any]) -> Any:
    """Convert the text to the first of several types that accepts it."""
    for annotation in annotations[:-1]:
        with contextlib.suppress(ValueError):
            return converted(text, annotation)
    return converted(text, annotations[-1])


def _chosen(text: str, allowed: dict[str, Any]) -> Any:
    try:
        return allowed[text]
    except KeyError:
        raise ValueError(f"the value must be one of {', '.join(allowed)}, got {text!r}") from None


def port_option(context: click.Context, parameter: click.Parameter, value: str | None) -> int | str | None:
    """Parse a port, such as 9464 or "0.0.0.0:9464"."""
    from flowchan.viz.insight.metrics_port import host_and_port

    if value is None:
        return None
    port = int(value) if value.isascii() and value.isdigit() else value
    try:
        host_and_port(port)
    except ValueError as error:
        raise click.BadParameter(str(error), context, parameter) from None
    return port


def size_option(context: click.Context, parameter: click.Parameter, value: str) -> int:
    """Parse a number of bytes, such as 4096, 500MB or 2GiB."""
    units = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
    units |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40, "B": 1}
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?([A-Z]*)", value.strip().upper())
    size = int(float(found[1]) * units[found[2]]) if found is not None and found[2] in units else 0
    if size < 1:
        raise click.BadParameter(
            f"the size must be a number of bytes such as 4096, 500MB or 2GiB, got {value!r}",
            context,
            parameter,
        )
    return size
