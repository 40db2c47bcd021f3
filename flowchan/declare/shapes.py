"""Define the types of the functions that operators accept, for type checkers.

``A`` is the type of the argument, and ``B`` the type of the result. An operator accepts a function, an
``async`` function, or a class whose instances are called. A class may be wrapped in ``functools.partial``;
each worker creates one instance.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, Callable, Coroutine, Iterable
from typing import Any, Protocol, TypeAlias, TypeVar

from flowchan.items.keyed_state import KeyedState

A = TypeVar("A")
B = TypeVar("B")
A_contra = TypeVar("A_contra", contravariant=True)
B_co = TypeVar("B_co", covariant=True)


class Called(Protocol[A_contra, B_co]):
    """Callable object that takes one item."""

    def __call__(self, item: A_contra, /) -> B_co:
        """Return the result for one item."""


class Folds(Protocol[B, A_contra]):
    """Callable object that takes the result so far and an item."""

    def __call__(self, so_far: B, item: A_contra, /) -> B:
        """Return the result that includes this item."""


class SourceObject(Protocol[B_co]):
    """Callable object that takes a source's arguments."""

    def __call__(self, *args: Any, **kwargs: Any) -> B_co:
        """Return the items of the source."""


class Bound(Protocol[B_co]):
    """Object that ``functools.partial`` creates from a callable that returns a ``B``."""

    @property
    def func(self) -> Callable[..., B_co]:
        """Return the callable that the partial wraps."""


class UntypedFunction(Protocol):
    """Callable with unknown parameters, such as a ``Callable[..., None]`` or a ``functools.partial``."""

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Accept any arguments."""


Built: TypeAlias = type[Called[A, B]] | Bound[Called[A, B]]
"""Class whose instances are called with an item."""

Awaited: TypeAlias = (
    Callable[[A], Coroutine[Any, Any, B]]
    | type[Called[A, Coroutine[Any, Any, B]]]
    | Bound[Called[A, Coroutine[Any, Any, B]]]
)
"""``async def`` function that takes an item, or a class whose ``__call__`` is such a function."""

AnyFunction: TypeAlias = Callable[..., Any] | Bound[Any]
"""Any function or class that an operator accepts."""

Many: TypeAlias = Iterable[B] | AsyncIterable[B] | Coroutine[Any, Any, Iterable[B]]
"""Result whose elements the worker emits; a coroutine is awaited first."""

Effect: TypeAlias = Callable[[A], object] | type[Called[A, object]]
"""Function that takes an item. Its result is ignored, or only tested for truth."""

WithState: TypeAlias = Callable[[A, KeyedState[Any]], B]
"""Function that takes an item and the state of its key."""

WithStateLater: TypeAlias = Callable[[A, KeyedState[Any]], Coroutine[Any, Any, B]]
"""``async def`` function that takes an item and the state of its key."""

Fold: TypeAlias = Callable[[B, A], B] | type[Folds[B, A]]
"""Function that takes the result so far and an item."""
