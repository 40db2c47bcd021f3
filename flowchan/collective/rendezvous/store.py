"""Form a group through a torch key-value store that all members can reach."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import secrets
from datetime import timedelta
from typing import Any

from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from flowchan.collective.connector import Connector
from flowchan.collective.group import Group
from flowchan.collective.rendezvous.forming import meet_by
from flowchan.transport.tcp import route_to


def meet_by_store(store: Any, rank: int, size: int, timeout: float, name: str = "") -> Group:
    """Form a group of all processes on any hosts that use this store; return this process's member.

    Every process that can write to the store can join. The keys are removed at the end, so that later groups
    can use the same store.
    """
    round_number = 0

    def gather(value: Any) -> list[Any]:
        nonlocal round_number
        store.set(f"flowchan/{round_number}/{rank}", json.dumps(value))
        values = [json.loads(store.get(f"flowchan/{round_number}/{other}")) for other in range(size)]
        forget(round_number - 1)  # by now, all members have read the values of the previous round
        round_number += 1
        return values

    def forget(number: int) -> None:
        with contextlib.suppress(RuntimeError, NotImplementedError):  # some stores cannot delete keys
            store.delete_key(f"flowchan/{number}/{rank}")

    (secret, *_) = gather(secrets.token_hex(32))
    master = os.environ.get("MASTER_ADDR", "127.0.0.1")
    connector = Connector(bytes.fromhex(secret), route_to(master, timeout))
    group = meet_by(gather, rank, connector, timeout, name)
    try:
        group.barrier()  # after the barrier, all members have read the last values
    except BaseException:
        group.close()
        raise
    forget(round_number - 1)
    return group


def meet_by_torchrun(number: int, timeout: float, name: str) -> Group:
    """Form a group through torchrun's store, and return this process's member."""
    store, rank, size = _torchrun_store(timeout)
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    prefix = PrefixStore(f"flowchan group {number} of start {restart}", store)
    return meet_by_store(prefix, rank, size, timeout, name)


@functools.cache
def _torchrun_store(timeout: float) -> tuple[Any, int, int]:
    """Return torchrun's store, and the rank and size of this process.

    The store is kept until the process ends. If no torchrun agent serves it, rank 0 does.
    """
    store, rank, size = next(rendezvous("env://", timeout=timedelta(seconds=timeout)))
    return store, rank, size
