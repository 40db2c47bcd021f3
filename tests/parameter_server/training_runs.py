"""Train the model of ``simulations.py`` with the product's algorithms, over any parameter server."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import simulations
import torch
from plain_client import PlainServer
from simulations import Batch, State
from torch import nn

from flowchan.pipelines import ParameterClient, ParameterServer, PullHandle, PushHandle


def state_of(model: nn.Module) -> State:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def assert_equal(one: State, other: State) -> None:
    """Compare bit for bit."""
    assert one.keys() == other.keys()
    for name, x in one.items():
        assert x.dtype == torch.float64
        assert torch.equal(x, other[name]), name


def backward(model: nn.Module, batch: Batch) -> None:
    model.zero_grad()
    simulations.loss(model(batch[0]), batch[1]).backward()


@torch.no_grad()
def plain_step(model: nn.Module, lr: float) -> None:
    """Take a step of SGD with the operations of the simulations."""
    for parameter in model.parameters():
        parameter.add_(parameter.grad * -lr)


def in_turn(
    start: Callable[[nn.Module], Any], data: Sequence[Sequence[Batch]], inner_lr: float | None = None
) -> list[list[State]]:
    """Let the workers take their steps in turn, and finish; return their parameters after each step.

    Args:
        start: Function that creates the algorithm of a worker for its model.
        data: The batches of each worker.
        inner_lr: Learning rate of SGD before each step of the algorithm; None if the algorithm has its own.
    """
    models = [simulations.model() for _ in data]
    trainings = [start(model) for model in models]
    history: list[list[State]] = [[] for _ in data]
    for step in range(len(data[0])):
        for w, (model, training) in enumerate(zip(models, trainings, strict=True)):
            backward(model, data[w][step])
            if inner_lr is not None:
                plain_step(model, inner_lr)
            training.step()
            history[w].append(state_of(model))
    for training in trainings:
        training.finish()
    return history


class Turns:
    """Numbers of the workers in the order in which they may push."""

    def __init__(self, order: Sequence[int]) -> None:
        self.order, self.place, self.moved = order, 0, threading.Condition()

    def take(self, worker: int, push: Callable[[], Any]) -> Any:
        """Push when it is the worker's turn, and wait until the push has been applied."""
        with self.moved:
            ready = self.moved.wait_for(lambda: self.order[self.place] == worker, timeout=60)
            assert ready, f"worker {worker} has waited too long for its turn"
            handle = push()
            handle.wait(timeout=60)
            self.place += 1
            self.moved.notify_all()
        return handle


class ClientInTurn:
    """A client whose contributions to DiLoCo's rounds come in a fixed order."""

    def __init__(self, client: Any, worker: int, turns: Turns) -> None:
        self._client, self._worker, self._turns = client, worker, turns

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def push(self, values: Any, rule: Any = "add", **options: Any) -> Any:
        def push() -> Any:
            return self._client.push(values, rule, **options)

        contributes = any(name.startswith("diloco.sum/") for name in values) and rule == "add"
        return self._turns.take(self._worker, push) if contributes else push()


def at_once(work: Callable[[int], Any], workers: int) -> list[Any]:
    """Call ``work`` with the number of each worker, in one thread for each."""
    with ThreadPoolExecutor(workers) as threads:
        return list(threads.map(work, range(workers), timeout=100))


@contextlib.contextmanager
def plain(tensors: Any, optimizer: Any = None) -> Iterator[PlainServer]:
    yield PlainServer(tensors, optimizer)


@contextlib.contextmanager
def real(tensors: Any, **options: Any) -> Iterator[Any]:
    with ParameterServer(tensors, **options) as server:
        yield Serving(server)


class Serving:
    """A real server whose clients wait for each push and prefetch, so that the order is fixed."""

    def __init__(self, server: ParameterServer) -> None:
        self._server = server

    def client(self) -> Any:
        return WaitingClient(self._server.client())


class WaitingClient:
    def __init__(self, client: ParameterClient) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def push(self, *args: Any, **options: Any) -> PushHandle:
        handle = self._client.push(*args, **options)
        handle.wait(timeout=60)
        return handle

    def prefetch(self, names: Any = None) -> PullHandle:
        handle = self._client.prefetch(names)
        handle.wait(timeout=60)
        return handle


SERVERS: dict[str, Callable[..., Any]] = {
    "plain": plain,
    "real": real,
    "real, three shards": functools.partial(real, shards=3),
}
"""Context managers that start a server; ``client()`` of their result returns a client."""
