"""Form a group of processes through a folder that all their hosts share.

Rank 0 listens on a free port, and writes its address and a new secret to a file that only its user can read.
The other members wait for the file. Once all members have met, rank 0 removes it.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import stat
import time
from pathlib import Path
from typing import Any

from flowchan.collective.deadline import countdown
from flowchan.collective.group import Group
from flowchan.collective.rendezvous.address import meet_at
from flowchan.errors import GroupError
from flowchan.transport.tcp import joined, route_to

SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.01, 0.5
REMEDY = "set FLOWCHAN_FOLDER to a folder that all hosts see"


def meet_in(folder: Path, file: str, launcher: str, rank: int, size: int, timeout: float, name: str) -> Group:
    """Return this process's member of the group that meets through a file.

    Args:
        folder: Folder that all hosts share; created if it is missing.
        file: Name of the file, which differs between groups.
        launcher: Address, without a port, of the host that started the processes. Rank 0 listens on the
            address of its route to that host.
        rank: Rank of this process.
        size: Number of members.
        timeout: Seconds to wait for the other members.
        name: Name of the group, for messages.

    Returns:
        The member of this process.

    Raises:
        TimeoutError: Some members did not arrive in time.
        GroupError: The folder cannot be used, or other users can write the file.
        OSError: Rank 0 cannot resolve the launcher's name in time, or has no route to it.
    """
    remaining, path = countdown(timeout), folder / file
    if rank:
        found = _wait_for(path, rank, size, timeout)
        return meet_at(found["at"], bytes.fromhex(found["secret"]), rank, size, remaining() or 0.0, name)
    secret = secrets.token_bytes(32)

    def publish(at: str) -> None:
        _write(path, json.dumps({"at": at, "secret": secret.hex()}))

    try:
        at = joined((route_to(launcher, remaining()), 0))
        return meet_at(at, secret, rank, size, remaining() or 0.0, name, publish=publish)
    finally:
        with contextlib.suppress(OSError):
            path.unlink()


def _write(path: Path, text: str) -> None:
    """Write a file that only this user can read, and that appears only when complete."""
    new = path.with_name(f"{path.name}.new")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):  # remove the file that a killed process may have left
            new.unlink()
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(text)
        new.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            new.unlink()
        raise GroupError(f"group: rank 0 cannot write {path}: {error.strerror}; {REMEDY}") from None


def _wait_for(path: Path, rank: int, size: int, timeout: float) -> Any:
    give_up, pause = time.monotonic() + timeout, SHORTEST_PAUSE_S
    while (text := _read(path)) is None:
        if time.monotonic() >= give_up:
            raise TimeoutError(f"rank {rank} of {size} timed out: rank 0 has not written {path}; {REMEDY}")
        time.sleep(min(pause, max(0.0, give_up - time.monotonic())))
        pause = min(2 * pause, LONGEST_PAUSE_S)
    return json.loads(text)


def _read(path: Path) -> str | None:
    """Return the text of the file, or None if it does not exist yet."""
    try:
        os.listdir(path.parent)  # otherwise, NFS may report the file as missing for another minute
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW)) as file:
            status = os.fstat(file.fileno())
            if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
                got = f"owner {status.st_uid} and mode {stat.S_IMODE(status.st_mode):o}"
                raise GroupError(
                    f"group: {path} must belong to this user and have mode 600, got {got}; "
                    f"{REMEDY} and that other users cannot write to"
                )
            return file.read()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise GroupError(f"group: cannot read {path}: {error.strerror}; {REMEDY}") from None
