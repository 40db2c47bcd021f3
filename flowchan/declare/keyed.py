"""Declare keyed stages, which send items with equal keys to the same worker or to a few workers.

A keyed stage with several workers is declared as two stages. The first stage, ``route``, runs on a thread of
the program. ``route`` calls the key function, and puts each item into one worker's channel. The second stage
reads these channels, one per worker. Items keep the numbers that ``route`` gave them, so the outputs of the
workers can be merged in stream order.

An item may stay on a host until another host fetches it. The worker that made the item then calls the key
function, and ``route`` passes on a reference to the item.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flowchan.declare.builder import Builder, name_from
from flowchan.declare.callables import is_async, is_callable_class
from flowchan.declare.operators import OPERATORS
from flowchan.declare.options import KeyOptions, StageSettings
from flowchan.declare.values import Origin, Stage
from flowchan.items.arguments import callable_argument, text, whole
from flowchan.items.text import shown

Key = Callable[[Any], Hashable]


@dataclass(frozen=True, slots=True, kw_only=True)
class Keyed:
    """Holds the keyed options of a stage apart from its other options, ``rest``."""

    rest: Mapping[str, Any]
    key: Key | None = None
    concurrency_per_key: int = 1
    state: Callable[[], Any] | None = None

    @property
    def own(self) -> dict[str, Any]:
        """Return the options that the stage's workers need."""
        own: dict[str, Any] = {} if self.key is None else {"key": self.key}
        return own if self.state is None else {**own, "state": self.state}


def keyed(kind: str, function: Callable[..., Any], options: Mapping[str, Any]) -> Keyed:
    """Check the keyed options of an operator, and separate them from its other options."""
    rest = {name: value for name, value in options.items() if name not in KeyOptions.__annotations__}
    key, limit, state = options.get("key"), options.get("concurrency_per_key", 1), options.get("state")
    whole(kind, "concurrency_per_key", limit, 1)
    if key is None:
        if state is not None or "concurrency_per_key" in options:
            given = "state" if state is not None else "concurrency_per_key"
            raise TypeError(f"{kind}: {given} requires key, the function that returns the key of an item")
        return Keyed(rest=rest)
    callable_argument(kind, "key", key)
    if is_async(key) or is_callable_class(key):
        raise TypeError(f"{kind}: key must be a function that is not async, got {shown(key)}")
    settings = StageSettings(**rest)
    placement = settings.checked(kind, function)
    if not isinstance(settings.workers, int):
        raise ValueError(
            f"{kind}: key requires a fixed number of workers, because each key belongs to one worker, got "
            f"workers={settings.workers!r}; set a number of workers"
        )
    if placement.is_remote and state is not None:
        raise ValueError(
            f"{kind}: state requires on='thread' or on='process', because a lost host would lose the states; "
            "omit state"
        )
    if state is not None:
        callable_argument(kind, "state", state)
        if limit > 1:
            raise ValueError(
                f"{kind}: concurrency_per_key must be 1 if the stage has state, got {limit}; items with "
                "equal keys share one state"
            )
        if OPERATORS[kind].iterates and is_async(function):
            raise ValueError(f"{kind}: state requires a function that is not async; use map and unbatch")
    if settings.name is not None:
        text(kind, "name", settings.name)
    return Keyed(rest=rest, key=key, concurrency_per_key=limit, state=state)


def keyed_stage(
    graph: Builder,
    kind: str,
    function: Callable[..., Any],
    origin: Origin,
    item: Any,
    options: Keyed,
    own: Mapping[str, Any],
    outputs: Sequence[tuple[str, Any]],
) -> Stage:
    """Declare a stage with or without keys, as its options require.

    Args:
        graph: Graph to add the stage to.
        kind: Name of the stage's operator.
        function: The user's function.
        origin: Output that the stage reads.
        item: Type of the items, or None if unknown.
        options: Options of the stage.
        own: Options that only this operator has.
        outputs: Names and item types of the stage's output ports. A stage without outputs has no ``errors``
            stream.

    Returns:
        The stage.
    """
    rest = dict(options.rest)
    routes = options.key is not None and options.concurrency_per_key < rest.get("workers", 1)
    key = options.key if routes else None
    if key is not None:
        if rest.get("name") is None:
            rest["name"] = graph._free_name(name_from(function, kind))
        route = graph._declare(
            "route",
            name=graph._free_name(f"{rest['name']} by key"),
            function=key,
            options={"spread": options.concurrency_per_key},
            inputs=(origin,),
            outputs=[("out", item)],
        )
        graph._route(origin, key, rest["workers"])
        origin = Origin(route.name, "out")
    stage = graph._declare(
        kind, function=function, options={**own, **options.own}, inputs=(origin,), outputs=outputs,
        errors=bool(outputs), **rest,
    )  # fmt: skip
    return stage if key is None else graph._address(frozenset({"items"}))
