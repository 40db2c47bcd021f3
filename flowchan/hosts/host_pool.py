"""Define pools of hosts as placements. A pool is a value: creating it opens no connection."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flowchan.declare.placements import Placement
from flowchan.errors import HostError
from flowchan.hosts.capacity import deal, keep_speeds, known_cores, known_speeds
from flowchan.hosts.providers.provider import Provider
from flowchan.items.arguments import finite_seconds, flag, seconds, whole
from flowchan.items.text import shown
from flowchan.native import need_native
from flowchan.transport.link_events import PEER_TIMEOUT_S

if TYPE_CHECKING:
    from flowchan.hosts.hosts_part import HostsPart  # slow to import, and needed only when a run begins
    from flowchan.hosts.probe import Facts  # slow to import, and needed only to query a host
    from flowchan.run.crew.run_ports import RunPorts
    from flowchan.run.policy.plan import PlannedWorker


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool(Placement):
    """Hosts for ``on=``, from ``local``, ``ssh``, ``slurm`` or ``ray``.

    Each worker of a stage goes to the host of the pool with the fewest workers. After :meth:`calibrate`, a
    host gets workers in proportion to its cores and speed. ``pool["gpu1"]`` and ``pool["gpu1", "gpu2"]``
    select hosts. A mapping also sets the hosts' shares: with ``pool[{"gpu1": 3, "gpu2": 1}]``, three of four
    workers, or six of eight, run on ``gpu1``. Within a run, all pools of the same provider share its agents.

    Attributes:
        provider: Provider that starts the agents.
        peer_timeout: An agent and its workers end after this many seconds without a message from the driver.
            The driver gives up on an agent after 1.5 times as long.
        tls: True if the connections are encrypted.

    Example:
        >>> from flowchan import hosts
        >>> pool = hosts.local(3)
        >>> pool.hosts
        ('local-1', 'local-2', 'local-3')
        >>> pool["local-1", "local-3"].hosts
        ('local-1', 'local-3')
    """

    provider: Provider
    peer_timeout: float = PEER_TIMEOUT_S
    tls: bool = False

    def __repr__(self) -> str:
        return self.name

    def __getitem__(self, hosts: str | Sequence[str] | Mapping[str, int]) -> Pool:
        if self.missing:
            return self
        shares: tuple[int, ...] = ()
        if isinstance(hosts, Mapping):
            shares = tuple(whole(self.name, f"the share of {host}", n, 1) for host, n in hosts.items())
        chosen = (hosts,) if isinstance(hosts, str) else tuple(hosts)
        for host in chosen:
            if host not in self.hosts:
                raise KeyError(
                    f"{self.name} has no host {shown(host)}; its hosts are {', '.join(self.hosts)}"
                )
        if not chosen:
            raise KeyError(
                f"{self.name}[…] must name at least one host, got none; its hosts are {', '.join(self.hosts)}"
            )
        return dataclasses.replace(self, name=", ".join(chosen), hosts=chosen, shares=shares, by_worker=())

    def assigned(self, hosts: Sequence[str]) -> Pool:
        """Return a pool that places each worker of a stage on the host given for it.

        If a host is lost, another host of the pool takes over its workers.

        Args:
            hosts: Host of the first worker, of the second worker, and so on. If a stage has more workers, the
                list repeats.

        Returns:
            A pool with the same hosts.

        Raises:
            KeyError: A name is not a host of this pool, or the list is empty.
            TypeError: ``hosts`` is not a list or a tuple.

        Example:
            >>> from flowchan import Graph, hosts, worker
            >>> pool = hosts.local(2).assigned(["local-2", "local-1", "local-2"])
            >>> graph = Graph()
            >>> names = graph.source([1]).map(lambda item: worker().host, on=pool, workers=1).collect()
            >>> graph.run()[names]
            ['local-2']
        """
        if isinstance(hosts, (str, Mapping)) or not isinstance(hosts, Sequence):
            raise TypeError(
                f"assigned: hosts must be a list of names, one for each worker, got {shown(hosts)}"
            )
        if self.missing:
            return self
        return dataclasses.replace(self, by_worker=self[tuple(hosts)].hosts)

    def dealt(self, count: int) -> tuple[str, ...]:
        """Assign workers to the hosts in turn: one per host in each turn, and at most one per core.

        When all cores are taken, the turns continue, and the logger ``flowchan.hosts`` warns once. After
        :meth:`calibrate`, a host half as fast as the fastest gets a worker every second turn. Shares take
        precedence over speeds. For a pool from :meth:`assigned`, the result repeats the assigned hosts.

        If a host's number of cores is unknown, ``dealt`` starts a small program there, which must report the
        number within 30 seconds.

        Args:
            count: Number of workers, at least 1.

        Returns:
            The host of each worker.

        Raises:
            HostError: A host did not report its cores, or the hosts cannot be determined here.
            TypeError: ``count`` is not an int.
            ValueError: ``count`` is less than 1.

        Example:
            >>> from flowchan import hosts
            >>> pool = hosts.ssh({"a": 8, "b": 16, "c": 4})
            >>> pool.dealt(5)
            ('a', 'b', 'c', 'a', 'b')
            >>> dealt = pool.dealt(16)
            >>> [dealt.count(host) for host in pool.hosts]
            [6, 6, 4]
        """
        whole(f"{self.name}.dealt", "count", count, 1)
        self._must_have_hosts()
        if self.by_worker:
            return tuple(itertools.islice(itertools.cycle(self.by_worker), count))
        known = known_cores(self.provider)
        unknown = [host for host in self.hosts if host not in known]
        if unknown:
            self._ask(unknown)
            known = known_cores(self.provider)
        weights = Placement.weights(self) or self.speeds
        return deal(self.name, count, {host: known[host] for host in self.hosts}, weights)

    def calibrate(self, timeout: float | None = None) -> dict[str, float]:
        """Measure the relative speeds of the hosts while all of their cores are busy.

        This process keeps the speeds for all pools of the provider. Stages and :meth:`dealt` then give fewer
        workers to slower hosts. The call starts a small program on each host; the measurement takes one to
        two seconds. Call ``calibrate`` while the hosts are otherwise idle. If Ray chooses other nodes for a
        later run, the speeds still describe the earlier nodes.

        Args:
            timeout: Seconds to wait for the hosts (default: 30).

        Returns:
            Speed of one core of each host, relative to the provider's fastest host. Each is above 0, at most
            1, and rounded to 0.01.

        Raises:
            HostError: A host is unusable or did not answer in time, or the hosts cannot be determined here.
            TypeError: ``timeout`` is not a number.
            ValueError: ``timeout`` is not positive.

        Example:
            >>> from flowchan import hosts
            >>> pool = hosts.local(1)
            >>> pool.calibrate()
            {'local-1': 1.0}
            >>> pool.speeds
            {'local-1': 1.0}
        """
        limit = seconds(f"{self.name}.calibrate", "timeout", timeout)
        self._must_have_hosts()
        facts = self._ask(self.provider.hosts, limit, speed=True)
        keep_speeds(self.provider, {one.host: one.speed for one in facts})
        return self.speeds

    @property
    def speeds(self) -> dict[str, float]:
        """Relative speeds from the last :meth:`calibrate` in this process; empty before the first."""
        known = known_speeds(self.provider)
        return {host: known[host] for host in self.hosts if host in known}

    def weights(self) -> dict[str, int]:
        """Return the shares if they are set; otherwise, for each host, its cores times its speed in percent.

        The result is empty if neither shares nor speeds are known.
        """
        speeds = self.speeds
        if self.shares or not speeds:
            return dict(Placement.weights(self))
        cores = known_cores(self.provider)
        return {host: cores[host] * round(100 * speed) for host, speed in speeds.items()}

    def _must_have_hosts(self) -> None:
        if self.missing:
            raise HostError(self.missing)

    def _ask(self, hosts: Sequence[str], timeout: float | None = None, *, speed: bool = False) -> list[Facts]:
        from flowchan.hosts.probe import HOST_TIMEOUT_S, ask_hosts

        need_native(f"{self!r}: a pool is not available")
        return ask_hosts(self.provider, hosts, timeout or HOST_TIMEOUT_S, speed=speed)

    def has_same_host(self, other: Placement) -> bool:
        """Return whether another placement uses the agents of the same provider.

        Args:
            other: Another placement.

        Returns:
            True if one part of a crew can run the workers of both placements.
        """
        return isinstance(other, Pool) and other.provider == self.provider

    def open_part(self, ports: RunPorts, workers: Sequence[PlannedWorker]) -> HostsPart:
        """Create the part of a run's crew for these workers.

        Args:
            ports: Channels of the run.
            workers: Workers on this pool's hosts.

        Returns:
            The part; nothing has been started yet.
        """
        from flowchan.hosts.hosts_part import HostsPart

        return HostsPart(ports, self.provider, self.peer_timeout, self.tls, workers)


def pool_of(call: str, provider: Provider, peer_timeout: float = PEER_TIMEOUT_S, tls: bool = False) -> Pool:
    """Make a pool of all of a provider's hosts.

    Error messages begin with ``call``, the name of a public function.
    """
    waits = finite_seconds(call, "peer_timeout", peer_timeout)
    names: tuple[str, ...] = ()
    missing = ""
    try:
        names = tuple(provider.hosts)
    except HostError as error:
        missing = str(error)
    return Pool(
        name=repr(provider), own_process=True, hosts=names, missing=missing, provider=provider,
        peer_timeout=waits, tls=flag(call, "tls", tls),
    )  # fmt: skip
