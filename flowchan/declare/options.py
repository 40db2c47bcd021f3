"""Define the options that several operators have, with their types, defaults and checks.

The ``TypedDict`` classes contain the types and descriptions. ``StageSettings`` contains the defaults and
checks. :func:`shows` makes ``help`` list the options.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, TypedDict, TypeVar

from flowchan.declare.auto_workers import WorkersOption, workers_argument
from flowchan.declare.callables import is_async, is_callable_class
from flowchan.declare.placements import Placement, PlacementOption, placement_argument
from flowchan.declare.values import DEFAULT_CAPACITY, DEFAULT_MAX_DEATHS, DEFAULT_RESTARTS, Gang
from flowchan.items.arguments import callable_argument, flag, per_second, seconds, text, whole
from flowchan.items.combining import OPERATIONS

Operator = TypeVar("Operator", bound=Callable[..., Any])


class NameOption(TypedDict, total=False):
    """Option of every operator."""

    name: str | None
    """Name of the stage (default: the name of the function or the operator)."""


class PlainOptions(NameOption, total=False):
    """Options of operators that have an output but do not call a function for each item."""

    capacity: int
    """Capacity of the output channel in items (default: 64)."""


class WorkOptions(NameOption, total=False):
    """Options of operators that call a function for each item."""

    on: PlacementOption
    """Placement of the workers: ``"thread"`` (default), ``"process"``, or a pool from ``flowchan.hosts``.
    ``"hosts"`` means the hosts of ``flowchan run --hosts``."""
    workers: WorkersOption
    """Number of workers (default: 1). With ``"auto"`` or ``auto(most=8)``, the run chooses the number."""
    retries: int
    """Number of times that an item is retried if the function raises (default: 0)."""
    retry_delay: float | None
    """Seconds before each retry (default: 0)."""
    retry_on: type[Exception] | tuple[type[Exception], ...]
    """Exception types that trigger a retry (default: all)."""
    timeout: float | None
    """Time limit for one item in seconds (default: none). An item that exceeds it fails with
    ``TimeoutError``. The option requires an ``async def`` function, or worker processes, because a process
    that exceeds the limit is killed and replaced."""
    rate: float | None
    """Maximum number of items that start per second, over all workers of the stage (default: no limit).
    Starts are evenly spaced, and a retry also counts as a start. Not available for workers on hosts."""
    share_instance: bool
    """Whether all coroutines of the stage share one instance of an async class (default: False, one instance
    each). Processes and hosts cannot share an instance."""
    restarts: int
    """Maximum number of dead worker processes replaced within 60 seconds of work (default: 10). Deaths that
    count towards ``max_deaths`` of an item do not count here. With the default, or with 10**9 or more, the
    run also ends if a worker dies four times in a row before it starts to work."""
    max_deaths: int
    """Number of worker deaths after which an item counts as failed (default: 3)."""
    gpus: float
    """Number of GPUs reserved for each worker process (default: 0). A number below 1, such as 0.5, is a share
    of one GPU. With 0, a worker can use every GPU that its program or host can use."""


class ItemOptions(WorkOptions, total=False):
    """Options of operators that call a function for each item and have an output."""

    capacity: int
    """Capacity of the output channel in items (default: 64)."""


class OrderedOptions(ItemOptions, total=False):
    """Options of operators that can keep the order of their input."""

    ordered: bool
    """Whether several workers keep the order of the input (default: True)."""


class KeyOptions(TypedDict, total=False):
    """Options of operators that can process items by key."""

    key: Callable[[Any], Hashable] | None
    """Function that returns the key of an item (default: none). Items with equal keys are processed one after
    another in stream order, and items with different keys in parallel."""
    concurrency_per_key: int
    """Maximum number of items with the same key processed at a time (default: 1)."""
    state: Callable[[], Any] | None
    """Function that returns the initial state of a key (default: no state). The stage then calls
    ``function(item, state)`` with the state of the item's key."""


class KeyedOptions(OrderedOptions, KeyOptions, total=False):
    """Options of operators that can process items by key and have an output."""


class KeyedSinkOptions(WorkOptions, KeyOptions, total=False):
    """Options of a sink, which can process items by key."""


class PortOptions(NameOption, total=False):
    """Options of a general stage, whose function has ports."""

    on: PlacementOption
    """Placement of the workers: ``"thread"`` (default), ``"process"``, ``"hosts"`` or a pool of hosts."""
    workers: int
    """Number of workers (default: 1)."""
    capacity: int
    """Capacity of each output channel in items (default: 64)."""
    restarts: int
    """Maximum number of dead worker processes replaced within 60 seconds of work (default: 10)."""
    restartable: bool
    """Whether the function keeps no state between items, so a dead worker process can be replaced (default:
    False)."""
    elastic: bool
    """For a gang: whether to restart only the dead worker (default: False)."""
    gpus: float
    """Number of GPUs reserved for each worker; below 1, a share of one GPU (default: 0). Requires worker
    processes."""
    per_worker: str | tuple[str, ...]
    """Name of an ``In`` parameter, or a tuple of names, whose items are pairs ``(worker, item)`` (default:
    none)."""


def _gpus(kind: str, value: Any) -> float:
    """Check that the value is a whole number of GPUs, or a share of a single GPU."""
    if isinstance(value, float):
        if not 0 < value < 1:
            raise ValueError(
                f"{kind}: gpus must be an int of at least 0, or a share between 0 and 1, got {value}"
            )
        return value
    return whole(kind, "gpus", value, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSettings:
    """Options of one stage, with the values that the user or the defaults provide."""

    name: str | None = None
    capacity: int = DEFAULT_CAPACITY
    errors: bool = False
    on: PlacementOption = "thread"
    workers: WorkersOption = 1
    ordered: bool = True
    retries: int = 0
    retry_delay: float | None = None
    retry_on: type[Exception] | tuple[type[Exception], ...] = Exception
    timeout: float | None = None
    rate: float | None = None
    share_instance: bool = False
    restarts: int = DEFAULT_RESTARTS
    max_deaths: int = DEFAULT_MAX_DEATHS
    restartable: bool = False
    gpus: float = 0
    gang: Gang | None = None

    def checked(self, kind: str, function: Callable[..., Any] | None) -> Placement:
        """Check the settings common to all operators, and return the placement."""
        whole(kind, "capacity", self.capacity, 1)
        workers_argument(kind, self.workers)
        whole(kind, "retries", self.retries, 0)
        whole(kind, "restarts", self.restarts, 0)
        whole(kind, "max_deaths", self.max_deaths, 1)
        flag(kind, "ordered", self.ordered)
        flag(kind, "restartable", self.restartable)
        placement = placement_argument(kind, self.on)
        limited = seconds(kind, "timeout", self.timeout) is not None
        if limited and not placement.own_process and not is_async(function):
            raise ValueError(
                f"{kind}: timeout={self.timeout} requires on='process', a pool from flowchan.hosts or an "
                "async def function, because a call in a thread cannot be interrupted"
            )
        if per_second(kind, "rate", self.rate) is not None and placement.is_remote:
            raise ValueError(
                f"{kind}: rate={self.rate} requires on='thread' or on='process', because hosts do not share "
                "a clock; set rate= on a stage of this machine instead"
            )
        if flag(kind, "share_instance", self.share_instance) and (
            placement.own_process or not (is_callable_class(function) and is_async(function))
        ):
            raise ValueError(
                f"{kind}: share_instance=True requires on='thread' and a class with an async __call__; "
                "without share_instance=True, each worker has its own instance"
            )
        if _gpus(kind, self.gpus) and not placement.own_process:
            raise ValueError(
                f"{kind}: gpus={self.gpus} requires on='process' or a pool from flowchan.hosts, because "
                "threads share the program's devices"
            )
        if self.name is not None:
            text(kind, "name", self.name)
        return placement


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyedSettings(StageSettings):
    """Settings of a stage that can process items by key, with their defaults."""

    key: Callable[[Any], Hashable] | None = None
    concurrency_per_key: int = 1
    state: Callable[[], Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PortSettings(StageSettings):
    """Settings of a general stage, with their defaults."""

    elastic: bool = False
    per_worker: str | tuple[str, ...] = ()


SOURCE_OPTIONS = ("name", "on", "capacity", "restarts", "restartable", "gpus")


def shows(
    options: type, settings: type = StageSettings, rest: str | None = None
) -> Callable[[Operator], Operator]:
    """Return a decorator that makes ``help`` list an operator's options one by one.

    Args:
        options: ``TypedDict`` of the options.
        settings: Class with the default of each option.
        rest: Name under which ``help`` shows further keyword arguments, or None if the operator takes none.

    Returns:
        The decorator.
    """
    shared = inspect.signature(settings).parameters
    by_name = [shared[name] for name in options.__annotations__]

    def shown(operator: Operator) -> Operator:
        signature = inspect.signature(operator)
        own = [one for one in signature.parameters.values() if one.kind is not one.VAR_KEYWORD]
        others = [inspect.Parameter(rest, inspect.Parameter.VAR_KEYWORD, annotation="Any")] if rest else []
        signature = signature.replace(parameters=[*own, *by_name, *others])
        operator.__signature__ = signature  # type: ignore[attr-defined]
        return operator

    return shown


def allreduce_options(op: Any, to_workers: Any) -> tuple[Callable[..., Any] | None, dict[str, Any]]:
    """Check the options of ``allreduce``, and return its function and its special options."""
    own = {"to_workers": flag("allreduce", "to_workers", to_workers)}
    if not isinstance(op, str):
        return callable_argument("allreduce", "op", op), own
    if op not in OPERATIONS:
        allowed = ", ".join(map(repr, OPERATIONS))
        raise ValueError(
            f"allreduce: op must be one of {allowed} or a function that takes two values, got {op!r}"
        )
    return None, {**own, "op": op}
