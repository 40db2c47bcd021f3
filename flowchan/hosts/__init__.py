"""Other machines: pools of hosts for ``on=``, and what starts our agents there; and channels between programs
on different hosts.

``peer_timeout``: for how many seconds an agent waits for a program that it does not hear, before it ends
with its
workers. ``tls``: whether what crosses is encrypted and can't be changed on its way.

What channels between programs need is loaded when it is first asked for: agents have no use for it, and wait
for each import.
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
    """``count`` agents on this machine: to try a graph that will span hosts. They have its memory, cores and
    files in common with this program, and talk to it over loopback as agents elsewhere do."""
    return pool_of("local", _local(count), peer_timeout, tls)


@refuses_misspelt("ssh")
def ssh(
    *hosts: str,
    python: str = "python3",
    address: str | None = None,
    peer_timeout: float = PEER_TIMEOUT_S,
    tls: bool = False,
) -> Pool:
    """An agent on each of these hosts, started by the system's ``ssh``. ``python`` is the executable there,
    with flowchan installed. ``address`` is that of this machine at which the hosts reach it; left out, it is
    the one on the kernel's route towards them."""
    return pool_of("ssh", _ssh(*hosts, python=python, address=address), peer_timeout, tls)


@refuses_misspelt("slurm")
def slurm(*, address: str | None = None, peer_timeout: float = PEER_TIMEOUT_S, tls: bool = False) -> Pool:
    """An agent on each node of the Slurm allocation that this program runs in. ``address`` as for
    :func:`ssh`."""
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
    """``count`` agents, each held by an actor of Ray on a node of its own that has these ``resources``.
    ``address`` as for :func:`ssh`."""
    return pool_of("ray", _ray(count, resources=resources, address=address), peer_timeout, tls)


_LATER = {"open_channel": "flowchan.remote.remote_channel", "serve": "flowchan.remote.serving"}
"""Names, and the modules that they come from."""


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(_LATER[name]), name)
    globals()[name] = found
    return found
