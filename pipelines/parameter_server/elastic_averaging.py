"""Implement asynchronous elastic averaging SGD: the parameters of replicas and server attract each other."""

from __future__ import annotations

from typing import Unpack

from torch import nn

from flowchan.items.arguments import refuses_misspelt, whole
from flowchan.items.text import shown
from flowchan.pipelines.parameter_server.parameter_client import ParameterClient
from flowchan.pipelines.parameter_server.replica import Replica, ReplicaOptions, Values, prefetch_steps
from flowchan.public import public


@public
class ElasticAveraging(Replica):
    """Train a replica with asynchronous elastic averaging SGD.

    The server holds the *centre*, the shared parameters. Every ``every`` steps, the replica multiplies its
    difference from the centre by ``alpha``. The replica subtracts the result from its parameters, and the
    server adds the result to the centre. Replicas never wait for each other.

    Train the model with any optimizer, and call :meth:`step` after each optimizer step. The constructor
    copies the centre into the model. The model's buffers, such as running means, stay local.

    The algorithm is asynchronous EASGD by Zhang, Choromanska and LeCun, "Deep learning with Elastic Averaging
    SGD" (2015). ``alpha`` is the paper's moving rate; the paper recommends 0.9 divided by the number of
    replicas. ``flowchan.collective.training.gradients.ElasticAverage`` is the synchronous variant, which
    needs no server.

    Args:
        client: Client of a server that holds the model's parameters, such as
            ``ParameterServer(model.state_dict())``.
        model: Model that this worker trains.
        every: Number of steps between exchanges, at least 1 (default 10).
        alpha: Fraction of the difference by which replica and centre move towards each other, between 0 and 1
            (default 0.1).
        prefetch: Number of steps between the pull of the centre and the exchange, less than ``every``
            (default 0).
        start: Number of steps before the first interval begins (default 0).
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
        >>> from flowchan.pipelines import ElasticAveraging, ParameterServer
        >>> model = nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> with ParameterServer(model.state_dict(), on="thread") as server:
        ...     training = ElasticAveraging(server.client(), model, every=2)
        ...     for batch in [torch.ones(4, 2), torch.zeros(4, 2)]:
        ...         optimizer.zero_grad()
        ...         model(batch).square().mean().backward()
        ...         optimizer.step()
        ...         training.step()
        ...     training.finish()
        ...     server.stats().pushes
        1
    """

    @refuses_misspelt("ElasticAveraging", ReplicaOptions.__annotations__)
    def __init__(
        self,
        client: ParameterClient,
        model: nn.Module,
        *,
        every: int = 10,
        alpha: float = 0.1,
        prefetch: int = 0,
        start: int = 0,
        **options: Unpack[ReplicaOptions],
    ) -> None:
        if not 0 < alpha < 1:
            raise ValueError(f"ElasticAveraging: alpha must be between 0 and 1, got {shown(alpha)}")
        self._alpha = alpha
        self._every = whole("ElasticAveraging", "every", every, 1)
        self._lead = prefetch_steps("ElasticAveraging", prefetch, every)
        super().__init__(client, model, options, start)

    def step(self) -> None:
        """Count one optimizer step, and exchange with the server if an exchange is due.

        Call this method after each optimizer step.

        Raises:
            TimeoutError: The server did not answer in time. The replica retries at the next exchange.

        Example:
            >>> import torch
            >>> from torch import nn
            >>> from flowchan.pipelines import ElasticAveraging, ParameterServer
            >>> model = nn.Linear(1, 1, bias=False)
            >>> with ParameterServer({"weight": torch.zeros(1, 1)}, on="thread") as server:
            ...     training = ElasticAveraging(server.client(), model, every=1, alpha=0.25)
            ...     with torch.no_grad():
            ...         _ = model.weight.fill_(4.0)
            ...     training.step()
            >>> model.weight.item()
            3.0
        """
        self._steps += 1
        if self._due(self._every):
            self._adopt(self._attracted)
        elif self._lead and self._leads and self._due(self._every, self._lead):
            self._begin_prefetch()

    def finish(self) -> None:
        """Wait until the server has applied the last push, and copy the centre into the model.

        Raises:
            TimeoutError: The server did not answer in time.

        Example:
            >>> import torch
            >>> from torch import nn
            >>> from flowchan.pipelines import ElasticAveraging, ParameterServer
            >>> model = nn.Linear(1, 1, bias=False)
            >>> with ParameterServer({"weight": torch.zeros(1, 1)}, on="thread") as server:
            ...     training = ElasticAveraging(server.client(), model, every=1, alpha=0.25)
            ...     with torch.no_grad():
            ...         _ = model.weight.fill_(4.0)
            ...     training.step()
            ...     training.finish()
            >>> model.weight.item()
            1.0
        """
        self._adopt(self._pull)

    def _attracted(self) -> Values:
        """Push the elastic difference to the server, and return the replica's parameters without it."""
        centre = self._fetched()
        own = {name: parameter.detach() for name, parameter in self._parameters.items()}
        pulls = {name: (x - centre[name].to(x.device)) * self._alpha for name, x in own.items()}
        self._send(pulls)
        return {name: x - pulls[name] for name, x in own.items()}
