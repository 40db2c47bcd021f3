"""Release a worker's ports so that no reader takes partial output for complete output (R3).

A closed channel means complete output, so only a worker that ended cleanly may close its outputs. A broken
channel means that the run has failed or was aborted. A worker that finds one breaks its other channels before
it releases any port. For a failed worker, the supervisor first breaks all channels and then closes the
worker's ports. These rules also apply to ports that user code closes, and an error that leaves a ``with``
block does not close a worker's port.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any

from flowchan import _core
from flowchan.channel.channel import Channel
from flowchan.errors import Broken, ChannelError, Closed
from flowchan.run.policy.events import Event, Met, WorkerId
from flowchan.run.worker.opening import Ports


class PortRelease:
    """Decides when the ports of one worker may close.

    Each port asks this object for permission to close, until :meth:`done` is called.
    """

    def __init__(self, worker: WorkerId, ports: Ports, tell: Callable[[Event], None]) -> None:
        self._worker, self._ports, self._tell = worker, ports, tell
        self._pid = os.getpid()
        self._over = False
        # Computed only once: every close checks all channels, and a source of addressed items may have many.
        self._channels = list(dict.fromkeys(port.channel for port in ports.everything()))
        for port in ports.everything():
            port._may_close = self._may_close

    def _may_close(self, _: Any, error: BaseException | None) -> bool:
        if os.getpid() != self._pid:  # a child forked by user code must not affect the worker's channels
            return True
        self.pass_on_break()
        return error is None or isinstance(error, Closed)

    def pass_on_break(self) -> None:
        """If one of the worker's channels is broken, tell the supervisor and break the others."""
        broken = [channel for channel in self._channels if channel.broken]
        if self._over or not broken:
            return
        self._over = True
        with contextlib.suppress(Closed, Broken):  # raised after the end of the run
            self._tell(Met(self._worker, tuple(channel._name for channel in broken)))
        cause = broken_by(broken[0]).__cause__
        for port in self._ports.everything():
            _core.Channel.abort(port.channel, cause)

    def close(self) -> None:
        """Close the ports of a worker that has not failed."""
        self.pass_on_break()
        for port in self._ports.everything():
            port.close()

    def leave_open(self) -> None:
        """Leave the ports open when the process ends, because the supervisor will close them."""
        for port in self._ports.everything():
            port._leave_open()

    def done(self) -> None:
        """Stop controlling the ports, because the worker has reported its end."""
        for port in self._ports.everything():
            port._may_close = None


def broken_by(channel: Channel[Any]) -> Broken:
    """Return the exception that calls on a broken channel raise."""
    try:
        channel.get_nowait()
    except Broken as error:
        return error.with_traceback(None)
    except ChannelError:
        pass
    return Broken(f"channel {channel._name!r} is broken")
