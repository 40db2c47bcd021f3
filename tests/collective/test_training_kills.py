"""Test data-parallel training while members are killed at random times.

Each survivor has the exact parameters after each step, or raises an error that names the killed member.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import random
from collections.abc import Iterator
from typing import Any

import pytest
from support.group_members import SECRET, free_address
from support.optional_packages import optional

from flowchan import Channel, MemberDied
from flowchan.collective.rendezvous.address import meet_at

torch = optional("torch")
if torch:
    from flowchan.collective.training.gradients import AllReduceSGD, ElasticAverage, Gradients, synchronize

pytestmark = pytest.mark.usefixtures("one_compute_thread")

SIZE, STEPS = 3, 6


def digest(tensors: Any) -> str:
    return hashlib.sha256(b"".join(x.detach().numpy().tobytes() for x in tensors)).hexdigest()


class Descent:
    """Plain SGD, because the optimizers of torch would import half of torch in each process."""

    def __init__(self, module: Any) -> None:
        self._parameters = list(module.parameters())

    def step(self) -> None:
        with torch.no_grad():
            for parameter in self._parameters:
                parameter -= 0.1 * parameter.grad


def batches(module: Any, rank: int, count: int) -> Iterator[None]:
    """Compute the gradients of ``count`` batches in turn."""
    made = torch.Generator().manual_seed(rank)
    for _ in range(count):
        module.zero_grad()
        module(torch.randn(4, 32, generator=made)).square().mean().backward()
        yield


def gradients(module: Any, optimizer: Any, group: Any) -> Iterator[str]:
    averaged = Gradients(module, group)
    for _ in batches(module, group.rank, STEPS):
        averaged.wait()
        optimizer.step()
        yield digest(module.parameters())
    averaged.close()


def overlapped_sgd(module: Any, optimizer: Any, group: Any) -> Iterator[str]:
    return allreduce_sgd(module, optimizer, group, overlap=True)


def allreduce_sgd(module: Any, optimizer: Any, group: Any, overlap: bool = False) -> Iterator[str]:
    training = AllReduceSGD(module, optimizer, group, overlap=overlap)
    for _ in batches(module, group.rank, STEPS - group.rank):  # some members have fewer batches
        training.step()
        yield digest(module.parameters())
    training.join()
    yield "joined"


def elastic_average(module: Any, optimizer: Any, group: Any) -> Iterator[str]:
    average = ElasticAverage(module, group, every=1)
    for _ in batches(module, group.rank, STEPS - group.rank):
        optimizer.step()
        average.step()
        yield digest(centre.flat for centre in average._centre)
    average.join()
    average.to_centre()
    yield digest(module.parameters())


def train(kind: Any, rank: int, at: str, hosts: str, reports: Channel[Any]) -> None:
    """Train as one member. Report the digest after each step, and the killed ranks at the end."""
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 8))
    optimizer = Descent(module)
    killed: tuple[int, ...] = ()
    try:
        with meet_at(at, SECRET, rank, SIZE, 60, host=hosts[rank]) as group:
            synchronize(module, group)
            for found in kind(module, optimizer, group):
                reports.put((rank, found))
    except MemberDied as died:
        killed = died.ranks
    reports.put((rank, killed))


def trained(kind: Any, hosts: str, victim: int, after: int) -> tuple[list[list[str]], list[Any]]:
    """Run all members, and kill the ``victim`` after ``after`` reports, unless it ends before that.

    Return the digests of each member, and the killed ranks that it reported (None for the victim).
    """
    at, reports = free_address(), Channel[Any](across="processes")
    context = multiprocessing.get_context("fork")
    members = [context.Process(target=train, args=(kind, rank, at, hosts, reports)) for rank in range(SIZE)]
    for member in members:
        member.start()
    digests: list[list[str]] = [[] for _ in members]
    killed: list[Any] = [None] * SIZE
    while any(member.is_alive() for member in members) or len(reports):
        if (report := next_of(reports)) is None:
            continue
        rank, found = report
        if isinstance(found, str):
            digests[rank].append(found)
            if rank == victim and len(digests[rank]) == after:
                members[victim].kill()
        else:
            killed[rank] = tuple(found)
    for member in members:
        member.join()
        member.close()
    return digests, killed


def next_of(reports: Channel[Any]) -> Any:
    try:
        return reports.get(timeout=0.05)
    except TimeoutError:
        return None


@pytest.mark.parametrize("hosts", ["aaa", "aab"], ids=["one host", "two hosts"])
@pytest.mark.parametrize("kind", [gradients, allreduce_sgd, overlapped_sgd, elastic_average])
def test_training_is_exact_or_names_the_killed_member(kind: Any, hosts: str, long_walk: bool) -> None:
    expected, killed = trained(kind, hosts, 0, -1)
    assert killed == [()] * SIZE
    chosen = random.Random(os.getpid())
    for _ in range(50 if long_walk else 3):
        victim, after = chosen.randrange(SIZE), chosen.randrange(1, STEPS)
        digests, killed = trained(kind, hosts, victim, after)
        case = victim, after, killed
        for rank in range(SIZE):
            assert digests[rank] == expected[rank][: len(digests[rank])], case
            if rank != victim:
                assert killed[rank] == () or victim in killed[rank], case
                assert killed[rank] or digests[rank] == expected[rank], case
