"""The options that operators share: what type checkers accept, what ``help`` shows, the defaults and the
checks,
which are those of ``StageSettings``."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypedDict, TypeVar

from flowchan.declare.callables import is_async
from flowchan.declare.placements import Placement, PlacementOption, placement_argument
from flowchan.declare.values import DEFAULT_CAPACITY, DEFAULT_MAX_DEATHS, DEFAULT_RESTARTS, Gang
from flowchan.items.arguments import flag, seconds, text, whole

Operator = TypeVar("Operator", bound=Callable[..., Any])


class NameOption(TypedDict, total=False):
    """What every operator takes."""

    name: str | None
    """The stage's name; the function's or the operator's if it is left out."""


class PlainOptions(NameOption, total=False):
    """What an operator takes that has an output and calls no function of the user's."""

    capacity: int
    """Of the output channel, in items; 64 if left out."""


class WorkOptions(NameOption, total=False):
    """What every operator takes that calls a function of the user's for each item."""

    on: PlacementOption
    """Its workers run on a ``"thread"`` (default) or in a ``"process"`` each; on the hosts of a pool, or on
    ``"hosts"``, those of ``flowchan run --hosts``."""
    workers: int
    """How many of them; 1 if left out."""
    retries: int
    """How many times an item for which the function raised is tried again; 0 if left out."""
    retry_delay: float | None
    """Seconds before each further try; at once if left out, or 0."""
    retry_on: type[Exception] | tuple[type[Exception], ...]
    """Of which errors an item is tried again; of all if left out."""
    timeout: float | None
    """Seconds that the function may take for an item, which then counts as failed by ``TimeoutError``; no
    limit if left out. For an ``async def`` function, and for workers in processes, which are replaced."""
    restarts: int
    """How many worker processes that died are replaced, over the whole run; 10 if left out. If left out, or
    from 10**9 on, four deaths in a row before the worker begins to work end the run too."""
    max_deaths: int
    """With how many workers an item may die before it counts as failed itself; 3 if left out."""
    gpus: int
    """That each worker, in a process of its own, has for itself; 0 if left out: it sees what the program, or
    its host, sees."""


class ItemOptions(WorkOptions, total=False):
    """The same for an operator with an output."""

    capacity: int
    """Of the output channel, in items; 64 if left out."""


class OrderedOptions(ItemOptions, total=False):
    """The same for an operator that can keep the order of its input."""

    ordered: bool
    """Whether several workers together keep it; true if left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSettings:
    """What an operator has been given for its stage, with the defaults of all operators."""

    name: str | None = None
    capacity: int = DEFAULT_CAPACITY
    errors: bool = False
    on: PlacementOption = "thread"
    workers: int = 1
    ordered: bool = True
    retries: int = 0
    retry_delay: float | None = None
    retry_on: type[Exception] | tuple[type[Exception], ...] = Exception
    timeout: float | None = None
    restarts: int = DEFAULT_RESTARTS
    max_deaths: int = DEFAULT_MAX_DEATHS
    restartable: bool = False
    gpus: int = 0
    gang: Gang | None = None

    def checked(self, kind: str, function: Callable[..., Any] | None) -> Placement:
        """Check what all operators share, for a stage of this kind and function, and return its place."""
        whole(kind, "capacity", self.capacity, 1)
        whole(kind, "workers", self.workers, 1)
        whole(kind, "retries", self.retries, 0)
        whole(kind, "restarts", self.restarts, 0)
        whole(kind, "max_deaths", self.max_deaths, 1)
        flag(kind, "ordered", self.ordered)
        flag(kind, "restartable", self.restartable)
        placement = placement_argument(kind, self.on)
        limited = seconds(kind, "timeout", self.timeout) is not None
        if limited and not placement.apart and not is_async(function):
            raise ValueError(
                f"{kind}: timeout={self.timeout} needs on='process', a pool of flowchan.hosts or an async "
                "def function: nothing can end a call on a thread from outside"
            )
        if whole(kind, "gpus", self.gpus, 0) and not placement.apart:
            raise ValueError(
                f"{kind}: gpus={self.gpus} needs on='process' or a pool of flowchan.hosts: threads share the "
                "program's devices"
            )
        if self.name is not None:
            text(kind, "name", self.name)
        return placement


SOURCE_OPTIONS = ("name", "on", "capacity", "restarts", "restartable", "gpus")


def shows(options: type) -> Callable[[Operator], Operator]:
    """Has ``help`` list the options of an operator by name, with their defaults, instead of its
    ``**options``."""
    shared = inspect.signature(StageSettings).parameters
    by_name = [shared[name] for name in options.__annotations__]

    def shown(operator: Operator) -> Operator:
        signature = inspect.signature(operator)
        own = [one for one in signature.parameters.values() if one.kind is not one.VAR_KEYWORD]
        operator.__signature__ = signature.replace(parameters=[*own, *by_name])  # type: ignore[attr-defined]
        return operator

    return shown
