"""Implement AsySG-InCon: workers push gradients, and pull parameters that the server is updating."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from flowchan.items.arguments import refuses_misspelt, whole
from flowchan.pipelines.parameter_server.parameter_client import ParameterClient
from flowchan.pipelines.parameter_server.replica import Replica, ReplicaOptions, Values
from flowchan.public import public

Make = Callable[[list[Tensor]], torch.optim.Optimizer]


@public
class AsySGInCon(Replica):
    """Train a replica with asynchronous SGD and inconsistent reads.

    In each step, the replica pushes its gradients and pulls the parameters without waiting for other workers.
    The server may update the parameters during a pull. Some of the pulled tensors can therefore be newer than
    others. The server sums the gradients from all workers. After every 32 gradients, it takes one step with
    the sum.

    AsySGInCon replaces the optimizer. In each training step, compute the gradients, and then call
    :meth:`step`. The constructor copies the server's parameters into the model. The model's buffers, such as
    running means, stay local.

    The algorithm is AsySG-InCon by Lian et al., "Asynchronous Parallel Stochastic Gradient for Nonconvex
    Optimization" (2015). The default of 32 gradients follows pytorch_ps_mpi.

    Args:
        client: Client of a server with the model's parameters and the optimizer from :meth:`optimizer`.
        model: Model that this worker trains.
        **options: Options that all algorithms accept:
            group (Group): Group whose members have identical replicas and average their gradients (default:
                None). Only rank 0 of the group uses ``client``.
            timeout (float): Maximum seconds to wait for each server operation (default: no limit).

    Raises:
        ValueError: ``timeout`` is out of range, or the model has no parameters that require gradients.
        TypeError: An argument has the wrong type.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from flowchan.pipelines import AsySGInCon, ParameterServer
        >>> model = nn.Linear(1, 1, bias=False)
        >>> sgd = AsySGInCon.optimizer(lambda params: torch.optim.SGD(params, lr=0.5), gradients=2)
        >>> with ParameterServer({"weight": torch.zeros(1, 1)}, optimizer=sgd, on="thread") as server:
        ...     training = AsySGInCon(server.client(), model)
        ...     for batch in [torch.ones(1, 1), 2 * torch.ones(1, 1)]:
        ...         model.zero_grad()
        ...         model(batch).sum().backward()
        ...         training.step()
        ...     training.finish()
        >>> model.weight.item()
        -1.5
    """

    @refuses_misspelt("AsySGInCon", ReplicaOptions.__annotations__)
    def __init__(
        self,
        client: ParameterClient,
        model: nn.Module,
        **options: Unpack[ReplicaOptions],
    ) -> None:
        super().__init__(client, model, options)

    @staticmethod
    def optimizer(make: Make, *, gradients: int = 32) -> Callable[[Iterable[Tensor]], SummedGradients]:
        """Return a server optimizer that sums several gradients for each step.

        Args:
            make: Function that creates the underlying optimizer for a list of parameters.
            gradients: Number of gradients per sum, at least 1 (default 32).

        Returns:
            The function to pass to :class:`ParameterServer` as ``optimizer=``.

        Raises:
            TypeError: ``gradients`` is not an int.
            ValueError: ``gradients`` is less than 1.

        Example:
            >>> import torch
            >>> from flowchan.pipelines import AsySGInCon
            >>> weight = torch.zeros(1, requires_grad=True)
            >>> sgd = AsySGInCon.optimizer(lambda params: torch.optim.SGD(params, lr=1.0), gradients=2)
            >>> optimizer = sgd([weight])
            >>> for _ in range(3):
            ...     weight.grad = torch.ones(1)
            ...     optimizer.step()
            >>> weight.item()
            -2.0
        """
        return functools.partial(
            SummedGradients, make=make, gradients=whole("AsySGInCon.optimizer", "gradients", gradients, 1)
        )

    def step(self) -> None:
        """Push the model's gradients, and pull the server's parameters.

        Raises:
            TimeoutError: The server did not answer in time.

        Example:
            >>> import torch
            >>> from torch import nn
            >>> from flowchan.pipelines import AsySGInCon, ParameterServer
            >>> model = nn.Linear(1, 1, bias=False)
            >>> sgd = AsySGInCon.optimizer(lambda params: torch.optim.SGD(params, lr=0.5), gradients=1)
            >>> with ParameterServer({"weight": torch.zeros(1, 1)}, optimizer=sgd, on="thread") as server:
            ...     training = AsySGInCon(server.client(), model)
            ...     model(torch.ones(1, 1)).sum().backward()
            ...     training.step()
            ...     training.finish()
            ...     server.client().pull()["weight"].item()
            -0.5
        """
        self._adopt(self._exchange)

    def finish(self) -> None:
        """Wait until the server has processed the last gradients, and pull consistent parameters.

        Gradients in an incomplete sum do not affect the parameters.

        Raises:
            TimeoutError: The server did not answer in time.

        Example:
            >>> from torch import nn
            >>> import torch
            >>> from flowchan.pipelines import AsySGInCon, ParameterServer
            >>> model = nn.Linear(1, 1, bias=False)
            >>> sgd = AsySGInCon.optimizer(lambda params: torch.optim.SGD(params, lr=0.5))
            >>> with ParameterServer({"weight": torch.ones(1, 1)}, optimizer=sgd, on="thread") as server:
            ...     training = AsySGInCon(server.client(), model)
            ...     model(torch.ones(1, 1)).sum().backward()
            ...     training.step()
            ...     training.finish()
            >>> model.weight.item()
            1.0
        """
        self._adopt(self._pull)

    def _exchange(self) -> Values:
        self._send(
            {
                name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
                for name, parameter in self._parameters.items()
            },
            rule="gradient",
        )
        pulled: Values = self._client.pull(
            names=list(self._parameters), consistent=False, timeout=self._timeout
        )
        return pulled


_INNER = "inner."
"""Prefix of the inner optimizer's keys in ``SummedGradients.state``."""


class SummedGradients(torch.optim.Optimizer):
    """Sum gradients, and take a step of another optimizer with each complete sum.

    All state is in ``self.state``, as tensors and numbers, because the server stores nothing else. The server
    looks for state tensors after a first step. The constructor therefore creates all state tensors of the
    inner optimizer.
    """

    def __init__(self, params: Iterable[Tensor], make: Make, gradients: int) -> None:
        super().__init__(params, {})
        self._gradients = gradients
        self._own: list[Tensor] = self.param_groups[0]["params"]
        self._inner = make(self._own)
        first = {p: dict(self._inner.state.get(p, {})) for p in self._own}
        for p, state in zip(self._own, _states_after_a_step(make, self._own), strict=True):
            zeros = {key: torch.zeros_like(value) for key, value in state.items()}
            self.state[p].update(sum=torch.zeros_like(p), count=0, steps=0)
            self.state[p].update({_INNER + key: value for key, value in {**zeros, **first[p]}.items()})
        self._first = first

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Add the gradients to the sums, and take an inner optimizer step for each complete sum."""
        complete = []
        for p in self._own:
            if p.grad is not None:
                state = self.state[p]
                state["sum"].add_(p.grad)
                state["count"] += 1
                if state["count"] == self._gradients:
                    complete.append(p)
            p.grad = None
        self._inner.state.clear()
        for p in complete:
            state = self.state[p]
            kept = {key.removeprefix(_INNER): x for key, x in state.items() if key.startswith(_INNER)}
            # Before the first step, start from a new state: most optimizers create theirs in that step.
            self._inner.state[p] = kept if state["steps"] else self._first[p]
            p.grad = state["sum"].clone()
        if complete:
            self._inner.step()
        for p in complete:
            state = self.state[p]
            state.update({_INNER + key: value for key, value in self._inner.state[p].items()})
            state["sum"].zero_()
            state["count"] = 0
            state["steps"] += 1
            p.grad = None


def _states_after_a_step(make: Make, parameters: list[Tensor]) -> list[dict[str, Tensor]]:
    """Return the state tensors of each parameter after one step of the optimizer."""
    copies: list[Tensor] = [nn.Parameter(p.detach().clone()) for p in parameters]
    optimizer = make(copies)
    for p in copies:
        p.grad = torch.zeros_like(p)
    optimizer.step()
    return [
        {key: value for key, value in optimizer.state[p].items() if isinstance(value, Tensor)} for p in copies
    ]
