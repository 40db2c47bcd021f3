"""Run these tests with one compute thread, as on a machine with a core for each part.

The results of the parts and of the plain module are then equal bit for bit.
"""

from __future__ import annotations

from typing import Any

import pytest

from flowchan.pipelines.sequential import balance


def pytest_itemcollected(item: pytest.Item) -> None:
    """Ignore the warning that a pipe will not be faster, because the modules are small.

    ``pytest.warns`` still sees it.
    """
    item.add_marker(pytest.mark.filterwarnings("ignore:Sequential. with .* parts:RuntimeWarning"))


@pytest.fixture(autouse=True, scope="module")
def _one_compute_thread(one_compute_thread: None) -> None:
    """Apply ``one_compute_thread`` to every test of this folder."""


@pytest.fixture(autouse=True)
def _equal_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give all layers the same cost.

    A pipe measures its layers for half a second with its first batch. Here each layer runs once, so that
    tests are quick and the cut is fixed. The tests of measurements override this fixture.
    """

    def seconds(layers: list[Any], training: bool) -> list[float]:
        for layer in layers:
            balance._once(*layer, training)
        return [1.0] * len(layers)

    monkeypatch.setattr(balance, "_seconds", seconds)
