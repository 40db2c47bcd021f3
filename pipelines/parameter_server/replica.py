"""Define the base class of the algorithms that train a model through a parameter server.

Each algorithm for low-communication training is a subclass. All members of a group have identical replicas.
Rank 0 is the leader: only the leader communicates with the server, and it broadcasts the new parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypedDict

import torch
from torch import Tensor, nn

from flowchan.items.arguments import seconds, whole
from flowchan.pipelines.parameter_server.parameter_client import ParameterClient, PullHandle
from flowchan.pipelines.parameter_server.server_connection import PushHandle
from flowchan.run.policy.failures import Portable

if TYPE_CHECKING:
    from flowchan.collective import Group

Values = Mapping[str, Tensor]
"""Tensors keyed by the names of the model's parameters."""


class ReplicaOptions(TypedDict, total=False):
    """Keyword arguments that all algorithms accept."""

    group: Group | None
    """Group whose members have identical replicas (default: None). Only rank 0 uses the client."""
    timeout: float | None
    """Maximum seconds to wait for each server operation (default: no limit)."""


class Replica:
    """Local copy of a model whose shared parameters are on a parameter server.

    The constructor copies the server's parameters into the model.

    Args:
        client: Client of the server.
        model: Model that this worker trains.
        options: The keyword arguments ``group`` and ``timeout``.
        start: Number of local steps before the first exchange interval begins.

    Raises:
        ValueError: The model has no parameters that require gradients, or an argument is out of range.
    """

    def __init__(
        self, client: ParameterClient, model: nn.Module, options: ReplicaOptions, start: int = 0
    ) -> None:
        self._call = type(self).__name__
        self._client = client
        self._group = options.get("group")
        self._leads = self._group is None or self._group.rank == 0
        self._timeout = seconds(self._call, "timeout", options.get("timeout"))
        self._start = whole(self._call, "start", start, 0)
        self._steps = 0
        self._parameters = trainable(self._call, model)
        self._push: PushHandle | None = None  # the pending push, if any; there is never more than one
        self._prefetch: PullHandle | None = None  # the pending pull, if a prefetch has started
        # server version that includes every push from this replica with a known outcome
        self._version = 0
        self._adopt(self._pull)

    def _due(self, every: int, lead: int = 0) -> bool:
        """Return whether an exchange is due in ``lead`` steps, if there is one every ``every`` steps.

        The steps of the delayed start do not count.
        """
        counted = self._steps - self._start
        return counted > 0 and (counted + lead) % every == 0

    @property
    def _seen(self) -> int:
        """Return the version of the last pull. The constructor has already pulled once."""
        version = self._client.version
        assert version is not None
        return version

    def _send(self, values: Values, rule: str = "add") -> PushHandle:
        """Start a push, and return its handle. The caller must not modify ``values`` afterwards."""
        self._finish_push()
        self._push = self._client.push(
            {name: value.detach().cpu() for name, value in values.items()}, rule=rule, timeout=self._timeout
        )
        return self._push

    def _finish_push(self) -> None:
        """Wait until the server has applied the pending push, if any."""
        if self._push is not None:
            self._version = self._push.wait(timeout=self._timeout)
            self._push = None

    def _pull(self) -> Values:
        """Pull parameters that include all pushes of this replica.

        If a prefetch is pending, wait for it and discard its result.
        """
        self._finish_push()
        if self._prefetch is not None:
            self._prefetch.wait(timeout=self._timeout)
            self._prefetch = None
        pulled: Values = self._client.pull(
            names=list(self._parameters), at_least=self._version, timeout=self._timeout
        )
        return pulled

    def _begin_prefetch(self) -> None:
        """Start a pull that includes all earlier pushes of this replica."""
        self._finish_push()
        self._prefetch = self._client.prefetch(names=list(self._parameters))

    def _fetched(self) -> Values:
        """Return the prefetched parameters. If no prefetch has started, pull the parameters now."""
        if self._prefetch is None:
            return self._pull()
        pulled: Values = self._prefetch.wait(timeout=self._timeout)
        self._prefetch = None
        return pulled

    def _adopt(self, new_parameters: Callable[[], Values]) -> None:
        """Call ``new_parameters`` on the leader, and copy the result into the model on every member."""
        values = new_parameters() if self._group is None else _at_leader(self._group, new_parameters)
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.copy_(values[name])


def trainable(call: str, model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of a model that require gradients, keyed by name."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"{call}: model must be a torch.nn.Module, got {type(model).__name__}")
    found = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if not found:
        raise ValueError(f"{call}: model must have parameters that require gradients, got none")
    return found


def prefetch_steps(call: str, prefetch: int, every: int) -> int:
    """Check and return ``prefetch``, the number of steps from the start of a pull to its use."""
    return whole(call, "prefetch", prefetch, 0, every - 1)


def _at_leader(group: Group, function: Callable[[], Values]) -> Values:
    """Call ``function`` on rank 0, and return the result on every member.

    If the function raises an exception, every member raises it.
    """
    result: Values | None = None
    if group.rank == 0:
        try:
            result = dict(function())
        except Exception as raised:
            group.broadcast((None, Portable(raised, "on rank 0, which uses the parameter server")))
            raise
    found: tuple[Values, BaseException | None] = group.broadcast((result, None))
    if found[1] is not None:
        raise found[1]
    return found[0]
