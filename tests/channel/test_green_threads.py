"""Programs with green threads (gevent, eventlet) get an error, because a put in them might block forever."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from flowchan import Channel, Graph

PATCHERS = [("gevent.monkey", "is_module_patched"), ("eventlet.patcher", "is_monkey_patched")]


def patch(monkeypatch: pytest.MonkeyPatch, module: str, function: str, patched: tuple[str, ...]) -> None:
    """Pretend that the library has patched the modules in ``patched``."""
    stand_in: Any = SimpleNamespace(**{function: lambda name: name in patched})
    monkeypatch.setitem(sys.modules, module, stand_in)


@pytest.mark.parametrize(("module", "function"), PATCHERS)
def test_threads_channel_raises_with_green_threads(
    module: str, function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    patch(monkeypatch, module, function, ("thread", "threading"))
    with pytest.raises(RuntimeError, match=r"must not be patched by \w+, .*; call .*thread=False"):
        Channel()
    Channel[int](across="processes").close()


@pytest.mark.parametrize(("module", "function"), PATCHERS)
def test_threads_channel_is_allowed_if_threads_are_not_patched(
    module: str, function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    patch(monkeypatch, module, function, ("socket",))
    assert Channel[int]().stats().inside == 0


def test_run_raises_with_green_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = Graph("green")
    graph.source([1]).sink(abs)
    patch(monkeypatch, *PATCHERS[0], ("thread", "threading"))
    with pytest.raises(RuntimeError, match="must not be patched by gevent"):
        graph.run()
