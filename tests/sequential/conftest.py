"""Run these tests with one compute thread, as on a machine with one core for each part.

The results of a pipe are then bit-identical to the plain module's.
"""

from __future__ import annotations

from typing import Any

import pytest

from flowchan.pipelines.sequential import balance


def pytest_itemcollected(item: pytest.Item) -> None:
    """Ignore the warning that a pipe will not be faster, because the modules here are small.

    ``pytest.warns`` still sees the warning.
    """
    item.add_marker(pytest.mark.filterwarnings("ignore:Sequential. with .* parts:RuntimeWarning"))


@pytest.fixture(autouse=True, scope="module")
def _one_compute_thread(one_compute_thread: None) -> None:
    """Apply ``one_compute_thread`` to every test in this folder."""


@pytest.fixture(autouse=True)
def _equal_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give all layers the same cost.

    For its first batch, a pipe measures its layers for half a second. This fixture makes each layer run only
    once, so tests are fast and the cut is predictable. Tests of this measurement override the fixture.
    """

    def seconds(layers: list[Any], training: bool) -> list[float]:
        for layer in layers:
            balance._once(*layer, training)
        return [1.0] * len(layers)

    monkeypatch.setattr(balance, "_seconds", seconds)
