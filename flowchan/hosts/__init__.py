"""Create pools of hosts for ``on=``, and channels between programs on different hosts.

The modules for channels between programs are imported on first use. Agents do not need these modules, and
every import would delay an agent's start.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from flowchan.hosts.host_pool import Pool, pool_of
from flowchan.hosts.providers.local import local as _local
from flowchan.hosts.providers.ray import ray as _ray
from flowchan.hosts.providers.slurm import slurm as _slurm
from flowchan.hosts.providers.ssh import ssh as _ssh
from flowchan.items.arguments import refuses_misspelt
from flowchan.transport.link_events import PEER_TIMEOUT_S

if TYPE_CHECKING:
    from flowchan.remote.remote_channel import open_channel
    from flowchan.remote.serving import serve

__all__ = ["Pool", "local", "open_channel", "ray", "serve", "slurm", "ssh"]


@refuses_misspelt("local")
def local(count: int, *, peer_timeout: float = PEER_TIMEOUT_S, tls: bool = False) -> Pool:
    """Make a pool of ``count`` agents on this machine, to test a graph before it runs on several hosts.

    The agents share this machine's memory, cores and files. The agents communicate over TCP on loopback, just
    as agents on separate machines do over the network.

    Args:
        count: Number of agents to start, at least 1.
        peer_timeout: An agent and its workers end after this many seconds without a message from the program.
        tls: Whether TLS encrypts and authenticates the traffic.

    Returns:
        The pool. Its agents start when a graph that uses the pool starts.

    Raises:
        TypeError: An argument has the wrong type, or its name is unknown.
        ValueError: ``count`` is less than 1, or ``peer_timeout`` is not a positive finite number.

    Example:
        >>> from flowchan import Graph, hosts
        >>> graph = Graph()
        >>> lengths = graph.source(["a", "bb"]).map(len, on=hosts.local(2), workers=2).collect()
        >>> graph.run()[lengths]
        [1, 2]
    """
    return pool_of("local", _local(count), peer_timeout, tls)


@refuses_misspelt("ssh")
def ssh(
    *hosts: str | Mapping[str, int],
    python: str = "python3",
    address: str | None = None,
    peer_timeout: float = PEER_TIMEOUT_S,
    tls: bool = False,
) -> Pool:
    """Make a pool with one agent on each of these hosts, started with the system's ``ssh``.

    Args:
        hosts: Hosts as ``ssh`` accepts them: ``"gpu1"``, ``"user@gpu2"``. A single mapping, such as
            ``{"gpu1": 8, "gpu2": 16}``, also sets the number of cores that workers may use on each host, for
            :meth:`Pool.dealt`. Otherwise, hosts report this number when it is needed.
        python: Python executable on the hosts, with flowchan installed.
        address: Address, without a port, at which the hosts can reach this machine (default: its
            address on the route to them).
        peer_timeout: An agent and its workers end after this many seconds without a message from the program.
        tls: Whether TLS encrypts and authenticates the traffic.

    Returns:
        The pool. Its agents start when a graph that uses the pool starts.

    Raises:
        TypeError: An argument has the wrong type, or its name is unknown.
        ValueError: No host is given, a host's core count is less than 1, or another argument is out of range.

    Example:
        >>> from flowchan import Graph, hosts
        >>> machines = hosts.ssh("gpu1", "user@gpu2", python="~/venv/bin/python")
        >>> graph = Graph()
        >>> lengths = graph.source(["a", "bb"]).map(len, on=machines, workers=4).collect()
        >>> graph.run()[lengths]
        [1, 2]
    """
    return pool_of("ssh", _ssh(*hosts, python=python, address=address), peer_timeout, tls)


@refuses_misspelt("slurm")
def slurm(*, address: str | None = None, peer_timeout: float = PEER_TIMEOUT_S, tls: bool = False) -> Pool:
    """Make a pool with one agent on each node of this program's Slurm allocation.

    Args:
        address: Address, without a port, at which the nodes can reach this machine (default: its
            address on the route to them).
        peer_timeout: An agent and its workers end after this many seconds without a message from the program.
        tls: Whether TLS encrypts and authenticates the traffic.

    Returns:
        The pool. Its agents start when a graph that uses the pool starts.

    Raises:
        TypeError: An argument has the wrong type, or its name is unknown.
        ValueError: ``peer_timeout`` is not a positive finite number.

    Example:
        >>> from flowchan import Graph, hosts
        >>> graph = Graph()
        >>> lengths = graph.source(["a", "bb"]).map(len, on=hosts.slurm(), workers=4).collect()
        >>> graph.run()[lengths]
        [1, 2]
    """
    return pool_of("slurm", _slurm(address=address), peer_timeout, tls)


@refuses_misspelt("ray")
def ray(
    count: int,
    *,
    resources: Mapping[str, float] | None = None,
    address: str | None = None,
    peer_timeout: float = PEER_TIMEOUT_S,
    tls: bool = False,
) -> Pool:
    """Make a pool of ``count`` agents on different nodes of a Ray cluster, each started by a Ray actor.

    Args:
        count: Number of agents to start, at least 1.
        resources: Resources that each agent reserves on its node, by their names in Ray (default: one
            ``"CPU"``).
        address: Address, without a port, at which the nodes can reach this machine (default: its
            address on the route to them).
        peer_timeout: An agent and its workers end after this many seconds without a message from the program.
        tls: Whether TLS encrypts and authenticates the traffic.

    Returns:
        The pool. Its agents start when a graph that uses the pool starts.

    Raises:
        TypeError: An argument has the wrong type, or its name is unknown.
        ValueError: ``count`` is less than 1, or ``peer_timeout`` is not a positive finite number.

    Example:
        >>> from flowchan import Graph, hosts
        >>> graph = Graph()
        >>> machines = hosts.ray(4, resources={"GPU": 1})
        >>> lengths = graph.source(["a", "bb"]).map(len, on=machines, workers=4).collect()
        >>> graph.run()[lengths]
        [1, 2]
    """
    return pool_of("ray", _ray(count, resources=resources, address=address), peer_timeout, tls)


_LATER = {"open_channel": "flowchan.remote.remote_channel", "serve": "flowchan.remote.serving"}
"""Modules that are imported on first use, by the public name that each defines."""


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(_LATER[name]), name)
    globals()[name] = found
    return found
