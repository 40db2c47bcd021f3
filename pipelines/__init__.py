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

``dataset``, ``Sequential``, ``Stash``, ``Pop``, ``Training``, the four training algorithms and
``RemoteNodes`` need torch. These names are imported on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from flowchan.pipelines.barriers import Barrier, Condition, Event
from flowchan.pipelines.client_server import Client, ServedClient, Server, Traffic
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
from flowchan.pipelines.shared_dict import SharedDict
from flowchan.pipelines.task_pool import BackgroundTask, TaskPool
from flowchan.pipelines.work_queue import WorkQueue, workqueue

if TYPE_CHECKING:
    from flowchan.pipelines.datasets import Dataset, dataset
    from flowchan.pipelines.parameter_server.async_sgd import AsySGInCon
    from flowchan.pipelines.parameter_server.diloco import DiLoCo
    from flowchan.pipelines.parameter_server.downpour import Downpour
    from flowchan.pipelines.parameter_server.elastic_averaging import ElasticAveraging
    from flowchan.pipelines.remote_tensors import NodeDied, NodeStats, RemoteError, RemoteNodes, RemoteTensor
    from flowchan.pipelines.sequential import Pop, Sequential, Stash, Training

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

# Make messages, tracebacks and pickles show the module that users import.
for _name in __all__:
    if _name in globals():
        globals()[_name].__module__ = "flowchan.pipelines"
del _name


_NEED_TORCH = {
    **dict.fromkeys(("Dataset", "dataset"), "datasets"),
    **dict.fromkeys(("Pop", "Sequential", "Stash", "Training"), "sequential"),
    "AsySGInCon": "parameter_server.async_sgd",
    "DiLoCo": "parameter_server.diloco",
    "Downpour": "parameter_server.downpour",
    "ElasticAveraging": "parameter_server.elastic_averaging",
    **dict.fromkeys(
        ("NodeDied", "NodeStats", "RemoteError", "RemoteNodes", "RemoteTensor"), "remote_tensors"
    ),
}
"""Maps each name that needs torch to the module that defines it."""


def __getattr__(name: str) -> Any:
    """Import a name that needs torch on its first use."""
    if name not in _NEED_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        found = getattr(importlib.import_module(f"flowchan.pipelines.{_NEED_TORCH[name]}"), name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ImportError(
            f"flowchan.pipelines.{name} needs torch: pip install 'flowchan[torch]'", name="torch"
        ) from error
    globals()[name] = found
    return found
