"""Downpour SGD: replicas train independently, and push their updates to a parameter server."""

from __future__ import annotations

import math
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from flowchan.items.arguments import refuses_misspelt, whole
from flowchan.items.text import shown
from flowchan.pipelines.parameter_server.parameter_client import ParameterClient
from flowchan.pipelines.parameter_server.replica import Replica, ReplicaOptions, Values, prefetch_steps


class Downpour(Replica):
    """Train a replica by Downpour SGD.

    The replica updates its parameters by SGD in each step, and adds up its updates. Every ``push_every``
    steps, it adds this sum to the server's parameters. Every ``pull_every`` steps, it copies the server's
    parameters, and adds its own updates that the server does not have yet. So a pull neither loses nor
    repeats a step of the replica.

    Downpour replaces the optimizer: compute the gradients, and call :meth:`step`. The constructor copies the
    server's parameters into the model. Buffers of the model, such as running means, stay local.

    The algorithm is Downpour SGD by Dean et al., "Large Scale Distributed Deep Networks" (2012). The prefetch
    and the delayed start are those of TorchMPI.

    Args:
        client: Client of a server with the model's parameters: ``ParameterServer(model.state_dict())``.
        model: The model of this worker.
        lr: Learning rate, greater than 0.
        push_every: Number of steps between two pushes, at least 1 (default 1).
        pull_every: Number of steps between two uses of the server's parameters, at least 1 (default 10).
        prefetch: Number of steps before such a use at which the pull begins, less than ``pull_every``
            (default 0).
        start: Number of steps before the first interval begins (default 0). Updates of these steps are part
            of the first push.
        momentum: Nesterov momentum of the local updates, from 0 to less than 1 (default 0).
        **options: Keyword options:
            group (Group): Group whose members have equal replicas and average their gradients (default:
                None). Only its rank 0 uses ``client``.
            timeout (float): Maximum seconds for each wait for the server (default: no limit).

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
            raise ValueError(f"Downpour: momentum must be from 0 to less than 1, got {shown(momentum)}")
        self._lr, self._momentum = lr, momentum
        self._push_every = whole("Downpour", "push_every", push_every, 1)
        self._pull_every = whole("Downpour", "pull_every", pull_every, 1)
        self._lead = prefetch_steps("Downpour", prefetch, pull_every)
        super().__init__(client, model, options, start)
        self._velocity: dict[str, Tensor] = {}
        self._unsent: dict[str, Tensor] = {}  # sums of the updates since the last push
        self._since: list[tuple[Any, Values]] = []  # pushes since the prefetch began, with their updates

    def step(self) -> None:
        """Update the model with its gradients, and exchange updates with the server if due.

        Raises:
            TimeoutError: The server did not answer in time. The exchange is repeated when it is next due.

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
        """Push the remaining updates, wait until the server has applied them, and pull its parameters.

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
        if not self._unsent:  # never on other members than the leader
            return
        handle = self._send(self._unsent)
        if self._prefetch is not None:
            self._since.append((handle, self._unsent))
        self._unsent = {}

    def _merged(self) -> Values:
        """Return the server's parameters plus own updates that they do not contain."""
        fetched = dict(self._fetched())
        version = self._seen
        for handle, updates in self._since:  # empty without a prefetch
            if handle.wait(timeout=self._timeout) > version:
                _add(fetched, updates)
        self._since = []
        _add(fetched, self._unsent)
        return fetched


def _add(parameters: dict[str, Tensor], updates: Values) -> None:
    for name, update in updates.items():
        parameters[name] = parameters[name] + update.to(parameters[name].device)


Downpour.__module__ = "flowchan.pipelines"  # the module that users import
