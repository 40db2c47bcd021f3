"""Test ``flowchan.collective.training.gradients`` with the cases from torch-distlearn's tests.

The members are threads, as in the original. Each test has the name of the original test but none of its code.
Here ``join`` replaces ``synchronizeParameters`` and ``synchronizeCenter``: a member that has no steps left
takes part in the steps of the others. No member therefore has to send its state. The centres of elastic
averaging are bit-identical on all members; in the original they differ by about 1e-6.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from support.group_members import in_threads, raised

torch = pytest.importorskip("torch")

from flowchan.collective.training.gradients import AllReduceSGD, ElasticAverage, check_equal, synchronize  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_compute_thread")


def replica() -> tuple[Any, Any]:
    module = torch.nn.Linear(7, 1)
    return module, torch.optim.SGD(module.parameters(), lr=0.1)


def bits(module: Any) -> bytes:
    return b"".join(p.detach().numpy().tobytes() for p in module.parameters())


@pytest.mark.parametrize("size", [2, 4, 8])
def test_all_reduce_sgd(size: int) -> None:
    """The members take different numbers of steps per epoch, and have equal parameters afterwards."""

    def body(g: Any) -> Any:
        chance, (module, optimizer) = random.Random(g.rank), replica()
        synchronize(module, g)
        training, after, counts = AllReduceSGD(module, optimizer, g), [], []
        for _ in range(5):
            for _ in range(chance.randint(4, 13)):
                optimizer.zero_grad()
                module(torch.full((2, 7), chance.gauss(0, 1))).sum().backward()
                counts.append(training.step())
            training.join()
            after.append(bits(module))
        return after, counts

    found = raised(in_threads(size, body))
    assert all(after == found[0][0] for after, _ in found)
    assert len(set(found[0][0])) == 5
    assert {counts[0] for _, counts in found} == {size}
    assert min(min(counts) for _, counts in found) < size


@pytest.mark.parametrize("size", [2, 4, 8])
def test_all_reduce_ea(size: int) -> None:
    """Each member makes ever smaller steps on its own data. Every third step moves it towards the centre."""

    def body(g: Any) -> Any:
        chance, (module, _) = random.Random(g.rank), replica()
        average = ElasticAverage(module, g, every=3)
        apart = []
        for epoch in range(5):
            for step in range(chance.randint(45, 53)):
                with torch.no_grad():
                    for p in module.parameters():
                        p.add_(chance.gauss(0, 1) / 2 ** (epoch + step))
                average.step()
            average.join()
            walked = bits(module)
            average.to_centre()
            apart.append(walked != bits(module))
            check_equal(module, g)
        return apart

    assert raised(in_threads(size, body)) == [[True] * 5] * size
