"""Test ``allreduce`` with arrays and tensors as items. These tests need torch; test_allreduce.py does not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.optional_packages import optional

from flowchan import Graph, RunError

torch = optional("torch")

pytestmark = pytest.mark.usefixtures("one_compute_thread")


def test_operations_combine_numbers_arrays_and_tensors_leaf_by_leaf() -> None:
    values = {"sum": 9, "mean": 4.5, "prod": 18, "min": 3, "max": 6, "and": 2, "or": 7, "xor": 5}
    for op, expected in values.items():
        graph = Graph(op)
        streams = [
            graph.source([{"n": n, "a": [np.array([n, n])], "t": (torch.tensor([n]),)}], name=f"s{n}")
            for n in (3, 6)
        ]
        result = graph.merge(*streams).allreduce(op).collect()
        ((value, contributors, _),) = graph.run()[result]
        assert contributors == 2
        assert value["n"] == expected
        assert value["a"][0].tolist() == [expected] * 2
        assert value["t"][0].tolist() == [expected]


@pytest.mark.parametrize("op", ["sum", "max"])
@pytest.mark.parametrize(
    "other", [np.ones(3), np.ones(1), torch and torch.ones(3)], ids=["row", "one", "tensor"]
)
def test_arrays_of_different_shapes_are_not_broadcast(op: Any, other: Any) -> None:
    graph = Graph("shapes")
    column = np.ones((3, 1)) if isinstance(other, np.ndarray) else torch.ones(3, 1)
    streams = [graph.source([{"w": x}], name=name) for name, x in (("a", column), ("b", other))]
    graph.merge(*streams).allreduce(op).collect()
    with pytest.raises(RunError) as info:
        graph.run()
    (failed,) = info.value.exceptions
    message = f"arrays must have the same shape, got (3, 1) and {tuple(other.shape)}"
    assert message in str(failed)


def test_number_is_added_to_each_element() -> None:
    graph = Graph("number")
    total = (
        graph.merge(graph.source([np.ones(3)]), graph.source([0], name="other")).allreduce("sum").collect()
    )
    assert graph.run()[total][0].value.tolist() == [1, 1, 1]
