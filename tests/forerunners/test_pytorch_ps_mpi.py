"""Test groups and ``Gradients`` with the cases from pytorch_ps_mpi's tests.

Each test has the name of the original test but none of its code. The members are threads; the original uses
two processes. The following original tests have no counterpart here, or have a different result:

``Igatherv`` with oversized slots, padding, ``trim_msg``
    They test buffers that must be as large as the largest message. Here sizes may differ by any factor: one
    member contributes thousands of times as much as another.
``async_send_bytearray``
    tests/collective/test_messages.py tests sending to one member.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.group_members import in_threads, raised

SIZE = 3


def thing(rank: int) -> dict[str, Any]:
    return {
        "rank": rank,
        "list": [1.5] * 10**rank,
        "array": np.arange(10 ** (2 * rank + 1)),
        "text": "x\x29" * 32,
    }


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return bool((one["array"] == other["array"]).all()) and {**one, "array": 0} == {**other, "array": 0}


def test_gather() -> None:
    def body(g: Any) -> None:
        for root in range(g.size):
            found = g.gather(thing(g.rank), root)
            assert (found is None) == (g.rank != root)
            assert all(same(one, thing(rank)) for rank, one in enumerate(found or ()))

    raised(in_threads(SIZE, body))


def test_bcast() -> None:
    """The other members may pass values of any size."""

    def body(g: Any) -> None:
        for root in range(g.size):
            handle = g.broadcast(thing(root) if g.rank == root else None, root, wait=False)
            assert same(handle.wait(), thing(root))

    raised(in_threads(SIZE, body))


def test_iallgather_and_async_diff_sizes_and_sync_same_size() -> None:
    def body(g: Any) -> None:
        assert all(same(one, thing(rank)) for rank, one in enumerate(g.allgather(thing(g.rank))))
        assert all(same(one, thing(1)) for one in g.allgather(thing(1)))

    raised(in_threads(SIZE, body))


def test_code_decodes_the_gradients_of_all_members() -> None:
    """``MPI_PS(…, code=…)`` has no original test.

    Encoded values may have any size, and the mean replaces the sum.
    """
    torch = pytest.importorskip("torch")
    from flowchan.collective.training.gradients import Gradients

    class NotZero:
        def encode(self, x: Any) -> Any:
            where = x.nonzero()[:, 0]
            return where, x[where]

        def decode(self, values: list[Any], out: Any) -> None:
            out.zero_()
            for where, what in values:
                out[where] += what
            out /= len(values)

    def body(g: Any) -> Any:
        net = torch.nn.Linear(4, 1, bias=False)
        gradients = Gradients(net, g, compress=NotZero)
        net(torch.eye(4)[: g.rank]).sum().backward()
        gradients.wait()
        gradients.close()
        return net.weight.grad[0].tolist()

    assert raised(in_threads(4, body)) == [[3 / 4, 2 / 4, 1 / 4, 0.0]] * 4
