"""Meeting by what torch's launchers have: a store of keys and values that all members reach."""

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

from flowchan.collective.group import Group
from flowchan.collective.messages_remote import Way
from flowchan.collective.rendezvous.forming import meet_by
from flowchan.transport.tcp import route_to


def meet_by_store(store: Any, rank: int, size: int, timeout: float, name: str = "") -> Group:
    """The member of the group of all that use this store for it, on whatever hosts. Who can write to the
    store can join. Nothing is left in the store, for the next group of this name."""
    told = 0

    def gather(value: Any) -> list[Any]:
        nonlocal told
        store.set(f"flowchan/{told}/{rank}", json.dumps(value))
        said = [json.loads(store.get(f"flowchan/{told}/{other}")) for other in range(size)]
        forget(told - 1)  # all have read that who have written this
        told += 1
        return said

    def forget(number: int) -> None:
        with contextlib.suppress(RuntimeError, NotImplementedError):  # not every store can
            store.delete_key(f"flowchan/{number}/{rank}")

    (secret, *_) = gather(secrets.token_hex(32))
    way = Way(bytes.fromhex(secret), route_to(os.environ.get("MASTER_ADDR", "127.0.0.1")))
    group = meet_by(gather, rank, way, timeout, name)
    try:
        group.barrier()  # all have read what was told last
    except BaseException:
        group.close()
        raise
    forget(told - 1)
    return group


def meet_by_torchrun(number: int, timeout: float, name: str) -> Group:
    """The same by the store of torchrun."""
    store, rank, size = _torchrun_store(timeout)
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    prefix = PrefixStore(f"flowchan group {number} of start {restart}", store)
    return meet_by_store(prefix, rank, size, timeout, name)


@functools.cache
def _torchrun_store(timeout: float) -> tuple[Any, int, int]:
    """It stays until the process ends: where no agent of torchrun has it, rank 0 serves it to all."""
    store, rank, size = next(rendezvous("env://", timeout=timedelta(seconds=timeout)))
    return store, rank, size
