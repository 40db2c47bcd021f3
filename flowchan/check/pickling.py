"""Check the rule "pickle": cloudpickle must be able to pickle a stage that is sent to a process.

The rule applies to the function, the arguments and the options of the stage.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from flowchan.declare.callables import name_of
from flowchan.declare.values import Stage
from flowchan.errors import Problem
from flowchan.items.unpicklable import a_kind_of, refusal, smallest
from flowchan.transport.descriptors import for_several_processes

_REMEDY = (
    "create it inside the function, or in a callable class, which is built once in each worker "
    'process; or use on="thread"'
)


def pickle_problems(stage: Stage) -> Iterator[Problem]:
    """Yield a problem for each part of a stage that cannot be sent to a worker process, with a remedy."""
    if not stage.placement.own_process:
        return
    for name, part in _parts(stage):
        with for_several_processes(stage.may_have_several_workers):
            error = refusal(part)
            found = None if error is None else smallest(part, error)
        if found is not None:
            path, culprit, error = found
            where = f"its {', '.join(path)}" if path else "it"
            message = (
                f"{name} can't be sent to a process: {where} is {a_kind_of(culprit)} ({error}); "
                f"{_remedy(culprit)}"
            )
            yield Problem("pickle", stage.name, stage.where, message)


def _parts(stage: Stage) -> Iterator[tuple[str, Any]]:
    if stage.function is not None:
        yield f"function {name_of(stage.function)!r}", stage.function
    for index, value in enumerate(stage.args, 1):
        yield f"argument {index}", value
    for name, value in stage.kwargs.items():
        yield f"argument {name!r}", value
    for name, value in stage.options.items():
        yield f"{stage.kind}'s {name}", value


def _remedy(culprit: Any) -> str:
    if inspect.isgenerator(culprit):
        return "pass the function that creates it, and its arguments"
    return str(getattr(type(culprit), "_remedy_in_a_stage", _REMEDY))
