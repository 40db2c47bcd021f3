"""Call the function of a keyed stage with an item and, if the stage keeps state, with the key's state."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any

from flowchan import _core
from flowchan.channel.ports import Out
from flowchan.declare.callables import is_async
from flowchan.declare.keyed import Key
from flowchan.declare.values import Stage
from flowchan.items.buckets import NotPortableError, bucket_of
from flowchan.items.sampled_item import SampledItem
from flowchan.items.text import shown
from flowchan.run.worker.state_log import KeyedStates


@dataclass(frozen=True, slots=True)
class Unroutable:
    """Stands for an item whose key is unknown, because the ``route`` worker could not unpickle the item.

    The worker that receives this object reports ``error``.

    ``deaths`` is the number of workers that died while unpickling the item.
    """

    item: Any
    error: Any
    deaths: int


def hashable(key: Any, where: str) -> Hashable:
    """Return the result of a key function, or raise ``TypeError`` if the result is not hashable."""
    try:
        hash(key)
    except TypeError:
        raise TypeError(
            f"{where}: key must return hashable values such as str or tuple, got {shown(key)}"
        ) from None
    found: Hashable = key
    return found


def route_outputs(out: Out[Any], stage: Stage, bare: Callable[[Any], Any]) -> None:
    """Let a port choose which worker of the next stage processes each large output.

    If the bucket of a key differs from process to process, the ``route`` stage must choose the worker. The
    output then does not stay on its host.

    Args:
        out: The port.
        stage: Stage of the port.
        bare: Returns an output without its marks.
    """
    key: Key = stage.options["reader_key"]
    workers: int = stage.options["readers"]

    def worker_for(item: Any) -> int | None:
        try:
            found = key(bare(item.item if type(item) is SampledItem else item))
            return bucket_of(found, portable=True) % workers
        except NotPortableError:
            return None
        except Exception:  # that worker calls the key function again and reports the error
            return 0

    _core._route_outputs(out, worker_for)


def with_key(function: Callable[..., Any], stage: Stage, states: KeyedStates | None) -> Callable[..., Any]:
    """Wrap the function of a keyed stage so that the caller passes only the item.

    The wrapper determines the key. If the stage keeps state, the wrapper also passes the key's state to
    ``function``.
    """

    def key_of(item: Any) -> Hashable:
        if type(item) is Unroutable:
            raise item.error
        return hashable(stage.options["key"](item), f"stage {stage.name!r}")

    def call(item: Any) -> Any:
        key = key_of(item)
        if states is None:
            return function(item)
        state = states.begin(key)
        try:
            result = function(item, state)
            states.commit(state)
        except BaseException:
            states.undo(state)
            raise
        return result

    async def call_later(item: Any) -> Any:
        key = key_of(item)
        if states is None:
            return await function(item)
        state = states.begin(key)
        try:
            result = await function(item, state)
            states.commit(state)
        except BaseException:
            states.undo(state)
            raise
        return result

    def elements(item: Any) -> Iterator[Any]:
        assert states is not None
        state = states.begin(key_of(item))
        try:
            yield from function(item, state)
            states.commit(state)
        except BaseException:
            states.undo(state)
            raise

    if states is not None and stage.operator.iterates:
        return elements
    if is_async(function) and not stage.operator.iterates:
        return call_later
    return call
