"""Implement DiLoCo: in each round, replicas train for many steps and an outer optimizer combines the results.

*State.* The server holds the parameters, the summed differences from the replicas, the state of the outer
optimizer, and the round counters. When a replica is killed, no shared state is lost.

*Contribution.* In one push, a replica adds its differences to the sums and increments the count of
contributions.

*Closing.* One replica pulls this whole state, takes the outer step, and pushes the result with the sums reset
to zero. The server drops this push if any other push came first (``max_staleness=0``). Each round is
therefore closed exactly once, by any replica, and includes every counted contribution. The last contributor
closes the round at once. Earlier contributors close the round only if the last contributor does not.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import NamedTuple, Unpack

import torch
from torch import Tensor, nn

from flowchan.items.arguments import pause, refuses_misspelt, whole
from flowchan.pipelines.parameter_server.optimizer_state import OptimizerState
from flowchan.pipelines.parameter_server.parameter_client import ParameterClient
from flowchan.pipelines.parameter_server.replica import Replica, ReplicaOptions, Values, trainable
from flowchan.public import public

Outer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

TAKEOVER_S = 5.0
"""Seconds after which a replica closes a round that a later contributor should have closed."""
_SUM, _OUTER, _ROUND = "diloco.sum/", "diloco.outer", "diloco.round"
"""Names and name prefixes of the tensors that DiLoCo adds to the server."""


def nesterov(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Create the outer optimizer that the paper recommends."""
    return torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)


class Counts(NamedTuple):
    """Counters that the replicas share on the server.

    Attributes:
        rounds: Number of completed rounds.
        sent: Number of contributions to the current round.
        left: Number of replicas that have finished.
        closed: Version of the push that closed the last round.
    """

    rounds: int
    sent: int
    left: int
    closed: int


@public
class DiLoCo(Replica):
    """Train a replica with DiLoCo.

    A round takes ``every`` steps. At the end of a round, each replica pushes the difference between its
    parameters at the start of the round and its current parameters. The outer optimizer uses the mean
    difference as the gradient of the server's parameters, and the replicas continue from the result. A
    contribution that arrives after its round has ended counts towards the next round.

    A round ends when every replica that has not called :meth:`finish` has contributed. With ``quorum`` and
    ``grace``, a round also ends ``grace`` seconds after ``quorum`` replicas have contributed. A killed
    replica therefore does not block the other replicas.

    Train the model with any optimizer, and call :meth:`step` after each optimizer step. The constructor
    copies the server's parameters into the model. The model's buffers, such as running means, stay local.

    The algorithm is by Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models"
    (2023).

    Args:
        client: Client of a server that was created with :meth:`tensors`.
        model: Model that this worker trains.
        every: Number of steps per round, at least 1 (default 100).
        outer: Function that creates the outer optimizer for a list of parameters (default: SGD with
            ``lr=0.7``, ``momentum=0.9`` and ``nesterov=True``). All replicas and :meth:`tensors` must use the
            same function.
        workers: Number of replicas. A group counts as one replica.
        quorum: Number of contributions after which the ``grace`` period starts, from 1 to ``workers``
            (default: ``workers``).
        grace: Seconds to wait for the remaining contributions after the quorum is reached (default: no
            limit).
        **options: Options that all algorithms accept:
            group (Group): Group whose members have identical replicas and average their gradients (default:
                None). Only rank 0 of the group uses ``client``.
            timeout (float): Maximum seconds to wait for the end of a round and for each other server
                operation (default: no limit).

    Raises:
        ValueError: An argument is out of range, ``grace`` is missing, the server was not created with
            :meth:`tensors`, or the model has no parameters that require gradients.
        TypeError: An argument has the wrong type.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from flowchan.pipelines import DiLoCo, ParameterServer
        >>> model = nn.Linear(2, 1)
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        >>> with ParameterServer(DiLoCo.tensors(model), on="thread") as server:
        ...     training = DiLoCo(server.client(), model, every=2, workers=1)
        ...     for batch in [torch.ones(4, 2), torch.zeros(4, 2)]:
        ...         optimizer.zero_grad()
        ...         model(batch).square().mean().backward()
        ...         optimizer.step()
        ...         training.step()
        ...     training.finish()
        ...     training.rounds
        1
    """

    @refuses_misspelt("DiLoCo", ReplicaOptions.__annotations__)
    def __init__(
        self,
        client: ParameterClient,
        model: nn.Module,
        *,
        every: int = 100,
        outer: Outer = nesterov,
        workers: int,
        quorum: int | None = None,
        grace: float | None = None,
        **options: Unpack[ReplicaOptions],
    ) -> None:
        self._every = whole("DiLoCo", "every", every, 1)
        self._workers = whole("DiLoCo", "workers", workers, 1)
        self._quorum = workers if quorum is None else whole("DiLoCo", "quorum", quorum, 1, workers)
        grace = pause("DiLoCo", "grace", grace)
        if self._quorum < workers and grace is None:
            raise ValueError(
                f"DiLoCo: grace must be a number of seconds with quorum={quorum}, got None; "
                "pass grace=0 to end a round when the quorum is reached"
            )
        self._grace = math.inf if grace is None else grace
        self._outer = OptimizerState(outer, _copies("DiLoCo", model), _OUTER)
        self._counts = Counts(0, 0, 0, 0)
        self._contributed = False  # true once this replica has contributed to the round
        self._finished = False
        super().__init__(client, model, options)

    @staticmethod
    def tensors(model: nn.Module, *, outer: Outer = nesterov) -> dict[str, Tensor]:
        """Return the tensors for the server: the parameters and the state of the rounds.

        Args:
            model: Model to train.
            outer: Function that creates the outer optimizer. Pass the same function to :class:`DiLoCo`.

        Returns:
            Tensors by name. Each parameter is copied under its own name.

        Raises:
            TypeError: The model is not an ``nn.Module``, or the optimizer's state contains values other than
                tensors and numbers.
            ValueError: The model has no parameters that require gradients.

        Example:
            >>> from torch import nn
            >>> from flowchan.pipelines import DiLoCo
            >>> sorted(DiLoCo.tensors(nn.Linear(2, 1, bias=False)))[-2:]
            ['diloco.sum/weight', 'weight']
        """
        values = _copies("DiLoCo.tensors", model)
        slots = OptimizerState(outer, values, _OUTER).slots
        return {
            **values,
            **{_SUM + name: torch.zeros_like(value) for name, value in values.items()},
            **{name: torch.as_tensor(slot) for name, slot in slots.items()},
            _ROUND: torch.zeros(len(Counts._fields), dtype=torch.int64),
        }

    @property
    def rounds(self) -> int:
        """Return the number of rounds that were complete at this replica's last exchange with the server.

        In a group, only rank 0 knows this number.
        """
        return self._counts.rounds

    def step(self) -> None:
        """Count one optimizer step, and contribute to a round if a contribution is due.

        Call this method after each optimizer step.

        Raises:
            TimeoutError: The round did not end in time. The next call resumes the wait.
            RuntimeError: :meth:`finish` has been called.

        Example:
            >>> import torch
            >>> from torch import nn
            >>> from flowchan.pipelines import DiLoCo, ParameterServer
            >>> model = nn.Linear(1, 1, bias=False)
            >>> plain = lambda parameters: torch.optim.SGD(parameters, lr=0.5)
            >>> with ParameterServer(DiLoCo.tensors(model, outer=plain), on="thread") as server:
            ...     training = DiLoCo(server.client(), model, every=1, outer=plain, workers=1)
            ...     before = model.weight.item()
            ...     with torch.no_grad():
            ...         _ = model.weight.add_(4.0)
            ...     training.step()
            >>> round(model.weight.item() - before, 3)
            2.0
        """
        if self._finished:
            raise RuntimeError("DiLoCo: step() must not be called after finish(); create a new DiLoCo")
        self._steps += 1
        if self._steps >= self._every:
            self._adopt(self._round)
            self._steps = 0

    def finish(self) -> None:
        """Contribute the remaining steps, leave the rounds, and pull the server's parameters.

        Later rounds do not wait for this replica.

        Raises:
            TimeoutError: The round did not end in time. The next call resumes the wait.

        Example:
            >>> from torch import nn
            >>> from flowchan.pipelines import DiLoCo, ParameterServer
            >>> model = nn.Linear(2, 1)
            >>> with ParameterServer(DiLoCo.tensors(model), on="thread") as server:
            ...     training = DiLoCo(server.client(), model, workers=1)
            ...     training.step()
            ...     training.finish()
            ...     training.rounds
            1
        """
        self._adopt(self._leave)
        self._steps, self._finished = 0, True

    def _leave(self) -> Values:
        if self._steps:
            self._round()
            self._steps = 0
        if not self._finished:
            self._send({_ROUND: torch.tensor(Counts(0, 0, 1, 0))})
            self._finished = True
        return self._pull()

    def _pull(self) -> Values:
        """Pull the server's parameters, and save them as the starting point of a new round."""
        self._finish_push()
        try:
            found = self._pulled([*self._parameters, _ROUND], self._version, self._limit())
        except KeyError as error:
            raise ValueError(
                "DiLoCo: client must belong to a server created with DiLoCo.tensors(model), got another "
                "server"
            ) from error
        self._counts = _counts(found)
        self._began = {name: found[name] for name in self._parameters}
        return self._began

    def _round(self) -> Values:
        """Contribute to the round, wait until it ends, and return the new parameters."""
        if not self._contributed:
            self._send({**self._differences(), _ROUND: torch.tensor(Counts(0, 1, 0, 0))})
            self._contributed = True
        self._finish_push()
        self._wait_for_end(self._version)
        self._contributed = False
        return self._pull()

    def _differences(self) -> dict[str, Tensor]:
        return {
            _SUM + name: self._began[name] - parameter.detach().cpu()
            for name, parameter in self._parameters.items()
        }

    def _wait_for_end(self, sent_at: int) -> None:
        """Wait until the round that includes the push of version ``sent_at`` has ended."""
        limit = self._limit()
        counts = _counts(self._pulled([_ROUND], sent_at, limit))
        place, complete, quorum = counts.sent, math.inf, math.inf
        while counts.closed <= sent_at:
            version, now = self._seen, time.monotonic()
            remaining = self._workers - counts.left
            if counts.sent >= remaining:
                complete = min(complete, now)
            if counts.sent >= min(self._quorum, remaining):
                quorum = min(quorum, now)
            closes = min(complete, quorum + self._grace) + TAKEOVER_S * (counts.sent - place)
            if now >= limit:
                raise TimeoutError(
                    f"DiLoCo: {counts.sent} of {remaining} replicas contributed to round {counts.rounds} "
                    f"within {self._timeout} s; pass quorum= and grace= to continue without the others"
                )
            if now >= closes:
                self._close(sent_at, limit)
                closes = math.inf  # some push has raised the version, so the next pull returns at once
            try:
                counts = _counts(self._pulled([_ROUND], version + 1, min(closes, limit)))
            except TimeoutError:
                continue  # it is time to close the round or to give up

    def _close(self, sent_at: int, limit: float) -> None:
        """Take the outer step, unless the round has ended or another push comes before the step."""
        names = [*self._parameters, *(_SUM + name for name in self._parameters), *self._outer.slots, _ROUND]
        state = {name: value.clone() for name, value in self._pulled(names, sent_at, limit).items()}
        counts, version = _counts(state), self._seen
        if counts.closed > sent_at:
            return
        # the optimizer modifies all slots in place, and needs NumPy arrays for slots that are not tensors
        bytes_slots = [name for name, slot in self._outer.slots.items() if not isinstance(slot, Tensor)]
        means = {name: state[_SUM + name] / counts.sent for name in self._parameters}
        self._outer.step({**state, **{name: state[name].numpy() for name in bytes_slots}}, means)
        for name in self._parameters:
            state[_SUM + name].zero_()
        state[_ROUND] = torch.tensor(Counts(counts.rounds + 1, 0, counts.left, version + 1))
        self._client.push(state, rule="copy", at=version, max_staleness=0, timeout=_until(limit)).wait(
            timeout=_until(limit)
        )

    def _limit(self) -> float:
        """Return the deadline of this call on the monotonic clock."""
        return math.inf if self._timeout is None else time.monotonic() + self._timeout

    def _pulled(self, names: list[str], at_least: int, limit: float) -> Values:
        found: Values = self._client.pull(names=names, at_least=at_least, timeout=_until(limit))
        return found


def _copies(call: str, model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().cpu().clone() for name, p in trainable(call, model).items()}


def _counts(state: Values) -> Counts:
    return Counts(*state[_ROUND].tolist())


def _until(limit: float) -> float | None:
    """Return the seconds until ``limit`` on the monotonic clock, or ``None`` if ``limit`` is infinite."""
    return None if limit == math.inf else max(limit - time.monotonic(), 0.001)
