"""Provide ready-made patterns for concurrent programs, built only on flowchan's public names.

- :func:`map`: run one function in n workers.
- :func:`workqueue`: a queue in which one owner puts questions and many workers put answers.
- :class:`TaskPool` and :class:`BackgroundTask`: executors in the style of ``concurrent.futures``.
- :class:`Server` and :class:`Client`: one program that serves many others, on any hosts.
- :func:`marshal`: serialise an object once and read it many times.
- :class:`Lock`, :class:`Semaphore`, :class:`Barrier`, :class:`Event`, :class:`Condition` and
  :class:`SharedDict`: synchronisation and state for several processes.
- :class:`ParameterServer`: tensors that many workers push to and pull from.
- :class:`Weights`: model weights that a trainer publishes to inference workers.
- :class:`Sequential`: an ``nn.Sequential`` whose parts run at the same time. :class:`Stash` and :class:`Pop`
  form skip connections in it, and its ``trainer(...)`` returns a :class:`Training`.
- :func:`dataset`: use a graph as the data of a training loop.
- :class:`Downpour`, :class:`ElasticAveraging`, :class:`DiLoCo` and :class:`AsySGInCon`: low-communication
  training through a parameter server.
- :class:`RemoteNodes`: torch devices whose operations run in other processes or on other hosts.

Each name is imported on first use. ``dataset``, ``Sequential``, ``Stash``, ``Pop``, ``Training``, the four
training algorithms and ``RemoteNodes`` need torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flowchan.public import names_on_first_use

if TYPE_CHECKING:
    from flowchan.pipelines.barriers import Barrier, Condition, Event
    from flowchan.pipelines.client_server import Client, ServedClient, Server, Traffic
    from flowchan.pipelines.datasets import Dataset, dataset
    from flowchan.pipelines.locks import Lock, Semaphore
    from flowchan.pipelines.marshalled import Marshalled, marshal
    from flowchan.pipelines.parallel_map import Workers, map  # noqa: A004
    from flowchan.pipelines.parameter_server import (
        ParameterClient,
        ParameterServer,
        ParameterServerStats,
        PullHandle,
        PushHandle,
        RowOptimizer,
        Weights,
        WeightsReader,
        WeightsStats,
        gathered,
    )
    from flowchan.pipelines.parameter_server.async_sgd import AsySGInCon
    from flowchan.pipelines.parameter_server.diloco import DiLoCo
    from flowchan.pipelines.parameter_server.downpour import Downpour
    from flowchan.pipelines.parameter_server.elastic_averaging import ElasticAveraging
    from flowchan.pipelines.remote_tensors import NodeDied, NodeStats, RemoteError, RemoteNodes, RemoteTensor
    from flowchan.pipelines.sequential import Pop, Sequential, Stash, Training
    from flowchan.pipelines.shared_dict import SharedDict
    from flowchan.pipelines.task_pool import BackgroundTask, TaskPool
    from flowchan.pipelines.work_queue import WorkQueue, workqueue

__all__ = [
    "AsySGInCon",
    "BackgroundTask",
    "Barrier",
    "Client",
    "Condition",
    "Dataset",
    "DiLoCo",
    "Downpour",
    "ElasticAveraging",
    "Event",
    "Lock",
    "Marshalled",
    "NodeDied",
    "NodeStats",
    "ParameterClient",
    "ParameterServer",
    "ParameterServerStats",
    "Pop",
    "PullHandle",
    "PushHandle",
    "RemoteError",
    "RemoteNodes",
    "RemoteTensor",
    "RowOptimizer",
    "Semaphore",
    "Sequential",
    "ServedClient",
    "Server",
    "SharedDict",
    "Stash",
    "TaskPool",
    "Traffic",
    "Training",
    "Weights",
    "WeightsReader",
    "WeightsStats",
    "WorkQueue",
    "Workers",
    "dataset",
    "gathered",
    "map",
    "marshal",
    "workqueue",
]

_NAMES = {
    "barriers": ("Barrier", "Condition", "Event"),
    "children": (),
    "client_server": ("Client", "ServedClient", "Server", "Traffic"),
    "datasets": ("Dataset", "dataset"),
    "locks": ("Lock", "Semaphore"),
    "marshalled": ("Marshalled", "marshal"),
    "parallel_map": ("Workers", "map"),
    "parameter_server": (
        "ParameterClient",
        "ParameterServer",
        "ParameterServerStats",
        "PullHandle",
        "PushHandle",
        "RowOptimizer",
        "Weights",
        "WeightsReader",
        "WeightsStats",
        "gathered",
    ),
    "parameter_server.async_sgd": ("AsySGInCon",),
    "parameter_server.diloco": ("DiLoCo",),
    "parameter_server.downpour": ("Downpour",),
    "parameter_server.elastic_averaging": ("ElasticAveraging",),
    "remote_tensors": ("NodeDied", "NodeStats", "RemoteError", "RemoteNodes", "RemoteTensor"),
    "sequential": ("Pop", "Sequential", "Stash", "Training"),
    "shared_dict": ("SharedDict",),
    "task_pool": ("BackgroundTask", "TaskPool"),
    "work_queue": ("WorkQueue", "workqueue"),
}
"""The public names that each module defines. The module ``children`` is itself public."""

if not TYPE_CHECKING:  # type checkers would accept every name
    __getattr__, __dir__ = names_on_first_use(__name__, _NAMES)
