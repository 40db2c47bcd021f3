"""Replica of a model that exchanges its parameters with a parameter server.

The algorithms of low-communication training are subclasses. In a group, each member has an equal replica.
Rank 0 is the leader: only the leader exchanges values with the server, and it broadcasts the new parameters.
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
"""Tensors by the names of the model's parameters."""


class ReplicaOptions(TypedDict, total=False):
    """Keyword options of all algorithms."""

    group: Group | None
    """Group whose members have equal replicas (default: None). Only its rank 0 uses the client."""
    timeout: float | None
    """Maximum seconds for each wait for the server (default: no limit)."""


class Replica:
    """Model whose parameters come from a parameter server.

    The constructor copies the server's parameters into the model.

    Args:
        client: Client of the server.
        model: The model of this worker.
        options: The ``group`` and the ``timeout``.
        start: Number of steps before the replica uses the server.

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
        self._push: PushHandle | None = None  # handle of the last push; at most one push is under way
        self._prefetch: PullHandle | None = None  # handle of a pull that has begun
        self._version = 0  # version that contains all own pushes that are known to be applied
        self._adopt(self._pull)

    def _due(self, every: int, lead: int = 0) -> bool:
        """Return whether this step is ``lead`` steps before a multiple of ``every`` after the start."""
        counted = self._steps - self._start
        return counted > 0 and (counted + lead) % every == 0

    @property
    def _seen(self) -> int:
        """Return the version of the last pull; the constructor makes the first one."""
        version = self._client.version
        assert version is not None
        return version

    def _send(self, values: Values, rule: str = "add") -> PushHandle:
        """Begin a push, and return its handle. Later changes must not affect ``values``."""
        self._finish_push()
        self._push = self._client.push(
            {name: value.detach().cpu() for name, value in values.items()}, rule=rule, timeout=self._timeout
        )
        return self._push

    def _finish_push(self) -> None:
        """Wait until the server has applied the last push."""
        if self._push is not None:
            self._version = self._push.wait(timeout=self._timeout)
            self._push = None

    def _pull(self) -> Values:
        """Return the server's parameters with all pushes of this replica, and discard a prefetch."""
        self._finish_push()
        if self._prefetch is not None:
            self._prefetch.wait(timeout=self._timeout)
            self._prefetch = None
        pulled: Values = self._client.pull(
            names=list(self._parameters), at_least=self._version, timeout=self._timeout
        )
        return pulled

    def _begin_prefetch(self) -> None:
        """Begin a pull that contains all earlier pushes of this replica."""
        self._finish_push()
        self._prefetch = self._client.prefetch(names=list(self._parameters))

    def _fetched(self) -> Values:
        """Return the parameters that a prefetch has requested, or pull them now."""
        if self._prefetch is None:
            return self._pull()
        pulled: Values = self._prefetch.wait(timeout=self._timeout)
        self._prefetch = None
        return pulled

    def _adopt(self, new_parameters: Callable[[], Values]) -> None:
        """Call a function on the leader, and copy its values into the model on all members."""
        values = new_parameters() if self._group is None else _at_leader(self._group, new_parameters)
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.copy_(values[name])


def trainable(call: str, model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of a model that require gradients, by name."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"{call}: model must be a torch.nn.Module, got {type(model).__name__}")
    found = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if not found:
        raise ValueError(f"{call}: model must have parameters that require gradients, got none")
    return found


def prefetch_steps(call: str, prefetch: int, every: int) -> int:
    """Check the number of steps between the beginning and the use of a pull."""
    return whole(call, "prefetch", prefetch, 0, every - 1)


def _at_leader(group: Group, function: Callable[[], Values]) -> Values:
    """Call a function on rank 0, and return its result on all members. If it raises, all members raise."""
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
