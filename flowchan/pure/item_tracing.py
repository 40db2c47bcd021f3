"""Follow sampled items through the ports of one worker (see ``ItemTracing`` in the native core)."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from flowchan.pure.local_queue import QueueStep


class ItemTracing:
    """Calls a worker's recorder for sampled items. All ports of the worker share this object.

    Args:
        recorder: Object with the methods ``took``, ``finished``, ``boxed`` and ``sent``.
        countdown: Number of puts until the next sample; 0 if there will be none.
    """

    box: type = type("NoBox", (), {})
    """Class of the boxes for sampled items."""

    def __init__(self, recorder: Any, countdown: int = 0) -> None:
        self._recorder, self._countdown, self._held = recorder, countdown, 0

    def took(self, port: Any, box: Any) -> None:
        """Record that a port took a box. Outputs of the worker are boxed from now on, until ``finished``."""
        self._held += not port.holds_traced
        port.holds_traced = True
        self._call("took", port, box)

    def finished(self, port: Any) -> None:
        """Record that the leased items of a port are about to be finished."""
        self._held -= self._held > 0
        self._call("finished", port)

    def put(self, port: Any, item: Any, put: Callable[[Any], QueueStep]) -> QueueStep:
        """Put an item, in a box if the item is sampled."""
        if self._countdown > 1:
            self._countdown -= 1
        elif self._countdown == 1:
            return self._put_boxed(port, item, put)
        return self._put_boxed(port, item, put) if self._held else put(item)

    def _put_boxed(self, port: Any, item: Any, put: Callable[[Any], QueueStep]) -> QueueStep:
        box = self._call("boxed", port, item)
        if not is_boxed(box):
            return put(item)
        step = put(box)
        if step is QueueStep.DONE:
            following = self._call("sent", port)
            if self._countdown and following is not None:
                self._countdown = following
        return step

    def _call(self, method: str, port: Any, *item: Any) -> Any:
        """Call the recorder. An error is only reported, because the caller of the port did not cause it."""
        try:
            return getattr(self._recorder, method)(id(port), *item)
        except Exception as error:
            sys.unraisablehook(
                SimpleNamespace(
                    exc_type=type(error),
                    exc_value=error,
                    exc_traceback=error.__traceback__,
                    err_msg=None,
                    object=self._recorder,
                )
            )
            return None


def is_boxed(item: Any) -> bool:
    """Return whether an object is the box of a sampled item."""
    return type(item) is ItemTracing.box


def unboxed(port: Any, item: Any) -> Any:
    """Take an item out of its box, if any. ``port`` is None for a call without a port."""
    if not is_boxed(item):
        return item
    if port is not None and port.tracing is not None:
        port.tracing.took(port, item)
    return item.item
