"""``allreduce`` over items that have arrays and tensors in them; the rest of it needs no torch."""

from __future__ import annotations

import numpy as np
import pytest
from optional import optional

from flowchan import Graph

torch = optional("torch")

pytestmark = pytest.mark.usefixtures("one_compute_thread")


def test_every_operation_works_leaf_by_leaf_on_numbers_arrays_and_tensors() -> None:
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
