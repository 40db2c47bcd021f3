"""Form a group of processes on one host that know only their ranks and their job's name.

Rank 0 listens on an abstract Unix socket, whose name derives from the job's name. No port or file is needed.
The kernel identifies the user of each peer, and other users' processes are rejected. The socket exists only
during the rendezvous. A process that ends before all processes have met can be started again.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import select
import socket
import struct
import time
from typing import Any

from flowchan.collective.one_host import SharedGroup, share
from flowchan.errors import GroupError
from flowchan.transport.interrupts import unless_interrupted
from flowchan.transport.rendezvous import Coordinator, Participant, RendezvousEnded

PAUSE_S, HELLO_S = 0.02, 5.0
_HELLO = struct.Struct("<ii")  # rank, size
BY_ARRIVAL = -1


def meet(job: str, rank: int | None, size: int, timeout: float, name: str = "") -> SharedGroup:
    """Form a group of all processes on this host with the same ``job``.

    Args:
        job: Text that identifies the group.
        rank: Rank of this process; None if the order of arrival decides.
        size: Number of processes.
        timeout: Seconds to wait for the other processes.
        name: Name of the group, for messages.

    Returns:
        This process's member.

    Raises:
        TimeoutError: Some processes did not arrive in time.
        GroupError: Two processes have the same rank, or different values of ``size``.
    """
    address = "\0flowchan-group-" + hashlib.sha256(f"{os.getuid()}\n{job}".encode()).hexdigest()[:32]
    give_up = time.monotonic() + timeout
    while True:
        try:
            member = None
            if not rank:
                member = _lead(address, rank is None, size, give_up, name)
            if member is None and rank != 0:
                member = _follow(address, rank, size, give_up, name)
            if member is not None:
                return member
        except RendezvousEnded as ended:
            if ended.refused:
                raise GroupError(str(ended)) from None
        if time.monotonic() > give_up:
            who = "a member" if rank is None else f"rank {rank}"
            raise TimeoutError(f"{who} of {size} timed out: rank 0 or other members did not arrive")
        time.sleep(PAUSE_S)


def _lead(address: str, if_first: bool, size: int, give_up: float, name: str) -> SharedGroup | None:
    """Form the group as rank 0. If another process already listens and ``if_first`` is true, return None."""
    with contextlib.closing(Coordinator(size, give_up)) as coordinator:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            if not _listens(listener, address, give_up, if_first):
                return None
            coordinator.assemble(lambda wait: _accept(listener, wait))
        return share(coordinator.gather, 0, range(size), name)


def _listens(listener: socket.socket, address: str, give_up: float, if_first: bool) -> bool:
    """Listen on the address. If ``if_first`` is true and another process listens there, return False."""
    while True:
        try:
            listener.bind(address)
            listener.listen(1024)
            return True
        except OSError as error:
            if error.errno == errno.EADDRINUSE and if_first:
                return False
            if error.errno != errno.EADDRINUSE or time.monotonic() > give_up:
                raise GroupError(
                    "another group with the same job name is forming on this host; use another MASTER_PORT "
                    "or at= for this group"
                ) from error
        time.sleep(PAUSE_S)


def _accept(listener: socket.socket, wait: float) -> tuple[socket.socket, dict[str, Any]]:
    """Accept the next process that runs as this user and sends its rank and size."""
    give_up = time.monotonic() + wait
    waiting = select.poll()
    waiting.register(listener, select.POLLIN)
    while waiting.poll(max(0.0, give_up - time.monotonic()) * 1000):
        sock, _ = listener.accept()
        sock.settimeout(HELLO_S)
        try:
            greeting = sock.recv(_HELLO.size, socket.MSG_WAITALL)
        except unless_interrupted(OSError):
            greeting = b""
        if _user_of(sock) == os.getuid() and len(greeting) == _HELLO.size:
            rank, size = _HELLO.unpack(greeting)
            sock.settimeout(None)
            return sock, {"rank": None if rank == BY_ARRIVAL else rank, "size": size}
        sock.close()
    raise TimeoutError


def _follow(address: str, rank: int | None, size: int, give_up: float, name: str) -> SharedGroup | None:
    """Join the group of rank 0. Return None if rank 0 is not listening now."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(max(0.001, give_up - time.monotonic()))
        try:
            sock.connect(address)
            sock.send(_HELLO.pack(BY_ARRIVAL if rank is None else rank, size))
        except (ConnectionError, BlockingIOError):
            return None
        if _user_of(sock) != os.getuid():
            raise GroupError(
                "another user on this host uses the name of this job; use another MASTER_PORT or at="
            )
        participant = Participant(sock, "rank 0")
        own = participant.receive() if rank is None else rank
        return share(participant.gather, own, range(size), name)


def _user_of(sock: socket.socket) -> int:
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", credentials)[1])
