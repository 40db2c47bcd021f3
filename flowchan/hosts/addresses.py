"""At which of its addresses the driver listens, so that all hosts of a provider reach it."""

from __future__ import annotations

import errno
import ipaddress
from collections.abc import Mapping

from flowchan.errors import HostError
from flowchan.transport.tcp import route_to


def address_towards(call: str, peers: Mapping[str, str]) -> str:
    """Our address on the kernel's route to all ``peers``, which are hosts' names and where each is to be
    found. A host reached through loopback is this machine, and reaches all its addresses."""
    ours: dict[str, str] = {}
    for host, peer in peers.items():
        try:
            ours.setdefault(route_to(peer), host)
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                raise HostError(
                    f"{call}: {host} can't be found from this machine ({error.strerror}): look at how it is "
                    "written; where only a jump host knows it, say with address= at which address of this "
                    "machine the hosts reach it",
                    host,
                ) from error
            raise HostError(
                f"{call}: at which address {host} reaches this machine is not known ({error.strerror}): "
                "say it with address=",
                host,
            ) from error
    outside = {address: host for address, host in ours.items() if not _is_loopback(address)}
    if len(outside) > 1:
        routes = ", ".join(f"{host} from {address}" for address, host in outside.items())
        raise HostError(
            f"{call}: the hosts are reached from different addresses of this machine ({routes}); "
            "say with address= at which one all of them reach it"
        )
    return next(iter(outside or ours))


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback
