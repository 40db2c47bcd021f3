"""The combinations of processes that share a pattern, and the peers with which tests run them."""

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
"""Kinds of peers that run in other processes or on other hosts, and that can be killed."""


class _OnHosts:
    """Workers like those of ``map``, but each in a separate program."""

    def __init__(self, number: int, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self._args = args  # kept alive until the peers have received them
        self._peers = [HostPeer(function, *args, worker + 1) for worker in range(number)]

    def join(self) -> list[Any]:
        return [peer.result() for peer in self._peers]


def start(on: Any, number: int, function: Callable[..., Any], *args: Any) -> Any:
    """Call ``map``, but also allow ``on="host"``."""
    return _OnHosts(number, function, args) if on == "host" else map(number, function, *args, on=on)
