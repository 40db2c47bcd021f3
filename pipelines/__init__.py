"""Patterns: what many programs need of channels and graphs, in one line each. Written on the public names of flowchan only.

- :func:`map`: n workers run one function each.
- :func:`workqueue`: one owner puts questions, many workers put answers.
- :class:`TaskPool` and :class:`BackgroundTask`: tasks as ``concurrent.futures`` knows them.
- :func:`marshal`: an object that is serialised once and read many times.
- :class:`Lock`, :class:`Barrier` and :class:`SharedDict`: what several processes share.
"""

from flowchan.pipelines.locks import Barrier, Lock
from flowchan.pipelines.mapping import SharedDict
from flowchan.pipelines.marshalled import Marshalled, marshal
from flowchan.pipelines.queues import WorkQueue, workqueue
from flowchan.pipelines.tasks import BackgroundTask, TaskPool
from flowchan.pipelines.workers import Workers, map  # noqa: A004

__all__ = [
    "BackgroundTask",
    "Barrier",
    "Lock",
    "Marshalled",
    "SharedDict",
    "TaskPool",
    "WorkQueue",
    "Workers",
    "map",
    "marshal",
    "workqueue",
]

# Messages, tracebacks and pickles name the place that users import from.
for _name in __all__:
    globals()[_name].__module__ = "flowchan.pipelines"
del _name
