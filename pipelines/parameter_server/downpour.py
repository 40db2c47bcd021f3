"""Implement Downpour SGD: replicas train independently and push their updates to a parameter server."""

from __future__ import annotations

import math
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from flowchan.items.arguments import refuses_misspelt, whole
from flowchan.items.text import shown
from flowchan.pipelines.parameter_server.parameter_client import ParameterClient
from flowchan.pipelines.parameter_server.replica import Replica, ReplicaOptions, Values, prefetch_steps
from flowchan.public import public


@public
class Downpour(Replica):
    """Train a replica with Downpour SGD.

    In each step, the replica updates its parameters by SGD and accumulates the update. Every ``push_every``
    steps, the replica adds the accumulated updates to the server's parameters. Every ``pull_every`` steps, it
    copies the server's parameters, and then adds the local updates that are not yet on the server. A pull
    therefore neither loses nor repeats a local step.

    Downpour replaces the optimizer. In each training step, compute the gradients, and then call :meth:`step`.
    The constructor copies the server's parameters into the model. The model's buffers, such as running means,
    stay local.

    The algorithm is Downpour SGD by Dean et al., "Large Scale Distributed Deep Networks" (2012). Prefetching
    and the delayed start follow TorchMPI.

    Args:
        client: Client of a server that holds the model's parameters, such as
            ``ParameterServer(model.state_dict())``.
        model: Model that this worker trains.
        lr: Learning rate, greater than 0.
        push_every: Number of steps between pushes, at least 1 (default 1).
        pull_every: Number of steps after which the replica adopts the server's parameters, at least 1
            (default 10).
        prefetch: Number of steps between the start of a pull and the use of its result, less than
            ``pull_every`` (default 0).
        start: Number of steps before the first exchange interval begins (default 0). The first push includes
            the updates from these steps.
        momentum: Nesterov momentum of the local updates, at least 0 and less than 1 (default 0).
        **options: Options that all algorithms accept:
            group (Group): Group whose members have identical replicas and average their gradients (default:
                None). Only rank 0 of the group uses ``client``.
            timeout (float): Maximum seconds to wait for each server operation (default: no limit).

    Raises:
        ValueError: An argument is out of range, or the model has no parameters that require gradients.
        TypeError: An argument has the wrong type.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from flowchan.pipelines import Downpour, ParameterServer
        >>> model = nn.Linear(2, 1)
        >>> with ParameterServer(model.state_dict(), on="thread") as server:
        ...     training = Downpour(server.client(), model, lr=0.1, push_every=2)
        ...     for batch in [torch.ones(4, 2), torch.zeros(4, 2)]:
        ...         model.zero_grad()
        ...         model(batch).square().mean().backward()
        ...         training.step()
        ...     training.finish()
        ...     server.stats().pushes
        1
    """

    @refuses_misspelt("Downpour", ReplicaOptions.__annotations__)
    def __init__(
        self,
        client: ParameterClient,
        model: nn.Module,
        *,
        lr: float,
        push_every: int = 1,
        pull_every: int = 10,
        prefetch: int = 0,
        start: int = 0,
        momentum: float = 0.0,
        **options: Unpack[ReplicaOptions],
    ) -> None:
        if not 0 < lr < math.inf:
            raise ValueError(f"Downpour: lr must be greater than 0 and finite, got {shown(lr)}")
        if not 0 <= momentum < 1:
            raise ValueError(f"Downpour: momentum must be at least 0 and less than 1, got {shown(momentum)}")
        self._lr, self._momentum = lr, momentum
        self._push_every = whole("Downpour", "push_every", push_every, 1)
        self._pull_every = whole("Downpour", "pull_every", pull_every, 1)
        self._lead = prefetch_steps("Downpour", prefetch, pull_every)
        super().__init__(client, model, options, start)
        self._velocity: dict[str, Tensor] = {}
        self._unsent: dict[str, Tensor] = {}  # updates accumulated since the last push
        self._since: list[tuple[Any, Values]] = []  # each push since the prefetch started, with its updates

    def step(self) -> None:
        """Apply the gradients to the model, and exchange updates with the server if an exchange is due.

        Raises:
            TimeoutError: The server did not answer in time. The replica retries at the next exchange.

        Example:
            >>> import torch
            >>> from torch import nn
            >>> from flowchan.pipelines import Downpour, ParameterServer
            >>> model = nn.Linear(1, 1, bias=False)
            >>> with ParameterServer({"weight": torch.zeros(1, 1)}, on="thread") as server:
            ...     training = Downpour(server.client(), model, lr=0.5)
            ...     model(torch.ones(1, 1)).sum().backward()
            ...     training.step()
            >>> model.weight.item()
            -0.5
        """
        self._update()
        self._steps += 1
        if self._due(self._push_every):
            self._send_updates()
        if self._due(self._pull_every):
            self._adopt(self._merged)
        if self._lead and self._leads and self._due(self._pull_every, self._lead):
            self._since = []
            self._begin_prefetch()

    def finish(self) -> None:
        """Push the remaining updates, wait until the server has applied them, and pull the parameters.

        Training can continue after this call.

        Raises:
            TimeoutError: The server did not answer in time.

        Example:
            >>> import torch
            >>> from torch import nn
            >>> from flowchan.pipelines import Downpour, ParameterServer
            >>> model = nn.Linear(1, 1, bias=False)
            >>> with ParameterServer({"weight": torch.zeros(1, 1)}, on="thread") as server:
            ...     training = Downpour(server.client(), model, lr=0.5, push_every=10)
            ...     model(torch.ones(1, 1)).sum().backward()
            ...     training.step()
            ...     training.finish()
            ...     server.client().pull()["weight"].item()
            -0.5
        """
        self._send_updates()
        self._adopt(self._pull)
        self._since = []

    @torch.no_grad()
    def _update(self) -> None:
        for name, parameter in self._parameters.items():
            if (gradient := parameter.grad) is None:
                continue
            if self._momentum:
                velocity = self._velocity.get(name)
                velocity = gradient.clone() if velocity is None else velocity * self._momentum + gradient
                self._velocity[name] = velocity
                gradient = gradient + velocity * self._momentum
            update = gradient * -self._lr
            parameter.add_(update)
            if self._leads:
                unsent = self._unsent.get(name)
                self._unsent[name] = update if unsent is None else unsent.add_(update)

    def _send_updates(self) -> None:
        if not self._unsent:  # always empty on members other than the leader
            return
        handle = self._send(self._unsent)
        if self._prefetch is not None:
            self._since.append((handle, self._unsent))
        self._unsent = {}

    def _merged(self) -> Values:
        """Return the server's parameters plus the local updates that the server has not applied yet."""
        fetched = dict(self._fetched())
        version = self._seen
        for handle, updates in self._since:  # empty if no prefetch has started
            if handle.wait(timeout=self._timeout) > version:
                _add(fetched, updates)
        self._since = []
        _add(fetched, self._unsent)
        return fetched


def _add(parameters: dict[str, Tensor], updates: Values) -> None:
    for name, update in updates.items():
        parameters[name] = parameters[name] + update.to(parameters[name].device)
