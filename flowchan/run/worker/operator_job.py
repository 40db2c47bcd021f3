"""Provide what an operator's loop needs in addition to its ports: the function, failure handling and more."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from flowchan.channel.addressed import Addressed
from flowchan.channel.channel import In, Out
from flowchan.errors import Broken, ChannelError, Closed
from flowchan.items.failed import Failed
from flowchan.items.text import short
from flowchan.run.policy import journal
from flowchan.run.policy.failures import ItemFailed, OwnEnd, Portable, died_over, text_of
from flowchan.run.worker.item_recorder import ItemRecorder
from flowchan.run.worker.keyed_call import Unroutable
from flowchan.run.worker.pace import Pace, wait_until
from flowchan.run.worker.requests import NOTHING, Answering, Dropped, bare
from flowchan.run.worker.state_log import KeyedStates
from flowchan.run.worker.tracking import Tracking, unmarked

SKIPPED: Any = object()
FAILED_ITEM_INTERVAL_S = 0.5
"""Minimum number of seconds between two reports of failed items from one worker."""


@dataclass
class OperatorJob:
    """Everything that an operator's loop needs in addition to its ports."""

    kind: str
    function: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    retries: int = 0
    retry_delay: float | None = None
    retry_on: tuple[type[Exception], ...] = (Exception,)
    timeout: float | None = None  # only for async functions; for others, the worker sets a kernel timer
    pace: Pace | None = None  # only for async functions; for others, the worker waits before each call
    errors: Out[Failed[Any]] | None = None
    states: KeyedStates | None = None  # set if the stage keeps a state for each key
    answering: Answering | None = None  # set if items may come from ask()
    tracking: Tracking | None = None  # set if the run can be resumed
    recorder: ItemRecorder | None = None  # set if the run samples items
    on_retry: Callable[[], None] = lambda: None
    on_result: Callable[[Any], None] = lambda _: None
    on_failed_item: Callable[[str], None] = lambda _: None
    last_report_at: float = -FAILED_ITEM_INTERVAL_S
    on_clean_up: Callable[[], None] = lambda: None  # called when a task begins to clean up
    # Number of items without a receiver: their branch lost its readers, or their request was cancelled.
    unwanted: int = 0
    predecessors: tuple[str, ...] = ()  # how earlier workers that held the first item died
    too_late: bool = False  # true if the first item has timed out too often
    is_over: Callable[[], bool] = lambda: False  # returns whether one of the worker's channels is broken

    def recover(self, call: Callable[[Any], Any], item: Any, error: BaseException) -> Any:
        """Retry ``call(item)`` after ``error``. Return its result, or SKIPPED if the item finally fails."""
        if isinstance(error, ItemFailed):  # a member of the batch has already failed for good
            raise error
        attempts = 1
        while isinstance(error, self.retry_on) and attempts <= self.retries:
            self.on_retry()
            self._pause()
            attempts += 1
            try:
                return call(item)
            except BaseException as again:
                error = again
        self.give_up(item, error, attempts)
        return SKIPPED

    def _pause(self) -> None:
        """Wait before a retry. Raise ``Broken`` if the run fails or is aborted first."""
        wait_until(time.monotonic() + (self.retry_delay or 0.0), self.is_over, "retry")

    def without_failed(self, items: Any, results: Any) -> Any:
        """Remove the results of failed members from a batch's results.

        An exception in place of a result means that this member failed. If the number of results does not
        match the number of members, the whole batch fails.
        """
        if self.tracking is not None:
            kept = self._without_failed(items, results[1])
            return kept if kept is SKIPPED else self.tracking.without_failed(items, results, kept)
        return self._without_failed(items, results)

    def _without_failed(self, items: Any, results: Any) -> Any:
        if not (isinstance(items, list) and isinstance(results, list | tuple)):
            return results
        if not any(isinstance(result, Exception) for result in results):
            return results
        if not isinstance(results, list) or len(results) != len(items):
            error = TypeError(
                f"the function must return a list of {len(items)} results for a batch with failed "
                f"members, got a {type(results).__name__} of {len(results)}"
            )
            self.give_up(items, error)
            return SKIPPED
        for item, result in zip(items, results, strict=True):
            if isinstance(result, Exception):
                self.give_up(item, result)
        return [result for result in results if not isinstance(result, Exception)]

    def give_up(self, item: Any, error: BaseException, attempts: int = 1) -> None:
        """Send the failure of ``item`` to the ``errors`` stream or to the caller of ``ask``.

        Raise :class:`ItemFailed` if the stage has no reader for ``errors``, or if ``error`` is not an
        ``Exception``.
        """
        if type(item) is Unroutable:
            item, attempts = item.item, item.deaths
        if isinstance(error, Dropped):
            self.unwanted += 1
            return
        if isinstance(error, OwnEnd):
            raise error.__cause__ or Closed from None
        if self.answering is not None and isinstance(error, Exception):
            item = self.answering.give_up(item, error)
            if item is NOTHING:
                return
        if self.errors is None or not isinstance(error, Exception):
            raise ItemFailed(self.bare(item)) from error
        is_copied = self.errors.channel.transport.copies
        carried: Any = Portable(error) if is_copied else error
        if time.monotonic() > self.last_report_at + FAILED_ITEM_INTERVAL_S:
            self.last_report_at = time.monotonic()
            self.on_failed_item(f"item {short(self.bare(item), 60)}: {text_of(error)}")
        failed: Any = Failed(self.bare(item), carried, attempts)
        if self.tracking is not None:
            failed = self.tracking.failed(item, failed)
        try:
            self.errors.put(failed)
        except Broken:
            raise
        except Exception as refused:
            error.add_note(f"the errors stream did not accept the item: {text_of(refused)}")
            raise ItemFailed(self.bare(item)) from error

    def bare(self, item: Any) -> Any:
        """Return the item without its request or marks, in the form that user functions see."""
        return bare(item) if self.tracking is None else unmarked(item)

    def parts(self, item: Any, elements: Iterable[Any]) -> Iterable[Any]:
        """Return the elements into which ``item`` is split, with marks if the run can be resumed."""
        return elements if self.tracking is None else self.tracking.parts(item, elements)

    def not_sent(self, out: Out[Any] | Addressed, item: Any, error: Exception) -> None:
        """Handle an error that was raised when an output of ``item`` was put.

        If the error means that ``out`` has closed or is broken, raise it. Otherwise, fail the item.
        """
        if is_end_of(out, error):
            if isinstance(error, Closed):
                self.drop_item(item)
            raise error
        self.give_up(item, error)

    def pass_on(self, out: Out[Any], item: Any) -> None:
        """Put ``item`` unchanged into ``out``."""
        try:
            out.put(item)
        except Closed:
            self.drop_item(item)
            raise

    def drop_item(self, item: Any) -> None:
        """Drop ``item``. If it came from ``ask``, send its caller an error."""
        if self.answering is not None:
            self.answering.drop_item(item)

    def drop_remaining(self, items: In[Any]) -> int:
        """Drop the remaining input items, because their outputs have no reader, and return their number.

        The callers of ``ask`` whose items are dropped get an error.
        """
        number = 0
        if self.answering is not None:
            items.channel.close()
            items._on_poison(1, lambda *_: None)
            # The channel is drained, or another thread has closed it.
            with contextlib.suppress(ChannelError, ValueError):
                while True:
                    item = items.get_nowait()
                    number += 1
                    self.drop_item(item)
        return number

    def count_unwanted(self) -> None:
        """Count one item that has no receiver."""
        self.unwanted += 1

    def poisoned(self, item: Any, deaths: int, error: Exception | None) -> None:
        """Treat an item that cannot be processed as failed. The worker then continues with the next item.

        Either the item is an :class:`Unreadable`, and ``error`` gives the reason, or ``deaths`` workers have
        died while processing it.
        """
        if self.states is not None:
            self.states.skip()
        if error is None and self.too_late:
            error = TimeoutError(f"the worker {self.predecessors[-1]}")
        if error is None:
            error = died_over(self.predecessors[-deaths:])
            journal.blamed(short(self.bare(item), 120), str(error))
        self.give_up(item, error, deaths)


def is_end_of(out: Out[Any] | Addressed, error: BaseException) -> bool:
    """Return whether ``error``, raised by a put into ``out``, means that the channel of ``out`` has ended.

    Pickling an item can run user code, which may raise the same exceptions about another channel.
    """
    return isinstance(error, Closed | Broken) and bool(out.channel.closed)
