"""Compare pushes of rows with plain torch and NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shard_blocks import Blocks, bits
from torch import nn, optim

from flowchan.pipelines.parameter_server.rows import RowOptimizer, checked_ids, read_rows, summed
from flowchan.pipelines.parameter_server.tensor_kinds import as_kind

pytestmark = pytest.mark.usefixtures("one_compute_thread")

ROWS, WIDTH = 50, 3
OPTIMIZERS = {
    "sgd": (RowOptimizer.sgd(lr=0.1), lambda params: optim.SGD(params, lr=0.1)),
    "adagrad": (RowOptimizer.adagrad(lr=0.1), lambda params: optim.Adagrad(params, lr=0.1)),
    "adam": (RowOptimizer.adam(lr=0.1), lambda params: optim.SparseAdam(params, lr=0.1)),
}


def table(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(ROWS, WIDTH, dtype=dtype)


def some_rows(step: int, dtype: torch.dtype = torch.float32) -> tuple[np.ndarray[Any, Any], torch.Tensor]:
    """Return ids, some of which are duplicates, and one gradient per id."""
    torch.manual_seed(step)
    ids = torch.randint(0, ROWS, (20,))
    return ids.numpy(), torch.randn(20, WIDTH, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("replaced", [False, True], ids=["one server", "replaced servers"])
def test_row_optimizers_match_torch_on_sparse_gradients_bit_for_bit(
    name: str, dtype: torch.dtype, replaced: bool
) -> None:
    ours, theirs = OPTIMIZERS[name]
    blocks = Blocks({"users": table(dtype)}, rows={"users": ours})
    plain = nn.Parameter(table(dtype))
    optimizer = theirs([plain])
    for step in range(6):
        ids, values = some_rows(step, dtype)
        blocks.push_rows("gradient", "users", *summed(ids, values))
        sparse = torch.sparse_coo_tensor(torch.from_numpy(ids)[None], values, (ROWS, WIDTH))
        plain.grad = sparse.coalesce()
        optimizer.step()
        if replaced:
            blocks.replace_server(torn=True)
    assert bits(blocks.current["users"]) == bits(plain)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_row_push_changes_only_its_rows_and_their_state(name: str) -> None:
    """The issue torchrec#481 asks for rows by id on a server that also stores their optimizer state."""
    blocks = Blocks({"users": table()}, rows={"users": OPTIMIZERS[name][0]})
    before = {key: np.array(as_kind(value, np)) for key, value in blocks.current.items()}
    ids = np.array([3, 7])
    blocks.push_rows("gradient", "users", ids, torch.ones(2, WIDTH))
    per_row = [key for key, value in before.items() if value.shape[:1] == (ROWS,)]
    assert len(per_row) == {"sgd": 1, "adagrad": 2, "adam": 3}[name]
    for key in per_row:
        changed = np.flatnonzero((as_kind(blocks.current[key], np) != before[key]).any(axis=1))
        assert changed.tolist() == [3, 7]


def test_next_push_copies_only_changed_rows_to_the_other_block() -> None:
    """The cost of a push does not depend on the table's number of rows."""
    blocks = Blocks({"users": table()}, rows={"users": RowOptimizer.adagrad()})
    for step in range(3):
        blocks.push_rows("gradient", "users", *summed(*some_rows(step)))
        assert all(ids is None or len(ids) <= 20 for ids in blocks.stale.values())
        assert blocks.stale["users"] is not None
        assert blocks.stale["rows/users/sum"] is not None


@pytest.mark.parametrize("kind", ["tensor", "array"])
def test_values_of_duplicate_ids_are_summed_before_the_rule(kind: str) -> None:
    rows, values = table(torch.float64), torch.arange(12.0, dtype=torch.float64).reshape(4, 3)
    ids = np.array([5, 1, 5, 0])
    expected = rows.clone()
    expected.index_add_(0, torch.from_numpy(ids), values, alpha=0.5)
    unique, total = summed(ids, values if kind == "tensor" else values.numpy())
    assert unique.tolist() == [0, 1, 5]
    blocks = Blocks({"t": rows if kind == "tensor" else rows.numpy()})
    blocks.push_rows("add", "t", unique, total, 0.5)
    assert bits(blocks.current["t"]) == bits(expected)


def test_row_push_accepts_every_rule() -> None:
    blocks = Blocks({"t": table()})
    ids, values = np.array([1, 4]), torch.ones(2, WIDTH)
    blocks.push_rows("copy", "t", ids, values)
    assert torch.equal(read_rows(blocks.current["t"], ids), values)
    blocks.push_rows("zero", "t", ids[:1], None)
    blocks.push_rows(torch.maximum, "t", ids, values * 0.5)
    assert read_rows(blocks.current["t"], ids)[:, 0].tolist() == [0.5, 1.0]
    expected = table()
    expected[1], expected[4] = 0.5, 1.0
    assert torch.equal(blocks.current["t"], expected)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.booleans(),
            st.lists(st.integers(0, 9), min_size=1, max_size=6),
            st.sampled_from(["add", "copy", "zero"]),
        ),
        max_size=12,
    )
)
def test_mixed_row_and_tensor_pushes_match_a_plain_array(pushes: list[Any]) -> None:
    blocks, plain = Blocks({"t": np.zeros((10, 2)), "u": np.zeros(3)}), np.zeros((10, 2))
    for number, (whole, ids, rule) in enumerate(pushes, 1):
        if whole:
            blocks.push(rule, {"t": np.full((10, 2), float(number))})
            plain[...] = {"add": plain + number, "copy": number, "zero": 0}[rule]
        else:
            unique, total = summed(np.array(ids), np.full((len(ids), 2), float(number)))
            blocks.push_rows(rule, "t", unique, total)
            plain[unique] = {"add": plain[unique] + total, "copy": total, "zero": 0}[rule]
        assert (blocks.current["t"] == plain).all()


def test_empty_row_push_changes_nothing() -> None:
    blocks = Blocks({"t": table()}, rows={"t": RowOptimizer.adagrad()})
    ids = checked_ids("push_rows", "t", [], ROWS)
    blocks.push_rows("gradient", "t", *summed(ids, torch.zeros(0, WIDTH)))
    blocks.push_rows("add", "t", *summed(ids, torch.zeros(0, WIDTH)))
    assert torch.equal(blocks.current["t"], table())


@pytest.mark.parametrize(
    ("ids", "error", "message"),
    [
        ([0, 50], IndexError, "ids must be between 0 and 49 for 't', got 50"),
        ([-1], IndexError, "ids must be between 0 and 49 for 't', got -1"),
        ([0.5], TypeError, "ids must be integers, got float64"),
        ([[1, 2]], ValueError, "ids must have one dimension, got 2"),
    ],
)
def test_client_rejects_invalid_ids(ids: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"push_rows: {message}"):
        checked_ids("push_rows", "t", ids, ROWS)


@pytest.mark.parametrize("ids", [[2, 1], (2, 1), np.array([2, 1], np.uint8), torch.tensor([2, 1])])
def test_client_accepts_ids_in_sequences_arrays_and_tensors(ids: Any) -> None:
    assert checked_ids("push_rows", "t", ids, ROWS).tolist() == [2, 1]


def test_invalid_row_optimizers_are_rejected() -> None:
    with pytest.raises(TypeError, match=r"rows\['t'\] must be a RowOptimizer, got 'adam'"):
        Blocks({"t": table()}, rows={"t": "adam"})
    with pytest.raises(ValueError, match=r"rows\['t'\] must name a tensor with rows, got shape \(\)"):
        Blocks({"t": torch.zeros(())}, rows={"t": RowOptimizer.adam()})
