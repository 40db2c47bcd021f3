"""Get the Python stacks of workers that run in this process, on threads or as coroutines."""

from __future__ import annotations

import sys
import threading
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING

from flowchan.run.observe.stack_text import text_of_coroutine, text_of_frame
from flowchan.run.policy.events import WorkerId

if TYPE_CHECKING:
    from flowchan.run.worker.async_worker import Tasks


def stacks_of_threads(threads: Mapping[WorkerId, threading.Thread]) -> dict[WorkerId, str]:
    """Return the stacks of these threads as text, omitting threads that have ended."""
    frames = sys._current_frames()
    return {
        id: text_of_frame(frames[thread.ident])
        for id, thread in threads.items()
        if thread.ident is not None and thread.ident in frames and thread.is_alive()
    }


def stacks_of_tasks(stages: Iterable[Tasks], ids: Collection[WorkerId]) -> dict[WorkerId, str]:
    """Return the stacks of these workers' coroutines as text.

    A stage is omitted if a coroutine keeps its event loop busy, because the stack of the loop's thread then
    shows that coroutine.
    """
    return {id: text for tasks in stages for id, text in tasks.examine(ids, text_of_coroutine).items()}
