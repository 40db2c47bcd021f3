"""Names that hold in all processes of a program: the first one, and those that multiprocessing started from
it, directly or not, by whichever method.

What they have in common is the key that multiprocessing gives to every process it starts. An address in the
abstract namespace of Unix sockets, made of the key and the name, is the claim: the kernel lets one process
bind it, and takes it back when that process ends, in whatever way. Nobody connects to it. A second address,
like all addresses readable in ``/proc/net/unix``, tells where the card is: a file in memory with the pickled
value, signed with the key. So nothing runs in the background and nothing remains.
"""

from __future__ import annotations

import errno
import hmac
import os
import pickle
import re
import socket
import threading
import weakref
from contextlib import ExitStack
from multiprocessing import current_process
from typing import Any

from flowchan import Broken

CARD = "flowchan-name"

naming = threading.RLock()
"""Whoever finds and claims holds it. A fork waits for it: the child must know of every claim, to let go of
it."""


class Claim(ExitStack):
    """What :func:`claim` gives: its open files."""

    def close(self) -> None:
        """Gives the name up. May be called again."""
        with naming:  # what a fork caught half closed, the child would keep
            super().close()


_claims: weakref.WeakSet[Claim] = weakref.WeakSet()


def claim(name: str, value: object) -> Claim | None:
    """Gives the value to all processes by its name until the claim is closed or this process ends. ``None``:
    the name is taken; :func:`find` finds it in a moment, if its process lives on."""
    address = _address(name)
    with naming, Claim() as parts:
        card = parts.enter_context(os.fdopen(os.memfd_create(CARD), "wb", buffering=0))
        pickled = pickle.dumps(value)
        card.write(_signature(address, pickled) + pickled)
        for bound in (address, f"{address}-{os.getpid()}-{card.fileno()}"):
            try:
                parts.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)).bind(f"\0{bound}")
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    return None
                raise
        claimed = parts.pop_all()
        _claims.add(claimed)
        return claimed


def find(name: str) -> Any:
    """The value that a process of this program has given the name to, or ``None``."""
    address = _address(name)
    with open("/proc/net/unix", errors="replace") as table:
        places = re.findall(rf" @{address}-(\d+)-(\d+)$", table.read(), re.MULTILINE)
    for pid, fd in places:
        try:
            if not os.readlink(f"/proc/{pid}/fd/{fd}").startswith(f"/memfd:{CARD} "):
                continue
            with open(f"/proc/{pid}/fd/{fd}", "rb") as card:
                signature, pickled = card.read(32), card.read()
            if hmac.compare_digest(signature, _signature(address, pickled)):
                return pickle.loads(pickled)
        except (OSError, Broken):
            continue  # its process has just ended or given the name up
    return None


def _address(name: str) -> str:
    return (
        "flowchan-"
        + hmac.digest(current_process().authkey, name.encode("utf-8", "surrogatepass"), "sha256").hex()
    )


def _signature(address: str, pickled: bytes) -> bytes:
    return hmac.digest(current_process().authkey, address.encode() + pickled, "sha256")


def _after_fork() -> None:
    for claimed in list(_claims):
        claimed.close()
    naming.release()


os.register_at_fork(before=naming.acquire, after_in_parent=naming.release, after_in_child=_after_fork)
