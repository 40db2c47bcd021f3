"""Choose a few combinations of a test's parameters. ``--long`` runs all of them.

A test with the marker ``any_value`` keeps one combination. A test with the marker ``each_pair`` keeps enough
combinations to cover each pair of values of any two parameters. A test with the marker ``each_value``, or
with several parameters and more than ``MOST`` combinations, keeps enough combinations to cover each value of
each parameter. A test that runs under every start method of processes keeps either ``forkserver`` or
``spawn``, because each takes seconds. Parameters can have the marker ``alternative(value)``. One of these
values is drawn for each test, and combinations with another value are skipped. The choice depends only on the
names of the test and its parameters, so all processes of a run make the same choice.
"""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from collections.abc import Iterable

import pytest

MARKERS = {"any_value": 0, "each_value": 1, "each_pair": 2}
"""Number of parameters to combine, by marker."""
ALTERNATIVE = "alternative"
COSTLY = ("forkserver", "spawn")
MOST = 3
"""Unmarked tests with several parameters run all their combinations if there are at most this many."""


def left_out(items: Iterable[pytest.Item]) -> set[pytest.Item]:
    """Return the combinations that do not run without ``--long``."""
    tests: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if hasattr(item, "callspec"):
            tests[item.nodeid.partition("[")[0]].append(item)
    unneeded = set()
    for name, combinations in tests.items():
        replaced = replaced_by_an_alternative(name, combinations)
        unneeded.update(replaced, not_needed(name, [item for item in combinations if item not in replaced]))
    return unneeded


def replaced_by_an_alternative(name: str, combinations: list[pytest.Item]) -> list[pytest.Item]:
    marked = [(item, mark.args[0]) for item in combinations if (mark := item.get_closest_marker(ALTERNATIVE))]
    kept = random.Random(name).choice(sorted({value for _, value in marked})) if marked else None
    return [item for item, value in marked if value != kept]


def not_needed(name: str, combinations: list[pytest.Item]) -> list[pytest.Item]:
    for marker, together in MARKERS.items():
        if combinations[0].get_closest_marker(marker):
            return beyond(random.Random(name).sample(combinations, len(combinations)), together)
    if len(combinations) > MOST and len(combinations[0].callspec.params) > 1:  # type: ignore[attr-defined]
        drawn = random.Random(name).sample(combinations, len(combinations))
        remaining = beyond(list(drawn), 1)
        kept = len(combinations) - len(remaining)
        return remaining[max(0, MOST - kept) :]
    by_method = {method: [one for one in combinations if method in texts(one)] for method in COSTLY}
    remaining = by_method[random.Random(name).choice(COSTLY)] if all(by_method.values()) else []
    lost = all_values(remaining) - all_values(one for one in combinations if one not in remaining)
    return (
        remaining if len(lost) == 1 else []
    )  # drop the start method only if no other parameter needs its combinations


def beyond(combinations: list[pytest.Item], together: int) -> list[pytest.Item]:
    """Choose combinations until each value or pair is covered, and return the combinations that were not
    chosen.

    Each choice is the combination that covers the largest number of new values or pairs.
    """
    missing = all_values(combinations, together)
    while missing:
        best = max(combinations, key=lambda item: len(missing & values(item, together)))
        combinations.remove(best)
        missing -= values(best, together)
    return combinations


def all_values(items: Iterable[pytest.Item], together: int = 1) -> set[frozenset[tuple[str, int]]]:
    return set().union(*(values(item, together) for item in items))


def values(item: pytest.Item, together: int) -> set[frozenset[tuple[str, int]]]:
    """Return the values of all parameters and fixtures, by identity, or all groups of ``together`` values."""
    given = [(name, id(value)) for name, value in item.callspec.params.items()]  # type: ignore[attr-defined]
    return {frozenset(some) for some in itertools.combinations(given, together)}


def texts(item: pytest.Item) -> list[str]:
    return [value for value in item.callspec.params.values() if isinstance(value, str)]  # type: ignore[attr-defined]
