"""A pool of hosts as a placement. A pool is a value: declaring one opens no connection."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flowchan.declare.placements import Placement
from flowchan.errors import HostError
from flowchan.hosts.providers.provider import Provider
from flowchan.items.arguments import finite_seconds, flag, whole
from flowchan.items.text import shown
from flowchan.transport.link_events import PEER_TIMEOUT_S

if TYPE_CHECKING:
    from flowchan.hosts.hosts_part import HostsPart  # slow to import; imported when a run begins
    from flowchan.run.crew.run_ports import RunPorts
    from flowchan.run.policy.plan import PlannedWorker


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool(Placement):
    """Hosts for ``on=``, made with ``local``, ``ssh``, ``slurm`` or ``ray``.

    Each worker of a stage is placed on the host of the pool that has the fewest workers. ``pool["gpu1"]`` and
    ``pool["gpu1", "gpu2"]`` select hosts. A mapping also sets the hosts' shares of the workers: with
    ``pool[{"gpu1": 3, "gpu2": 1}]``, three of four workers, or six of eight, run on ``gpu1``. Pools from one
    provider share its agents within a run.

    Attributes:
        provider: The provider that starts the agents.
        peer_timeout: Seconds without a message from the driver after which an agent ends with its workers.
            The driver gives up on an agent that has been silent for 1.5 times as long.
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
        return dataclasses.replace(self, name=", ".join(chosen), hosts=chosen, shares=shares)

    def has_same_host(self, other: Placement) -> bool:
        """Return whether another placement uses the same provider.

        Args:
            other: Another placement.

        Returns:
            True if one part of a crew can serve both placements.
        """
        return isinstance(other, Pool) and other.provider == self.provider

    def open_part(self, ports: RunPorts, workers: Sequence[PlannedWorker]) -> HostsPart:
        """Create the part of a run's crew for these workers.

        Args:
            ports: Channels of the run.
            workers: Workers on the hosts of this pool.

        Returns:
            The part; nothing has been started yet.
        """
        from flowchan.hosts.hosts_part import HostsPart

        return HostsPart(ports, self.provider, self.peer_timeout, self.tls, workers)


def pool_of(call: str, provider: Provider, peer_timeout: float = PEER_TIMEOUT_S, tls: bool = False) -> Pool:
    """Make a pool of all hosts of a provider. Error messages begin with ``call``, a function's name."""
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
