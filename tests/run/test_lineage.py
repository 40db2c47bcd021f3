"""Test R14: source items count as finished when all items that come from them have left the graph."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest

from flowchan.run.policy.lineage import FinishedItems, Left, Lineage, Mark, Marks


def reports_of(lineage: Lineage, reports: list[Left]) -> list[int]:
    """Return the numbers that a lineage has reported as finished, in this order."""
    return [number for marks, parts in reports for number in lineage.finished(marks, parts)]


def test_r14_item_is_finished_when_its_only_descendant_leaves() -> None:
    assert reports_of(Lineage(), [((4,), 0)]) == [4]


@pytest.mark.parametrize("order", [*itertools.permutations([((4,), 2), (((4, 0),), 0), (((4, 1),), 0)])])
def test_r14_split_item_is_finished_after_all_its_parts(order: tuple[Left, ...]) -> None:
    lineage = Lineage()
    assert reports_of(lineage, [*order[:-1]]) == []
    assert reports_of(lineage, [order[-1]]) == [4]


def test_r14_joined_items_are_finished_together() -> None:
    lineage = Lineage()
    reports: list[Left] = [((1, 2), 2), (((1, 0),), 0)]
    assert reports_of(lineage, reports) == []
    assert sorted(reports_of(lineage, [(((1, 1),), 0)])) == [1, 2]


def test_r14_items_without_marks_finish_nothing() -> None:
    assert reports_of(Lineage(), [((), 0), ((), 3)]) == []


def history(chosen: random.Random, items: int) -> Iterator[tuple[Left, frozenset[int]]]:
    """Yield the reports of a random run, each with the source items that it concerns."""
    inside: list[Marks] = [(number,) for number in range(items)]
    origins: dict[Mark, frozenset[int]] = {number: frozenset([number]) for number in range(items)}
    while inside:
        marks = inside.pop(chosen.randrange(len(inside)))
        if inside and chosen.random() < 0.2:  # a batch
            inside.append(marks + inside.pop(chosen.randrange(len(inside))))
            continue
        parts = chosen.choice([0, 0, 0, 1, 2, 3])
        sources = frozenset[int]().union(*(origins[mark] for mark in marks))
        for place in range(parts):
            origins[marks[0], place] = sources
            inside.append(((marks[0], place),))
        yield (marks, parts), sources


@pytest.mark.parametrize("seed", range(100))
@pytest.mark.parametrize("in_order", [True, False])
def test_r14_item_is_finished_exactly_with_its_last_report(seed: int, in_order: bool) -> None:
    chosen = random.Random(seed)
    sources = dict(history(chosen, 12))
    needed = {number: {report for report in sources if number in sources[report]} for number in range(12)}
    sent = list(sources)
    if not in_order:
        sent += chosen.choices(sent, k=5)  # a replacement repeats the reports of the worker that died
        chosen.shuffle(sent)
    lineage, finished, seen = Lineage(), set[int](), set[Left]()
    for report in sent:
        finished.update(lineage.finished(*report))
        seen.add(report)
        assert finished == {number for number in needed if needed[number] <= seen}
    assert not in_order or not lineage._parts


def bits(*numbers: int) -> bytes:
    found = bytearray(max(numbers, default=-1) // 8 + 1)
    for number in numbers:
        found[number // 8] |= 1 << number % 8
    return bytes(found)


@pytest.mark.parametrize("numbers", [(), (0,), (0, 1, 2), (1, 7, 8), (9,), (4, 5, 6, 7, 8, 9)])
@pytest.mark.parametrize("length", [0, 1, 9, 10, 30])
def test_r14_source_yields_only_unfinished_items(numbers: tuple[int, ...], length: int) -> None:
    items = FinishedItems(bits=bits(*numbers)).tracked("abcdefghijklmnopqrstuvwxyz1234"[:length])
    expected = [(number,) for number in range(length) if number not in numbers]
    assert [marks for marks, _ in items] == expected


def test_r14_sources_have_numbers_of_their_own() -> None:
    done = bits(0, 1, 3, 4)
    items = [list(FinishedItems(index, 2, done).tracked("abcd")) for index in range(2)]
    assert items == [[((2,), "b"), ((6,), "d")], [((5,), "c"), ((7,), "d")]]
    assert [FinishedItems(index, 2, done).length() for index in range(2)] == [3, 2]


@pytest.mark.parametrize("seed", range(40))
def test_r14_random_finished_items_are_skipped_and_counted(seed: int) -> None:
    chosen = random.Random(seed)
    sources = chosen.randint(1, 3)
    source, done = chosen.randrange(sources), chosen.randbytes(chosen.randrange(5))
    numbers = range(source, 60, sources)
    finished = [
        number for number in numbers if number < 8 * len(done) and done[number // 8] >> number % 8 & 1
    ]
    items = FinishedItems(source, sources, done)
    unfinished = [((number,), number) for number in numbers if number not in finished]
    assert list(items.tracked(numbers)) == unfinished
    assert items.length() == (numbers.index(finished[-1]) + 1 if finished else 0)


def test_r14_source_is_not_read_ahead() -> None:
    read: list[int] = []

    def numbers() -> Iterator[Any]:
        for number in range(5):
            read.append(number)
            yield number

    items = FinishedItems(bits=bits(0, 2)).tracked(numbers())
    assert next(items) == ((1,), 1)
    assert read == [0, 1]
