"""How a worker leaves its ports (R3): nobody who reads what it wrote takes a part for the whole.

To close a writing end is to say that all is there. So only a worker that came to its end in order does that.
Where one of a worker's channels is broken, the run is broken off, and the worker breaks its other channels
before it leaves any. The ports of a worker that failed are left to the supervisor, which ends them once it
has broken the channels. Both hold however the user's code leaves them, too: an error that ends a `with` block
closes nothing there.
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
    """That of one worker. Its ports ask this before they are closed, until it is ``done``."""

    def __init__(self, worker: WorkerId, ports: Ports, tell: Callable[[Event], None]) -> None:
        self._worker, self._ports, self._tell = worker, ports, tell
        self._pid = os.getpid()
        self._over = False
        for port in ports.everything():
            port._may_close = self._may_close

    def _may_close(self, _: Any, error: BaseException | None) -> bool:
        if os.getpid() != self._pid:  # forked by the user's code, and nothing of ours reaches that child
            return True
        self.break_off()
        return error is None or isinstance(error, Closed)

    def break_off(self) -> None:
        """Breaks all channels of the worker if one is broken. The supervisor hears before which were."""
        broken = [port.channel for port in self._ports.everything() if port.channel.broken]
        if self._over or not broken:
            return
        self._over = True
        with contextlib.suppress(Closed, Broken):  # a run that is over hears nobody any more
            self._tell(Met(self._worker, tuple(channel._name for channel in broken)))
        cause = broken_by(broken[0]).__cause__
        for port in self._ports.everything():
            _core.Channel.abort(port.channel, cause)

    def close(self) -> None:
        """At the end of a worker that did not fail."""
        self.break_off()
        for port in self._ports.everything():
            port.close()

    def leave_open(self) -> None:
        """At the end of a process whose ports another one ends, which has them too."""
        for port in self._ports.everything():
            port._leave_open()

    def done(self) -> None:
        """The worker has ended; whoever closes its ports now knows why."""
        for port in self._ports.everything():
            port._may_close = None


def broken_by(channel: Channel[Any]) -> Broken:
    """What a call on a broken channel raises."""
    try:
        channel.get_nowait()
    except Broken as error:
        return error.with_traceback(None)
    except ChannelError:
        pass
    return Broken(f"channel {channel._name!r} is broken")
