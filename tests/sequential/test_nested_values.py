"""Test that nested batches are split into micro-batches and joined again."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flowchan.pipelines.sequential.tensor_trees import (
    Micro,
    batch_size,
    evenly,
    join,
    leaves,
    mapped,
    split,
    tensors,
)

Pair = namedtuple("Pair", ["image", "mask"])


def rows(samples: int, *shape: int) -> Tensor:
    return torch.arange(samples * max(1, torch.Size(shape).numel()), dtype=torch.float32).reshape(
        samples, *shape
    )


def equal(one: Any, other: Any) -> bool:
    """Compare the structure, the types and the numbers of two values."""
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and torch.equal(one, other)
    if type(one) is not type(other) or len(one) != len(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(equal(one[key], other[key]) for key in one)
    return all(map(equal, one, other))


NESTED = {
    "tensor": rows(7, 3),
    "tuple": (rows(7, 2), rows(7)),
    "list": [rows(7, 2), rows(7)],
    "dict": {"x": rows(7, 2), "mask": rows(7)},
    "ordered": OrderedDict(x=rows(7, 2), y=rows(7)),
    "named": Pair(rows(7, 2), rows(7)),
    "nested": {"both": (rows(7), [rows(7, 4), Pair(rows(7), rows(7, 1, 2))]), "one": rows(7)},
    "empty within": (rows(7), (), {}),
}


@pytest.mark.parametrize("value", NESTED.values(), ids=NESTED)
@pytest.mark.parametrize("chunks", [1, 2, 3, 7, 20])
def test_join_inverts_split(value: Any, chunks: int) -> None:
    pieces = split(value, chunks)
    assert len(pieces) == min(chunks, 7)
    assert equal(join(pieces), value)


@given(samples=st.integers(1, 60), chunks=st.integers(1, 70))
@settings(max_examples=60, deadline=None)
def test_micro_batches_are_nearly_equal_and_never_empty(samples: int, chunks: int) -> None:
    sizes = [batch_size(piece) for piece in split(rows(samples, 2), chunks)]
    assert sum(sizes) == samples
    assert len(sizes) == min(samples, chunks)
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)
    assert sizes == [len(piece) for piece in rows(samples, 2).tensor_split(min(samples, chunks))]


def test_empty_batch_is_one_micro_batch() -> None:
    (piece,) = split(rows(0, 3), 8)
    assert piece.shape == (0, 3)


def test_split_does_not_copy() -> None:
    x = rows(6, 2)
    assert all(piece.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() for piece in split(x, 3))


@pytest.mark.parametrize(
    ("value", "kind", "words"),
    [
        ("text", TypeError, ["x must be a tensor", "'text' (str)", "keep other values in the module"]),
        ({"a": rows(3), "mask": 1.5}, TypeError, ["x['mask']", "1.5 (float)"]),
        ({"mask": None}, TypeError, ["at least one tensor"]),
        ((rows(3), [rows(3), 5]), TypeError, ["x[1][1]", "5 (int)"]),
        ((rows(3), torch.tensor(2.5)), ValueError, ["x[1]", "must have a batch dimension", "2.5"]),
        ((rows(3), {"y": rows(4)}), ValueError, ["x[1]['y'] must have the same batch size as x[0] (3)"]),
        ((), TypeError, ["x must contain at least one tensor", "() (tuple)"]),
        ({}, TypeError, ["at least one tensor"]),
    ],
)
def test_invalid_leaf_is_named_with_its_path(value: Any, kind: type[Exception], words: list[str]) -> None:
    with pytest.raises(kind) as raised:
        split(value, 2)
    assert all(word in str(raised.value) for word in words), raised.value


def test_leaves_yields_each_leaf_with_its_path() -> None:
    names = [name for name, _ in leaves({"a": [1, (2,)], "b": "c"})]
    assert names == ["x['a'][0]", "x['a'][1][0]", "x['b']"]


def test_mapped_changes_only_tensors() -> None:
    assert mapped(lambda tensor: tensor.shape, {"a": rows(2), "b": [3, None]}) == {"a": (2,), "b": [3, None]}
    assert len(tensors((rows(1), 5, [rows(2)]))) == 2


def test_repr_names_the_micro_batch() -> None:
    assert repr(Micro(5, 2, 8, rows(1), {}, ())) == "micro-batch 2 of 8 of batch 5"


def test_evenly_puts_larger_numbers_first() -> None:
    assert evenly(7, 3) == [3, 2, 2]
    assert evenly(4, 4) == [1, 1, 1, 1]
    assert evenly(6, 1) == [6]
    assert evenly(0, 1) == [0]
