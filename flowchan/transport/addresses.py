"""Find the addresses at which other hosts can reach this machine, and build the addresses of channels."""

from __future__ import annotations

import errno
import ipaddress
from collections.abc import Mapping

from flowchan.errors import HostError
from flowchan.transport.tcp import route_to


def address_towards(call: str, peers: Mapping[str, str]) -> str:
    """Return the address of this machine from which the kernel reaches all ``peers``.

    ``peers`` maps hosts' names to their addresses. A host that is reached over loopback is this machine
    itself, and can reach all addresses of this machine.
    """
    ours: dict[str, str] = {}
    for host, peer in peers.items():
        try:
            ours.setdefault(route_to(peer), host)
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                name = "" if peer == host else f"{host}: "
                raise HostError(
                    f"{call}: {name}{error.strerror}; check the name of the host, or set address= to an "
                    "address of this machine that the hosts can reach",
                    host,
                ) from None
            raise HostError(
                f"{call}: can't find an address of this machine that {host} can reach "
                f"({error.strerror}); set address= to one that it can reach",
                host,
            ) from error
    outside = {address: host for address, host in ours.items() if not _is_loopback(address)}
    if len(outside) > 1:
        routes = ", ".join(f"{host} from {address}" for address, host in outside.items())
        raise HostError(
            f"{call}: the hosts reach this machine at different addresses ({routes}); set "
            "address= to one that all of them can reach"
        )
    return next(iter(outside or ours))


def channel_address(place: str, number: int) -> str:
    """Return a channel's address, which contains its owner's address and the channel's number."""
    return f"{place}/{number}"


def place_in(address: str) -> str:
    """Return the address at which a channel's owner listens."""
    place, slash, number = str(address).rpartition("/")
    if not (slash and place and number.isascii() and number.isdigit()):
        raise ValueError(
            f"{address!r} is not the address of a channel; use channel.address, such as '127.0.0.1:4711/1'"
        )
    return place


def number_in(address: str) -> int:
    """Return a channel's number at its owner."""
    return int(address.rpartition("/")[2])


def mark_of(owner: str, number: int | str) -> str:
    """Return the mark that an item contains for each channel in it.

    The mark contains the owner's random ID. No other text therefore equals it.
    """
    return f"sent by {owner}/{number}"


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback
