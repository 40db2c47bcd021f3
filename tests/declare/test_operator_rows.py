"""Test the table of operators: the label, count and properties of each operator."""

from __future__ import annotations

import math
from typing import Any

import pytest

from flowchan.declare.operators import OPERATORS, Operator


def names_with(flag: str) -> set[str]:
    return {name for name, operator in OPERATORS.items() if getattr(operator, flag)}


@pytest.mark.parametrize(
    ("flag", "names"),
    [
        ("begins", {"source", "input"}),
        ("ends", {"sink"}),
        ("outside", {"input"}),
        ("iterates", {"source", "flat_map"}),
        ("per_item", {"map", "flat_map", "filter", "partition", "sink"}),
        ("one_output", {"map", "record"}),
        ("worker_per_input", {"merge"}),
        ("ends_loops", {"stage"}),
        ("result", {"reduce", "collect"}),
        ("gathers", {"collect"}),
        ("groups", {"batch"}),
        ("holds_back", {"reduce", "collect", "batch"}),
        ("routes", {"route"}),
        ("repeats", {"tee"}),
        ("owes", {"map", "partition", "route", "sink", "merge", "record"}),
        (
            "resumable",
            {
                "source", "map", "flat_map", "filter", "partition", "sink", "collect", "batch", "unbatch",
                "tee", "merge", "record",
            },
        ),
        (
            "answers",
            {
                "input", "map", "filter", "partition", "route", "sink", "collect", "batch", "unbatch", "take",
                "tee", "merge", "record",
            },
        ),
        ("async_body", {"source", "map", "flat_map", "filter", "sink", "stage"}),
    ],
)  # fmt: skip
def test_only_these_operators_have_the_property(flag: str, names: set[str]) -> None:
    assert names_with(flag) == names


def test_only_a_general_stage_loses_the_order_of_its_input() -> None:
    assert set(OPERATORS) - names_with("ordered") == {"stage"}


@pytest.mark.parametrize("operator", OPERATORS.values(), ids=str)
def test_body_of_each_operator_can_be_imported(operator: Operator) -> None:
    assert operator.outside or callable(operator.run())
    assert not operator.async_body or callable(operator.run_async())


def expected(name: str, into: list[int], **options: Any) -> int | None:
    expects = OPERATORS[name].expects
    assert expects is not None
    return expects(options, into)


class Shy:
    def __len__(self) -> int:
        raise RuntimeError("not yet")


@pytest.mark.parametrize(("iterable", "length"), [(range(7), 7), ([], 0), (iter([1]), None), (Shy(), None)])
def test_length_of_a_source_is_that_of_its_iterable(iterable: Any, length: int | None) -> None:
    assert expected("source", [], iterable=iterable) == length


@pytest.mark.parametrize(("items", "batches"), [(0, 0), (1, 1), (3, 1), (4, 2), (6, 2), (7, 3)])
def test_number_of_batches_counts_the_last_short_one(items: int, batches: int) -> None:
    assert expected("batch", [items], size=3, timeout=None) == batches


def test_number_of_batches_is_unknown_with_a_timeout() -> None:
    assert expected("batch", [7], size=3, timeout=0.5) is None


@pytest.mark.parametrize(
    ("name", "count"), [("map", 9), ("route", 9), ("merge", 9), ("record", 9), ("tee", 9), ("zip", 2)]
)
def test_expected_items_are_all_inputs_or_the_shortest(name: str, count: int) -> None:
    assert expected(name, [2, 3, 4]) == count


@pytest.mark.parametrize(("n", "count"), [(0, 0), (4, 4), (5, 5), (6, 5)])
def test_take_ends_after_n_items_or_with_its_input(n: int, count: int) -> None:
    assert expected("take", [5], n=n) == count


@pytest.mark.parametrize("name", ["flat_map", "filter", "partition", "reduce", "collect", "window", "stage"])
def test_number_of_outputs_of_other_operators_is_unknown(name: str) -> None:
    assert OPERATORS[name].expects is None


@pytest.mark.parametrize(
    ("name", "options", "label"),
    [
        ("batch", {"size": 1200, "timeout": None}, "1,200 items"),
        ("batch", {"size": 3, "timeout": 0.25}, "3 items or 0.25 s"),
        ("batch", {"size": 3, "timeout": 0}, "3 items or 0 s"),
        ("take", {"n": 1200}, "1,200 items"),
        ("join", {"within": 1.5}, "within 1.5 s"),
        ("window", {"size": 5, "seconds": None, "every": 5}, "5 items"),
        ("window", {"size": 1200, "seconds": None, "every": 2}, "1,200 items, every 2"),
        ("window", {"size": None, "seconds": 0.5, "every": 0.5}, "0.5 s"),
        ("window", {"size": None, "seconds": 60.0, "every": 5.0}, "60 s, every 5"),
        ("window", {"size": math.inf, "seconds": None, "every": math.inf}, ""),
    ],
)
def test_label_in_pictures_shows_the_options(name: str, options: dict[str, Any], label: str) -> None:
    describe = OPERATORS[name].describe
    assert describe is not None
    assert describe(options) == label
