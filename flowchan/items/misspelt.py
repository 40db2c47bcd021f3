"""What a call says of an option that it does not have: the one that was meant."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, cast

Function = TypeVar("Function", bound=Callable[..., Any])


def known_options(call: str, options: Iterable[str], known: Iterable[str]) -> None:
    """``TypeError`` for an option that the call does not have, with the one that was meant."""
    known = tuple(known)
    for name in options:
        if name not in known:
            near = near_misses(name, known)
            rest = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(known)}"
            raise TypeError(f"{call}: has no option {name!r}; {rest}")


def near_misses(name: str, known: Iterable[str]) -> list[str]:
    """The one of them that ``name`` is most like, or none."""
    from difflib import get_close_matches  # slow to import, and there where something is misspelt

    return get_close_matches(name, list(known), 1)


def refuses_misspelt(call: str) -> Callable[[Function], Function]:
    """Has a function, or a method, say of an option that it does not have which one was meant, under the name
    by which users know it. Python does so by itself from 3.13 on, but names the function where it is defined.
    It costs a call of Python's, so that nothing has it that is called for each item."""

    def refusing(function: Function) -> Function:
        code = function.__code__
        taken = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        known = tuple(name for name in taken if name != "self")

        @functools.wraps(function)
        def checked(*args: Any, **options: Any) -> Any:
            if options:
                known_options(call, options, known)
            return function(*args, **options)

        return cast(Function, checked)

    return refusing
