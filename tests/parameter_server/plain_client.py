"""Imitate a parameter server in one process: a dictionary of tensors with a version, and clients."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor


class PlainServer:
    """Server that applies each push at once, in call order. ``log`` lists the calls of all clients."""

    def __init__(self, tensors: Mapping[str, Any], optimizer: Callable[[Any], Any] | None = None) -> None:
        self.tensors = {name: torch.as_tensor(value).detach().clone() for name, value in tensors.items()}
        self.version = 0
        self.log: list[tuple[Any, ...]] = []
        self.changed = threading.Condition()
        self.parameters = {name: torch.nn.Parameter(x) for name, x in self.tensors.items() if optimizer}
        self.optimizer = optimizer and optimizer(list(self.parameters.values()))

    def client(self) -> PlainClient:
        return PlainClient(self)


class PlainHandle:
    def __init__(self, version: int, dropped: bool = False) -> None:
        self.version, self.dropped, self.done = version, dropped, True

    def wait(self, timeout: float | None = None) -> int:
        return self.version


class PlainPull:
    """A prefetch, with the values from the moment when it began."""

    def __init__(self, client: PlainClient, values: dict[str, Tensor], version: int) -> None:
        self.client, self.values, self.version = client, values, version

    def wait(self, out: Any = None, timeout: float | None = None) -> dict[str, Tensor]:
        self.client.version = self.version
        self.client.server.log.append(("integrate",))
        return self.values


class PlainClient:
    def __init__(self, server: PlainServer) -> None:
        self.server, self.version = server, 0

    def push(
        self,
        values: Mapping[str, Tensor],
        rule: str = "add",
        scale: float = 1.0,
        at: int | None = None,
        max_staleness: int | None = None,
        timeout: float | None = None,
    ) -> PlainHandle:
        server = self.server
        with server.changed:
            if (
                max_staleness is not None
                and server.version - (self.version if at is None else at) > max_staleness
            ):
                return PlainHandle(server.version, dropped=True)
            server.log.append(("push", rule, *values))
            if rule == "gradient":
                for name, parameter in server.parameters.items():
                    parameter.grad = values[name].clone() if name in values else None
                server.optimizer.step()
            for name, given in values.items():
                if rule == "add":
                    server.tensors[name].add_(given, alpha=scale if scale != 1 else 1)
                elif rule == "copy":
                    server.tensors[name].copy_(given)
            server.version += 1
            server.changed.notify_all()
            return PlainHandle(server.version)

    def pull(
        self,
        out: Any = None,
        *,
        at_least: int | None = None,
        names: list[str] | None = None,
        consistent: bool = True,
        timeout: float | None = None,
    ) -> dict[str, Tensor]:
        server = self.server
        with server.changed:
            if not server.changed.wait_for(lambda: server.version >= (at_least or 0), timeout):
                raise TimeoutError(f"the server did not reach version {at_least} in time")
            server.log.append(("pull" if consistent else "inconsistent pull",))
            self.version = server.version
            chosen = server.tensors if names is None else names
            return {name: server.tensors[name].clone() for name in chosen}

    def prefetch(self, names: list[str] | None = None) -> PlainPull:
        with self.server.changed:
            self.server.log.append(("prefetch",))
            chosen = self.server.tensors if names is None else names
            values = {name: self.server.tensors[name].clone() for name in chosen}
            return PlainPull(self, values, self.server.version)
