"""Release the ports of a worker so that no reader mistakes partial output for complete output (R3).

A closed channel means that the output is complete, so only a worker that ended cleanly may close its outputs.
If a channel of a worker is broken, the run has failed or was aborted. The worker then breaks its other
channels before it releases any port. For a failed worker, the supervisor closes the ports after it has broken
the channels. These rules also apply to ports that the user's code closes. A ``with`` block that ends with an
error does not close the port of a worker.
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
    """Release of one worker's ports.

    Before a port closes, it asks this object for permission. This ends when :meth:`done` is called.
    """

    def __init__(self, worker: WorkerId, ports: Ports, tell: Callable[[Event], None]) -> None:
        self._worker, self._ports, self._tell = worker, ports, tell
        self._pid = os.getpid()
        self._over = False
        # Computed once, because every close checks all channels, and a source of addressed items may have
        # many ports.
        self._channels = list(dict.fromkeys(port.channel for port in ports.everything()))
        for port in ports.everything():
            port._may_close = self._may_close

    def _may_close(self, _: Any, error: BaseException | None) -> bool:
        if os.getpid() != self._pid:  # a child forked by user code; it must not use the worker's channels
            return True
        self.pass_on_break()
        return error is None or isinstance(error, Closed)

    def pass_on_break(self) -> None:
        """If a channel is broken, report this to the supervisor, then break the worker's other channels."""
        broken = [channel for channel in self._channels if channel.broken]
        if self._over or not broken:
            return
        self._over = True
        with contextlib.suppress(Closed, Broken):  # the run has ended
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
        """Leave the ports open when the process ends, because another process also has them."""
        for port in self._ports.everything():
            port._leave_open()

    def done(self) -> None:
        """Stop controlling the ports, because the worker has ended and its end is reported."""
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
