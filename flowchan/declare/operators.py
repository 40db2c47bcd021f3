"""Define the properties of each operator in one table.

Checks, plans, runs, reports and pictures read the table, so that they never compare operator names. To add an
operator, add a row here, a loop (see ``flowchan/run/worker/operator_loops.py``), and a ``Stream`` method.
"""

from __future__ import annotations

import math
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Calls = Literal["item", "fold", "leaves", "arguments", "ports"]
"""When and with which arguments the worker calls the user's function.

- ``item``: with each item.
- ``fold``: with the result so far and each item.
- ``leaves``: with each pair of corresponding leaves of the result so far and the item.
- ``arguments``: once, with the declared arguments.
- ``ports``: once in each worker, with its ports.
"""

Role = Literal["source", "stage", "sink"]

_WINDOWS = "flowchan.run.worker.window_loops"
_BODIES, _ASYNC_BODIES = "flowchan.run.worker.operator_loops", "flowchan.run.worker.async_operator_loops"


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """Properties of an operator. Messages and tables show its ``name``."""

    name: str

    body: str = ""
    """Function that each worker runs, as ``module:function``.

    The function receives an ``OperatorJob`` and the worker's ports by name. The string is empty if the
    operator has no worker, because the program itself puts the items.
    """
    async_body: str = ""
    """Body for an ``async def`` function; empty if the operator does not support one."""

    calls: Calls | None = None
    """How the worker calls the user's function, or ``None`` if the operator takes no function."""
    iterates: bool = False
    """Whether the worker iterates over the function's result."""

    per_item: bool = False
    """Whether the operator keeps no state between items, so another worker can take over."""
    one_output: bool = False
    """Whether each item has exactly one output, so putting the output also completes the item."""
    ordered: bool = True
    """Whether a stage with several workers can emit outputs in the order of its input."""
    worker_per_input: bool = False
    """Whether the stage has one worker for each input."""
    ends_loops: bool = False
    """Whether the operator can end before its inputs end. Only such operators may read a feedback stream."""

    result: bool = False
    """Whether the output becomes a result of the run if no stage reads it."""
    gathers: bool = False
    """Whether the program can iterate over the result during the run."""

    role: Role = "stage"
    """Role in pictures. It also decides which items a report counts: a source's outputs, otherwise the
    inputs."""
    owes: bool = False
    """Whether each item produces one output or one failed item. A sink's finished items count as outputs."""
    lets_go: str = ""
    """Verb in reports for items that the operator drops; empty if it never drops items."""
    answers: bool = False
    """Whether ``ask()`` requests can pass through, because each output belongs to a known item."""
    resumable: bool = False
    """Whether runs with the operator can be resumed, because the source items of each output are known."""
    groups: bool = False
    """Whether each output is a list of several items."""
    routes: bool = False
    """Whether the operator chooses a worker for each item and keeps the item's number."""
    repeats: bool = False
    """Whether every output receives every item. The report then counts only one output."""
    expects: Callable[[Mapping[str, Any], list[int]], int | None] | None = None
    """Function that predicts the number of outputs, or returns ``None`` if the number is unknown.

    Its arguments are the stage's options and the number of items at each input.
    """
    describe: Callable[[Mapping[str, Any]], str] | None = None
    """Function that returns the label of a stage's options in pictures."""

    @property
    def holds_back(self) -> bool:
        """Return whether the operator collects many items before it emits any."""
        return self.result or self.groups

    @property
    def begins(self) -> bool:
        """Return whether items enter the graph at this operator."""
        return self.role == "source"

    @property
    def ends(self) -> bool:
        """Return whether items leave the graph at this operator."""
        return self.role == "sink"

    @property
    def outside(self) -> bool:
        """Return whether the program itself puts the items. The operator then has no worker."""
        return not self.body

    def run(self) -> Callable[..., Any]:
        """Import and return the operator's loop."""
        return pkgutil.resolve_name(self.body)  # type: ignore[no-any-return]

    def run_async(self) -> Callable[..., Any]:
        """Import and return the operator's loop for an ``async def`` function."""
        return pkgutil.resolve_name(self.async_body)  # type: ignore[no-any-return]


def _length(options: Mapping[str, Any], _: list[int]) -> int | None:
    """Return the length of a source's iterable, or ``None`` if it has no length."""
    try:
        return len(options["iterable"])
    except Exception:  # the iterable has no length, or the user's ``__len__`` failed
        return None


def _batches(options: Mapping[str, Any], into: list[int]) -> int | None:
    return -(-sum(into) // options["size"]) if options["timeout"] is None else None


def _batch_size(options: Mapping[str, Any]) -> str:
    waits = options["timeout"]
    return f"{options['size']:,} items" + (f" or {waits:g} s" if waits is not None else "")


def _window(options: Mapping[str, Any]) -> str:
    in_seconds = options["seconds"] is not None
    length, unit = (options["seconds"], "s") if in_seconds else (options["size"], "items")
    if length == math.inf:
        return ""
    slides = f", every {options['every']:,g}" if options["every"] != length else ""
    return f"{length:,g} {unit}{slides}"


def _within(options: Mapping[str, Any]) -> str:
    return f"within {options['within']:g} s"


def _taken(options: Mapping[str, Any], into: list[int]) -> int:
    return min([*into, int(options["n"])])


def _most_taken(options: Mapping[str, Any]) -> str:
    return f"{options['n']:,} items"


def _as_the_shortest(_: Mapping[str, Any], into: list[int]) -> int:
    return min(into)


def _as_many(_: Mapping[str, Any], into: list[int]) -> int:
    return sum(into)


_ROWS = (
    Operator(
        name="source",
        resumable=True,
        body=f"{_BODIES}:source",
        async_body=f"{_ASYNC_BODIES}:source",
        calls="arguments",
        iterates=True,
        role="source",
        expects=_length,
    ),
    Operator(name="input", role="source", answers=True),
    Operator(
        name="map",
        resumable=True,
        answers=True,
        body=f"{_BODIES}:map_",
        async_body=f"{_ASYNC_BODIES}:map_",
        calls="item",
        per_item=True,
        one_output=True,
        owes=True,
        expects=_as_many,
    ),
    Operator(
        name="flat_map",
        resumable=True,
        body=f"{_BODIES}:flat_map",
        async_body=f"{_ASYNC_BODIES}:flat_map",
        calls="item",
        iterates=True,
        per_item=True,
    ),
    Operator(
        name="filter",
        resumable=True,
        answers=True,
        body=f"{_BODIES}:filter_",
        async_body=f"{_ASYNC_BODIES}:filter_",
        calls="item",
        per_item=True,
        lets_go="dropped",
    ),
    Operator(
        name="partition",
        resumable=True,
        answers=True,
        body=f"{_BODIES}:partition",
        calls="item",
        per_item=True,
        owes=True,
    ),
    Operator(
        name="route",
        answers=True,
        body=f"{_BODIES}:route",
        calls="item",
        routes=True,
        owes=True,
        expects=_as_many,
    ),
    Operator(
        name="sink",
        resumable=True,
        answers=True,
        body=f"{_BODIES}:sink",
        async_body=f"{_ASYNC_BODIES}:sink",
        calls="item",
        per_item=True,
        role="sink",
        owes=True,
    ),
    Operator(name="reduce", body=f"{_BODIES}:reduce", calls="fold", result=True),
    Operator(
        name="collect", resumable=True, answers=True, body=f"{_BODIES}:collect", result=True, gathers=True
    ),
    Operator(
        name="batch",
        resumable=True,
        answers=True,
        body=f"{_BODIES}:batch",
        groups=True,
        expects=_batches,
        describe=_batch_size,
    ),
    Operator(name="window", body=f"{_WINDOWS}:window", describe=_window),
    Operator(name="join", body=f"{_WINDOWS}:join", describe=_within),
    Operator(name="unbatch", resumable=True, answers=True, body=f"{_BODIES}:unbatch"),
    Operator(
        name="take",
        answers=True,
        body=f"{_BODIES}:take",
        lets_go="not taken",
        expects=_taken,
        describe=_most_taken,
    ),
    Operator(name="tee", resumable=True, answers=True, body=f"{_BODIES}:tee", repeats=True, expects=_as_many),
    Operator(name="zip", body=f"{_BODIES}:zip_", expects=_as_the_shortest),
    Operator(name="allreduce", body=f"{_BODIES}:allreduce", calls="leaves"),
    Operator(
        name="merge",
        resumable=True,
        answers=True,
        body=f"{_BODIES}:merge",
        worker_per_input=True,
        owes=True,
        expects=_as_many,
    ),
    Operator(
        name="record",
        resumable=True,
        answers=True,
        body=f"{_BODIES}:record",
        one_output=True,
        owes=True,
        expects=_as_many,
    ),
    Operator(
        name="stage",
        body=f"{_BODIES}:stage",
        async_body=f"{_ASYNC_BODIES}:stage",
        calls="ports",
        ordered=False,
        ends_loops=True,
    ),
)

OPERATORS: dict[str, Operator] = {operator.name: operator for operator in _ROWS}
"""All operators by name."""
