"""How processes that only know their numbers become members of one group on a host.

Rank 0 listens on a Unix socket without a file, whose name is derived from the job's, and gives everybody the
descriptor of the group's memory once all have come. So there is no port to choose, nothing to remove, and
nobody of another user is let in: the kernel says who dialled. The socket exists only while they meet.

A rank that goes away while they meet may come again. Who has the memory, joins and says so; rank 0 marks as
gone who ends in between, so that nobody waits for it.
"""

from __future__ import annotations

import array
import contextlib
import errno
import hashlib
import json
import os
import select
import socket
import struct
import time
from collections.abc import Callable
from typing import Any

from flowchan import _core
from flowchan.collective.shared import SharedGroup
from flowchan.errors import GroupError
from flowchan.transport.interrupts import unless_interrupted

_PAUSE = 0.02
_LONGEST = 1024


def always() -> bool:
    return True


def meet(
    job: str, rank: int, size: int, timeout: float, name: str = "", wanted: Callable[[], bool] = always
) -> SharedGroup:
    """This process's member of the group of ``size`` that all processes with the same ``job`` form. Raises
    ``TimeoutError`` naming who has not come, also once it is not ``wanted`` any more, :class:`GroupError` if
    two come as the same rank."""
    give_up = time.monotonic() + timeout

    def left() -> float:
        """Seconds for which it goes on."""
        return give_up - time.monotonic() if wanted() else 0.0

    address = "\0flowchan-group-" + hashlib.sha256(f"{os.getuid()}\n{job}".encode()).hexdigest()[:32]
    return _host(address, size, left, name) if rank == 0 else _guest(address, rank, size, left, name)


Left = Callable[[], float]


def _host(address: str, size: int, left: Left, name: str) -> SharedGroup:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener, contextlib.ExitStack() as stack:
        _bind(listener, address, left)
        member = SharedGroup(_core.Group._make(size), 0, name)
        came: dict[int, socket.socket] = {}
        while len(came) < size - 1:
            _forget_who_left(came)
            guest = _accept(listener, left)
            if guest is None:
                missing = sorted(set(range(1, size)) - set(came))
                raise TimeoutError(f"of {size} members, these have not come in time: {missing}")
            stack.callback(guest.close)
            _admit(guest, came, size)
        for guest in came.values():
            with contextlib.suppress(OSError):
                socket.send_fds(guest, [b"come in"], [member._fd])
        member._take_seat()
        for rank, guest in came.items():
            if not _receive(guest, left()):
                member._count_out(rank)
    return member


def _bind(listener: socket.socket, address: str, left: Left) -> None:
    while True:
        try:
            listener.bind(address)
            listener.listen(_LONGEST)
            return
        except OSError as error:
            if error.errno != errno.EADDRINUSE or left() <= 0:
                raise GroupError(
                    "another group with the same name of its job is meeting on this host; give this one "
                    "another MASTER_PORT, or at="
                ) from error
        time.sleep(_PAUSE)


def _accept(listener: socket.socket, left: Left) -> socket.socket | None:
    """Who dials next; looked for in short waits, so that who left is noticed."""
    while (wait := left()) > 0:
        if _is_ready(listener, min(wait, 0.1)):
            return listener.accept()[0]
    return None


def _forget_who_left(came: dict[int, socket.socket]) -> None:
    for rank, guest in list(came.items()):
        if _is_ready(guest, 0.0):  # it has nothing to say now
            del came[rank]
            guest.close()


def _admit(guest: socket.socket, came: dict[int, socket.socket], size: int) -> None:
    """Notes who it is. Raises :class:`GroupError` if it can't be a member, which it is told, too."""
    if _user_of(guest) != os.getuid():
        guest.close()
        return
    said: Any = json.loads(_receive(guest, 5.0) or b"{}")
    if not said:
        guest.close()
        return
    _forget_who_left(came)
    rank, its_size = said["rank"], said["size"]
    if its_size != size:
        reason = f"rank 0 is one of {size} members, rank {rank} one of {its_size}"
    elif rank in came or not 0 < rank < size:
        reason = f"two processes have come as rank {rank}"
    else:
        came[rank] = guest
        return
    for one in (guest, *came.values()):
        with contextlib.suppress(OSError):
            one.send(b"no: " + reason.encode())
    raise GroupError(reason)


def _guest(address: str, rank: int, size: int, left: Left, name: str) -> SharedGroup:
    while True:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            try:
                sock.connect(address)
                if _user_of(sock) != os.getuid():
                    raise GroupError("another user of this host has taken the name of this job's meeting")
                sock.send(json.dumps({"rank": rank, "size": size}).encode())
                answer, fd = _receive_memory(sock, left)
            except (ConnectionRefusedError, ConnectionResetError, BrokenPipeError):
                answer, fd = b"", -1
            if answer.startswith(b"no: "):
                raise GroupError(answer[4:].decode())
            if fd >= 0:
                member = SharedGroup(fd, rank, name)
                member._take_seat()
                try:
                    sock.send(b"joined")
                    return member
                except (ConnectionResetError, BrokenPipeError):  # rank 0 has ended; perhaps another one comes
                    member._abandon()
        if left() <= 0:
            raise TimeoutError(
                f"rank {rank} of {size} waited in vain for rank 0 to listen, or for the others"
            )
        time.sleep(_PAUSE)


def _is_ready(sock: socket.socket, wait: float) -> bool:
    """Whether it has something to read within so many seconds."""
    waiting = select.poll()
    waiting.register(sock, select.POLLIN)
    return bool(waiting.poll(wait * 1000))


def _user_of(sock: socket.socket) -> int:
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", credentials)[1])


def _receive(sock: socket.socket, wait: float) -> bytes:
    """One message; empty when the other side has ended, or is silent."""
    sock.settimeout(max(0.001, wait))
    try:
        return sock.recv(_LONGEST)
    except unless_interrupted(OSError):
        return b""


def _receive_memory(sock: socket.socket, left: Left) -> tuple[bytes, int]:
    while (wait := left()) > 0 and not _is_ready(sock, min(wait, 0.1)):
        pass
    sock.settimeout(0.001)
    try:
        data, ancillary, _, _ = sock.recvmsg(_LONGEST, socket.CMSG_SPACE(4))
    except unless_interrupted(TimeoutError):
        return b"", -1
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            os.set_inheritable(fd := array.array("i", content[:4])[0], False)
            return data, fd
    return data, -1
