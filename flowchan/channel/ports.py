"""Define the reading and writing ends of a channel on top of the native ports."""

from __future__ import annotations

import copyreg
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar

from flowchan import _core
from flowchan.channel import awaiting
from flowchan.items import arrays
from flowchan.public import public

T_co = TypeVar("T_co", covariant=True)
T_contra = TypeVar("T_contra", contravariant=True)


Request = Callable[[Any, BaseException | None], bool]
"""Function that decides whether a port closes.

Its arguments are the port and the exception, if any, that leaves the port's ``with`` block.
"""


def _leaves(port: In[Any] | Out[Any], error: BaseException | None) -> bool:
    ask: Request | None = getattr(port, "_may_close", None)
    return ask is None or ask(port, error)


@public
class In(_core.In[T_co]):
    """Reading end of a channel.

    Taking the next item ends the lease of the previous one. Leaving the ``with`` block closes the end. If an
    exception leaves the block, unfinished items go back into the channel.

    Example:
        >>> from flowchan import Channel
        >>> channel = Channel()
        >>> channel.put_many(["a", "b"])
        >>> channel.close()
        >>> with channel.reader() as reader:
        ...     for item in reader:
        ...         print(item)
        a
        b
    """

    __slots__ = ("_may_close",)  # set by the stage's runner, which decides whether the port may close
    _may_close: Request | None

    def close(self) -> None:
        """Close the reading end. Items taken through it count as finished.

        Example:
            >>> from flowchan import Channel
            >>> channel = Channel()
            >>> reader = channel.reader()
            >>> reader.close()
            >>> channel.closed
            True
        """
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


@public
class Out(_core.Out[T_contra]):
    """Writing end of a channel. Leaving the ``with`` block closes the end.

    Example:
        >>> from flowchan import Channel
        >>> channel = Channel()
        >>> with channel.writer() as writer:
        ...     writer.put("a")
        >>> list(channel)
        ['a']
    """

    __slots__ = ("_may_close",)  # set by the stage's runner, which decides whether the port may close
    _may_close: Request | None

    def close(self) -> None:
        """Close the writing end.

        The channel closes when the last writing end is closed.

        Example:
            >>> from flowchan import Channel
            >>> channel = Channel()
            >>> first, second = channel.writer(), channel.writer()
            >>> first.close()
            >>> channel.closed
            False
            >>> second.close()
            >>> channel.closed
            True
        """
        if _leaves(self, None):
            super().close()

    def __exit__(
        self, type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if _leaves(self, error):
            super().__exit__(type, error, traceback)

    def flush(self, timeout: float | None = None) -> None:
        """Wait until the channel's owner has received every item put here; see ``Channel.flush``.

        Args:
            timeout: Seconds to wait (default: no limit).

        Raises:
            Full: The owner had no room for all items within ``timeout``.
            Closed: The channel was closed before the owner received all items.
            Broken: The channel was aborted, or its owner was lost.

        Example:
            >>> from flowchan import Channel
            >>> channel = Channel()
            >>> with channel.writer() as out:
            ...     out.put("a")
            ...     out.flush()
            >>> channel.get()
            'a'
        """

    aput = awaiting.aput
    loan = arrays.loan


def moved(port: In[Any] | Out[Any]) -> tuple[Any, ...]:
    """Return the pickled form of a port that moves to another process.

    Args:
        port: The port.

    Returns:
        The port's class, and the arguments to recreate the port in the other process.

    Raises:
        TypeError: The channel is across hosts, so its ports cannot move.
    """
    if port.channel.transport.reached_by:
        raise TypeError(
            f"a port of {port.channel!r} can't be sent to another process; send the channel, and open a "
            "port there with channel.reader() or channel.writer()"
        )
    return type(port), port._hand_over()


copyreg.pickle(In, moved)
copyreg.pickle(Out, moved)
