"""What each operator is: one row for everything that the checks, the plan, the run, the report and the
pictures
ask of it. None of them knows an operator by its name.

To add one: a row here, a body (see ``flowchan/run/worker/operator_loops.py``), and a method of ``Stream``
that declares it.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Calls = Literal["item", "fold", "leaves", "arguments", "ports"]
"""How the user's function is called: with each item; with the result so far and each item; the same for parts
of them; once with the declared arguments; once per worker with its ports."""

Role = Literal["source", "stage", "sink"]

_BODIES, _ASYNC_BODIES = "flowchan.run.worker.operator_loops", "flowchan.run.worker.async_operator_loops"


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """An operator: ``name`` is the word for it in messages and tables."""

    name: str

    body: str = ""
    """What a worker on a thread or in a process runs, as ``module:function``. It gets a ``Job`` and the
    worker's ports by name. Empty where no worker runs: the program itself puts the items."""
    async_body: str = ""
    """The same for an ``async def`` function, if the operator takes one."""

    calls: Calls | None = None
    """How the user's function is called; ``None`` if there is none."""
    iterates: bool = False
    """Whether what the function gives is iterated over."""

    per_item: bool = False
    """Whether it keeps nothing from one item to the next, so that another worker can take the next one up."""
    one_output: bool = False
    """Whether each item has exactly one output, so that putting it also passes the item's turn."""
    ordered: bool = True
    """Whether several workers together can keep the order of their input."""
    worker_per_input: bool = False
    """Whether each input has a worker of its own."""
    ends_loops: bool = False
    """Whether it can end although its inputs have not, so that it may read a feedback."""

    result: bool = False
    """Whether its output may leave the graph, as a result of the run."""
    gathers: bool = False
    """Whether that result can be had item by item while the run goes on."""

    role: Role = "stage"
    """How it is drawn, and what counts as its items: a source's are those that it gives."""
    owes: bool = False
    """Whether it owes one item out, or one failed item, for each item in. A sink's items out are those it has
    finished."""
    lets_go: str = ""
    """The word for the items that it takes in and lets go, if it does that."""
    answers: bool = False
    """Whether an item that was asked passes it, and what comes of it is the answer."""
    groups: bool = False
    """Whether each output is a list of several items."""
    repeats: bool = False
    """Whether each output gives every item, so that outputs count once."""
    expects: Callable[[Mapping[str, Any], list[int]], int | None] | None = None
    """How many items come out, given the stage's options and how many go in at each input; ``None`` where
    nobody can say before it has ended."""
    says: Callable[[Mapping[str, Any]], str] | None = None
    """What a picture says of the stage's options."""

    @property
    def holds_back(self) -> bool:
        """Whether it takes in many items for each that it gives."""
        return self.result or self.groups

    @property
    def begins(self) -> bool:
        """Whether items enter the graph here."""
        return self.role == "source"

    @property
    def ends(self) -> bool:
        """Whether items leave the graph here."""
        return self.role == "sink"

    @property
    def outside(self) -> bool:
        """Whether the program itself puts the items, and no worker runs."""
        return not self.body

    def run(self) -> Callable[..., Any]:
        """The body."""
        return pkgutil.resolve_name(self.body)  # type: ignore[no-any-return]

    def run_async(self) -> Callable[..., Any]:
        """The body for an ``async def`` function."""
        return pkgutil.resolve_name(self.async_body)  # type: ignore[no-any-return]


def _length(options: Mapping[str, Any], _: list[int]) -> int | None:
    """Of what a source iterates over, if that can say."""
    try:
        return len(options["iterable"])
    except Exception:  # it has none, or it is the user's code
        return None


def _batches(options: Mapping[str, Any], into: list[int]) -> int | None:
    return -(-sum(into) // options["size"]) if options["timeout"] is None else None


def _batch_size(options: Mapping[str, Any]) -> str:
    waits = options["timeout"]
    return f"{options['size']:,} items" + (f" or {waits:g} s" if waits is not None else "")


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
        body=f"{_BODIES}:flat_map",
        async_body=f"{_ASYNC_BODIES}:flat_map",
        calls="item",
        iterates=True,
        per_item=True,
    ),
    Operator(
        name="filter",
        answers=True,
        body=f"{_BODIES}:filter_",
        async_body=f"{_ASYNC_BODIES}:filter_",
        calls="item",
        per_item=True,
        lets_go="dropped",
    ),
    Operator(
        name="partition", answers=True, body=f"{_BODIES}:partition", calls="item", per_item=True, owes=True
    ),
    Operator(
        name="sink",
        answers=True,
        body=f"{_BODIES}:sink",
        async_body=f"{_ASYNC_BODIES}:sink",
        calls="item",
        per_item=True,
        role="sink",
        owes=True,
    ),
    Operator(name="reduce", body=f"{_BODIES}:reduce", calls="fold", result=True),
    Operator(name="collect", answers=True, body=f"{_BODIES}:collect", result=True, gathers=True),
    Operator(
        name="batch", answers=True, body=f"{_BODIES}:batch", groups=True, expects=_batches, says=_batch_size
    ),
    Operator(name="unbatch", answers=True, body=f"{_BODIES}:unbatch"),
    Operator(
        name="take",
        answers=True,
        body=f"{_BODIES}:take",
        lets_go="not taken",
        expects=_taken,
        says=_most_taken,
    ),
    Operator(name="tee", answers=True, body=f"{_BODIES}:tee", repeats=True, expects=_as_many),
    Operator(name="zip", body=f"{_BODIES}:zip_", expects=_as_the_shortest),
    Operator(name="allreduce", body=f"{_BODIES}:allreduce", calls="leaves"),
    Operator(
        name="merge",
        answers=True,
        body=f"{_BODIES}:merge",
        worker_per_input=True,
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
"""Every operator by its name."""
