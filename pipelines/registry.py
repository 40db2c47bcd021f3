"""Register names that are valid in all processes of a program.

A program consists of its first process and of all processes that it started with multiprocessing, directly or
indirectly. All of them have the same multiprocessing authentication key. To claim a name, a process binds a
Unix socket to an abstract address, which is derived from the key and the name. The kernel lets only one
process bind the address, and frees it when that process ends. No process ever connects to the socket. The
claiming process also binds a second address, which contains its pid and the descriptor of an in-memory file.
Any process can read this address in ``/proc/net/unix``. The file contains the pickled value, signed with the
key. Therefore no background process is needed, and nothing is left behind.
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
"""Lock held during a lookup or a claim.

A fork waits for this lock, because the child must close its copies of all claims.
"""


class Claim(ExitStack):
    """Open sockets and file that keep a name claimed, returned by :func:`claim`."""

    def close(self) -> None:
        """Release the name; further calls have no effect."""
        with naming:  # no fork may happen here, because the child would inherit a half-closed claim
            super().close()


_claims: weakref.WeakSet[Claim] = weakref.WeakSet()


def claim(name: str, value: object) -> Claim | None:
    """Publish a value under a name until the claim is closed or this process ends.

    Return ``None`` if the name is taken. In that case, :func:`find` soon finds the name, provided that the
    name's owner is still alive.
    """
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
    """Return the value that a process of this program has published under the name, or ``None``."""
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
            continue  # the process that published the value has just ended or released the name
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
