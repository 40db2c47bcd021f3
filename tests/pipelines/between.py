"""Combinations of processes that share a pattern, and where the peers of a test run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support.peers import HostPeer, ProcessPeer

from flowchan.pipelines import map  # noqa: A004

between = pytest.mark.parametrize("across", ["processes", "hosts"])
everywhere = pytest.mark.parametrize(
    ("across", "on"),
    [("processes", "thread"), ("processes", "process"), ("hosts", "process"), ("hosts", "host")],
)
PEERS: dict[str, Any] = {"processes": ProcessPeer, "hosts": HostPeer}
"""A party as far away as may be, which can be killed."""


class _OnHosts:
    """Workers like those of ``map``, each in its own program."""

    def __init__(self, number: int, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self._args = args  # kept until the peers have received them
        self._peers = [HostPeer(function, *args, worker + 1) for worker in range(number)]

    def join(self) -> list[Any]:
        return [peer.result() for peer in self._peers]


def start(on: Any, number: int, function: Callable[..., Any], *args: Any) -> Any:
    """Call ``map``, also with ``on="host"``."""
    return _OnHosts(number, function, args) if on == "host" else map(number, function, *args, on=on)
