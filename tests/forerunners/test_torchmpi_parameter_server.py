"""Test the parameter server with the five cases of TorchMPI's ``parameterserver.lua``.

The ranks are processes. These tests differ from the original in two points:

- In TorchMPI, each server starts with its rank's slice. Here, each rank copies its slice to the server.
- The original needs a barrier after each ``syncHandle``, so that all servers have applied a rule. Here,
  ``pull(at_least=version)`` waits for the version of a push.
"""

from __future__ import annotations

from typing import Any

import pytest
from support.optional_packages import optional

from flowchan.pipelines import Barrier, ParameterServer, map  # noqa: A004

torch = optional("torch")

pytestmark = pytest.mark.usefixtures("one_compute_thread")

RANKS, ROUNDS = 4, 25
"""TorchMPI runs 100 rounds of each case."""


def ranks(server: Any, body: Any) -> None:
    """Run a function on each rank, with a client and a barrier for all ranks."""
    with server:
        map(RANKS, body, server.client(), Barrier(RANKS), on="process").join()


def extremes(client: Any) -> tuple[float, float]:
    values = torch.cat([x.flatten() for x in client.pull().values()])
    return float(values.min()), float(values.max())


@pytest.mark.parametrize("shards", [1, 3])
def test_slices_of_all_ranks_form_one_tensor(shards: int) -> None:
    def body(client: Any, barrier: Any, worker: int) -> None:
        for _ in range(ROUNDS):
            client.push({str(worker - 1): torch.full((256,), float(worker - 1))}, rule="copy").wait()
            barrier.wait()
            assert extremes(client) == (0, RANKS - 1)
            barrier.wait()
            client.push({str(worker - 1): torch.zeros(256)}, rule="zero").wait()
            barrier.wait()

    ranks(ParameterServer({str(rank): torch.zeros(256) for rank in range(RANKS)}, shards=shards), body)


@pytest.mark.parametrize("shards", [1, 3])
def test_all_ranks_read_the_initial_values(shards: int) -> None:
    def body(client: Any, barrier: Any, worker: int) -> None:
        for _ in range(ROUNDS):
            assert extremes(client) == (123, 123)

    ranks(ParameterServer({name: torch.full((911, 101), 123.0) for name in "abc"}, shards=shards), body)


@pytest.mark.parametrize("shards", [1, 3])
def test_zero_copy_and_add_combine_several_ranks(shards: int) -> None:
    """Run case 3 (the last rank zeroes), case 4 (it copies) and case 5 (it copies, then all ranks add)."""

    def body(client: Any, barrier: Any, worker: int) -> None:
        rank = worker - 1

        def filled(value: float) -> dict[str, Any]:
            return {name: torch.full((911, 101), value) for name in "abc"}

        for _ in range(ROUNDS):
            for rule, value in (("zero", 0.0), ("copy", RANKS - 1.0)):
                if rank == RANKS - 1:
                    client.push(filled(RANKS - 1.0), rule=rule).wait()
                barrier.wait()
                assert extremes(client) == (value, value)
                barrier.wait()
            client.push(filled(float(rank)), rule="add").wait()
            barrier.wait()
            total = RANKS - 1 + RANKS * (RANKS - 1) / 2
            assert extremes(client) == (total, total)
            barrier.wait()

    ranks(ParameterServer({name: torch.ones(911, 101) for name in "abc"}, shards=shards), body)


def test_read_after_a_push_needs_no_barrier() -> None:
    """A pull with the version that a push returned waits until the server has applied that push."""

    def body(client: Any, barrier: Any, worker: int) -> None:
        for round_ in range(ROUNDS):
            version = client.push(torch.ones(1024)).wait()
            assert version > round_
            assert float(client.pull(at_least=version).min()) >= round_ + 1

    ranks(ParameterServer(torch.zeros(1024)), body)
