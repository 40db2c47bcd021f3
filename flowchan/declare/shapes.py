"""The shapes of the functions that operators take, as type checkers see them. ``A`` is what one is called
with,
and ``B`` what comes of it.

An operator takes a function, or a class whose instances are called: it is built once per worker, by itself
or by a
``functools.partial``. Either may be ``async``.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, Callable, Coroutine, Iterable
from typing import Any, Protocol, TypeAlias, TypeVar

A = TypeVar("A")
B = TypeVar("B")
A_contra = TypeVar("A_contra", contravariant=True)
B_co = TypeVar("B_co", covariant=True)


class Called(Protocol[A_contra, B_co]):
    """An object that is called with an item."""

    def __call__(self, item: A_contra, /) -> B_co: ...


class Folds(Protocol[B, A_contra]):
    """An object that is called with the result so far and an item."""

    def __call__(self, so_far: B, item: A_contra, /) -> B: ...


class SourceObject(Protocol[B_co]):
    """An object that is called with the arguments of a source."""

    def __call__(self, *args: Any, **kwargs: Any) -> B_co: ...


class Bound(Protocol[B_co]):
    """A ``functools.partial`` of what gives a ``B``."""

    @property
    def func(self) -> Callable[..., B_co]: ...


class Untold(Protocol):
    """What takes anything, such as a ``Callable[..., None]`` or a ``functools.partial``: nobody knows its
    parameters."""

    def __call__(self, *args: object, **kwargs: object) -> object: ...


Built: TypeAlias = type[Called[A, B]] | Bound[Called[A, B]]
"""A class whose instances are called with an item."""

Awaited: TypeAlias = (
    Callable[[A], Coroutine[Any, Any, B]]
    | type[Called[A, Coroutine[Any, Any, B]]]
    | Bound[Called[A, Coroutine[Any, Any, B]]]
)
"""An ``async def`` function of an item, or a class whose ``__call__`` is one."""

AnyFunction: TypeAlias = Callable[..., Any] | Bound[Any]
"""Whatever of these an operator takes."""

Many: TypeAlias = Iterable[B] | AsyncIterable[B] | Coroutine[Any, Any, Iterable[B]]
"""What is iterated over, once it is awaited if need be."""

Effect: TypeAlias = Callable[[A], object] | type[Called[A, object]]
"""A function of an item, whatever it gives."""

Fold: TypeAlias = Callable[[B, A], B] | type[Folds[B, A]]
"""A function of the result so far and an item."""
