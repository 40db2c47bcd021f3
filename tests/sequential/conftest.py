"""One compute thread, as on a machine where every part has a core: then the results of parts and of the plain
module can be compared bit for bit."""

from __future__ import annotations

from typing import Any

import pytest

from flowchan.pipelines.sequential import balance


def pytest_itemcollected(item: pytest.Item) -> None:
    """The modules here are small: that a pipe won't be quicker is no news (``pytest.warns`` hears it)."""
    item.add_marker(pytest.mark.filterwarnings("ignore:Sequential. in .* parts:RuntimeWarning"))


@pytest.fixture(autouse=True, scope="module")
def _one_compute_thread(one_compute_thread: None) -> None:
    """For every test here."""


@pytest.fixture(autouse=True)
def _equal_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipe measures its layers with its first batch, for half a second in all. Here each layer runs once
    and all cost the same: that is quick, and the cut is certain. The tests of measuring do without this."""

    def seconds(layers: list[Any], training: bool) -> list[float]:
        for layer in layers:
            balance._once(*layer, training)
        return [1.0] * len(layers)

    monkeypatch.setattr(balance, "_seconds", seconds)
