"""Launch the ranks of a script on several hosts, for ``flowchan launch --hosts``.

The launch is a graph with one stage per host. The stage runs the ranks of the host, sends their output to the
launcher, and receives orders. If a host is lost, the run therefore ends, and no process remains on any host.
"""

from __future__ import annotations

import contextlib
import secrets
import signal
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from flowchan import ChannelError, Empty, Graph, In, Out
from flowchan.cli.launch import LaunchJob, Tell, first_of, free_address, variables
from flowchan.hosts.host_pool import Pool
from flowchan.transport.tcp import route_to

LATER = 1.0  # seconds that ranks on other hosts have to exit after a failure, before they get SIGTERM


@dataclass(frozen=True)
class Begin:
    """Tells all hosts the secret and two addresses on rank 0's host: one for torch and one for flowchan."""

    master: str
    at: str
    secret: str


@dataclass(frozen=True)
class OutputLine:
    """A rank has written a line."""

    rank: int
    text: str
    is_error: bool


@dataclass(frozen=True)
class RankEnded:
    """All ranks on a host have ended; ``failure`` describes the first failure on this host."""

    failure: str


@dataclass(frozen=True)
class Share:
    """Describes the ranks that one host runs.

    The host runs ``local_count`` of the ``count`` ranks, from number ``first`` on. The host is number
    ``host`` of ``hosts`` and is called ``name``. ``towards`` is the address of the launcher. The other
    attributes are arguments of :class:`LaunchJob`.
    """

    name: str
    host: int
    hosts: int
    first: int
    local_count: int
    count: int
    towards: str
    pin: bool
    shutdown_timeout: float


def run_ranks(share: Share, script: Sequence[str], orders: In[Any], messages: Out[Any]) -> None:
    """Run the ranks of one host. The first host also sends the addresses at which the others reach it.

    If a signal arrives before the addresses, no rank starts.
    """
    if share.host == 0:
        address = route_to(share.towards)
        messages.put(Begin(free_address(address), free_address(address), secrets.token_hex(16)))
    begin = orders.get()
    if not isinstance(begin, Begin):
        messages.put(RankEnded(""))
        return
    environ = variables(
        share.count, share.local_count, begin.master, begin.secret[:8], share.host, share.hosts
    )
    environ |= {"FLOWCHAN_AT": begin.at, "FLOWCHAN_SECRET": begin.secret}
    command = [sys.executable, *script]
    job = LaunchJob(
        share.local_count,
        command,
        environ,
        lambda *line: messages.put(OutputLine(*line)),
        share.pin,
        share.shutdown_timeout,
        share.first,
    )
    try:
        while job.goes_on():
            job.poll()
            with contextlib.suppress(Empty):
                job.interrupt(orders.get_nowait())
    finally:
        job.close()
    failure = job.first_failure
    messages.put(RankEnded(f"{failure}, on host {share.name!r}" if failure else ""))


class HostLauncher:
    """Launches ``count`` ranks, spread evenly over the hosts of a pool."""

    def __init__(
        self, pool: Pool, count: int, script: Sequence[str], tell: Tell, pin: bool, shutdown_timeout: float
    ) -> None:
        self._tell = tell
        self.interrupted_by = 0  # number of the first signal, if any
        self.failures: list[str] = []
        self._later = threading.Timer(LATER, self._send, (signal.SIGTERM,))
        names = pool.hosts[:count]
        self._remaining = len(names)
        self._graph = graph = Graph("launch")
        self._input = orders = graph.input("orders")
        self._orders: Any = None  # set once the run has started
        each = orders.tee(len(names)) if len(names) > 1 else (orders,)
        towards, first, messages = pool.provider.listen_at(), 0, []
        for host, (name, order) in enumerate(zip(names, each, strict=True)):
            local_count = count // len(names) + (host < count % len(names))
            share = Share(name, host, len(names), first, local_count, count, towards, pin, shutdown_timeout)
            messages.append(graph.stage(partial(run_ranks, share, script), order, name=name, on=pool[name]))
            first += local_count
        self._messages = graph.merge(*messages).collect()

    def run(self) -> None:
        """Start the ranks. Wait until all have ended and all of their output has been passed on."""
        with self._graph.start() as run:
            self._orders = run[self._input]
            for word in run.iter(self._messages):
                if isinstance(word, OutputLine):
                    self._tell(word.rank, word.text, word.is_error)
                elif isinstance(word, Begin):
                    self._send(word)
                else:
                    self._host_ended(word)

    def _host_ended(self, word: RankEnded) -> None:
        self._remaining -= 1
        if word.failure:
            if not self.failures and not self.interrupted_by:
                self._later.start()
            self.failures.append(word.failure)
        if not self._remaining:
            self._later.cancel()
            self._orders.close()

    def _send(self, order: Begin | int) -> None:
        with contextlib.suppress(ChannelError, ValueError):  # all hosts have already ended
            self._orders.put_nowait(order)

    def interrupt(self, number: int, _: object) -> None:
        """Send the signal to the ranks. A second call kills them.

        While the hosts are still starting, raise ``KeyboardInterrupt`` instead.
        """
        self.interrupted_by = self.interrupted_by or number
        if self._orders is None:
            raise KeyboardInterrupt
        self._send(number)


def launch_over(
    pool: Pool, count: int, script: Sequence[str], tell: Tell, pin: bool, shutdown_timeout: float
) -> tuple[str, int]:
    """Launch the ranks on the hosts of a pool, as ``launch`` does on this host.

    Args:
        pool: Hosts to use.
        count: Number of ranks.
        script: Program and its arguments.
        tell: Prints the output of a rank.
        pin: Give each rank its share of the cores.
        shutdown_timeout: Seconds after which ranks that were asked to end are killed.

    Returns:
        The same pair of values as from ``launch``.

    Raises:
        HostError: A host is unusable.
        RunError: A host was lost.
    """
    launcher = HostLauncher(pool, count, script, tell, pin, shutdown_timeout)
    before = {number: signal.signal(number, launcher.interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        launcher.run()
    except KeyboardInterrupt:  # raised while the hosts were starting
        return "", launcher.interrupted_by
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return first_of(launcher.failures), launcher.interrupted_by
