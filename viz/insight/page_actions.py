"""Handle the buttons of the live page, which request worker stacks and predictions.

Each action receives the query parameters and returns a JSON value. An action that has no answer raises
``LookupError``, ``RuntimeError`` or ``ValueError``, and the page shows the error message.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from flowchan.run.observe.feed import RECENT_S
from flowchan.run.stacks import stacks
from flowchan.run.supervisor import Supervisor
from flowchan.run.what_if_question import answer
from flowchan.viz.insight.snapshot import ElementIds

Action = Callable[[Mapping[str, str]], Any]


def actions_of(supervisor: Supervisor, ids: ElementIds) -> dict[str, Action]:
    """Return the actions of a run's page by path.

    The actions hold only a weak reference to the supervisor.
    """
    reference = weakref.ref(supervisor)
    names = {id: name for name, id in ids.stages.items()}

    def show_stacks(query: Mapping[str, str]) -> Any:
        return {"stacks": stacks(_alive(reference), names[query["stage"]])}

    def predict(_: Mapping[str, str]) -> Any:
        run = _alive(reference)
        found = answer(run.plan.graph, run.stats(RECENT_S), None, None, None)
        rows = found if isinstance(found, list) else [found]
        return {"rows": [{**dataclasses.asdict(row), "stage": ids.stages[row.stage]} for row in rows]}

    return {"stacks": show_stacks, "what_if": predict}


def _alive(reference: weakref.ref[Supervisor]) -> Supervisor:
    supervisor = reference()
    # The caller is the supervisor or the run's handle, so the supervisor still exists.
    assert supervisor is not None
    return supervisor
