"""The ends of a channel: a native port each, with what is easier said in Python."""

from __future__ import annotations

import copyreg
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar

from flowchan import _core
from flowchan.channel import awaiting
from flowchan.items import arrays

T_co = TypeVar("T_co", covariant=True)
T_contra = TypeVar("T_contra", contravariant=True)


Request = Callable[[Any, BaseException | None], bool]
"""Whether this port is closed; by an error, if there is one that ends a block."""


def _leaves(port: In[Any] | Out[Any], error: BaseException | None) -> bool:
    ask: Request | None = getattr(port, "_may_close", None)
    return ask is None or ask(port, error)


class In(_core.In[T_co]):
    """A stage's reading end of a channel. Taking the next item finishes the one before."""

    __slots__ = ("_may_close",)  # what runs a stage is asked before one of its ports is closed
    _may_close: Request | None

    def close(self) -> None:
        """Leave: the items in hand count as finished."""
        if _leaves(self, None):
            super().close()

    def __exit__(
        self, type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if _leaves(self, error):
            super().__exit__(type, error, traceback)

    aget = awaiting.aget
    __aiter__ = awaiting.aiter_items
    __anext__ = awaiting.anext_item


class Out(_core.Out[T_contra]):
    """A stage's writing end of a channel."""

    __slots__ = ("_may_close",)  # what runs a stage is asked before one of its ports is closed
    _may_close: Request | None

    def close(self) -> None:
        """Leave; the last writer to leave closes the channel."""
        if _leaves(self, None):
            super().close()

    def __exit__(
        self, type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if _leaves(self, error):
            super().__exit__(type, error, traceback)

    aput = awaiting.aput
    loan = arrays.loan


def moved(port: In[Any] | Out[Any]) -> tuple[Any, ...]:
    """Ports cross to another process with their session: the port moves, it is not copied. Raises
    ``TypeError`` where it can't."""
    if port.channel.transport.reached_by:
        raise TypeError(
            f"a port of {port.channel!r} can't be sent to another process; send the channel, and open a port "
            "there: channel.reader(), channel.writer()"
        )
    return type(port), port._hand_over()


copyreg.pickle(In, moved)
copyreg.pickle(Out, moved)
