"""Answers to the buttons of the live page: stacks of workers, and predictions.

Each action receives the parameters of the query and returns a JSON value. It raises ``LookupError``,
``RuntimeError`` or ``ValueError`` if it has no answer; the page shows the text of the error.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from flowchan.run.stacks import stacks
from flowchan.run.supervisor import Supervisor
from flowchan.run.what_if_question import answer
from flowchan.viz.insight.snapshot import ElementIds

PREDICTION_WINDOW_S = 5.0
"""Seconds at the end of the run on which predictions are based."""

Action = Callable[[Mapping[str, str]], Any]


def actions_of(supervisor: Supervisor, ids: ElementIds) -> dict[str, Action]:
    """Return the actions of a run's page by path. They refer to the supervisor weakly."""
    reference = weakref.ref(supervisor)
    names = {id: name for name, id in ids.stages.items()}

    def show_stacks(query: Mapping[str, str]) -> Any:
        return {"stacks": stacks(_alive(reference), names[query["stage"]])}

    def predict(_: Mapping[str, str]) -> Any:
        run = _alive(reference)
        found = answer(run.plan.graph, run.stats(PREDICTION_WINDOW_S), None, None, None)
        rows = found if isinstance(found, list) else [found]
        return {"rows": [{**dataclasses.asdict(row), "stage": ids.stages[row.stage]} for row in rows]}

    return {"stacks": show_stacks, "what_if": predict}


def _alive(reference: weakref.ref[Supervisor]) -> Supervisor:
    supervisor = reference()
    assert supervisor is not None  # it called the page, or the run's handle did
    return supervisor
