"""From words of the command line to what a function's parameters are annotated with."""

from __future__ import annotations

import contextlib
import enum
import inspect
import types
import typing
from typing import Any

import click

_ANY = (object, Any)
"""Types that do not say what a text is to become."""

_SEVERAL = (list, tuple, set, frozenset, dict)
"""Types that would take the letters of a text."""

_TRUTH = ("true", "false", "yes", "no", "on", "off", "1", "0")


def converted(text: str, annotation: Any) -> Any:
    """``text`` as a value of that type: numbers, truth values (yes, no, true, false, on, off, 1, 0), paths,
    members of an ``Enum`` by name, a ``Literal``'s values, ``X | None``, and classes that take one text. The
    text itself where the annotation says nothing of that. Raises ``ValueError`` with what is allowed, also
    for a collection: a function would take the letters of a text for its elements."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return _any_of(text, [one for one in typing.get_args(annotation) if one is not types.NoneType])
    if typing.get_origin(annotation) is typing.Literal:
        return _chosen(text, {str(value): value for value in typing.get_args(annotation)})
    kind = typing.get_origin(annotation) or annotation
    if kind in _SEVERAL:
        raise ValueError(
            f"{text!r} is one text, and no {kind.__name__}; annotate it as str, or take several: *names: str"
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
        # of truth values click names an empty word, too
        told = f"{text!r} is none of {', '.join(_TRUTH)}" if annotation is bool else error.message
        raise ValueError(told) from error
    except Exception as error:
        raise ValueError(f"{text!r} is no {annotation.__name__}: {error}") from error


def _any_of(text: str, annotations: list[Any]) -> Any:
    """The first that fits."""
    for annotation in annotations[:-1]:
        with contextlib.suppress(ValueError):
            return converted(text, annotation)
    return converted(text, annotations[-1])


def _chosen(text: str, allowed: dict[str, Any]) -> Any:
    try:
        return allowed[text]
    except KeyError:
        raise ValueError(f"{text!r} is none of {', '.join(allowed)}") from None
