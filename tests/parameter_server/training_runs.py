"""Train the model of ``simulations.py`` with the product's algorithms, on a plain or a real server."""

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
    """Assert that two states are equal bit for bit."""
    assert one.keys() == other.keys()
    for name, x in one.items():
        assert x.dtype == torch.float64
        assert torch.equal(x, other[name]), name


def backward(model: nn.Module, batch: Batch) -> None:
    model.zero_grad()
    simulations.loss(model(batch[0]), batch[1]).backward()


@torch.no_grad()
def plain_step(model: nn.Module, lr: float) -> None:
    """Take an SGD step with the same operations as the simulations."""
    for parameter in model.parameters():
        parameter.add_(parameter.grad * -lr)


def in_turn(
    start: Callable[[nn.Module], Any], data: Sequence[Sequence[Batch]], inner_lr: float | None = None
) -> list[list[State]]:
    """Let the workers take turns, and finish them. Return each worker's parameters after each step.

    Args:
        start: Function that creates a worker's algorithm for a model.
        data: Batches of each worker.
        inner_lr: Learning rate of the SGD step before each step of the algorithm. None if the algorithm
            takes that SGD step.
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
    """Order of the workers' pushes, as a list of worker numbers."""

    def __init__(self, order: Sequence[int]) -> None:
        self.order, self.place, self.moved = order, 0, threading.Condition()

    def take(self, worker: int, push: Callable[[], Any]) -> Any:
        """Wait for the worker's turn, push, and wait until the server has applied the push."""
        with self.moved:
            ready = self.moved.wait_for(lambda: self.order[self.place] == worker, timeout=60)
            assert ready, f"worker {worker} waited more than 60 s for its turn"
            handle = push()
            handle.wait(timeout=60)
            self.place += 1
            self.moved.notify_all()
        return handle


class ClientInTurn:
    """Client that contributes to DiLoCo's rounds in a fixed order."""

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
    """Call ``work`` with each worker's number, in one thread per worker."""
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
    """A real server with a fixed order of calls: clients wait for each push and prefetch."""

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
"""Context managers that start a server. The method ``client()`` of the server returns a new client."""
