"""Loops of the operators. Each loop works with ports, like a general stage that a user writes.

Each function is the loop of one operator and receives an :class:`OperatorJob` and its ports. It returns when
its input is drained, or raises ``Closed`` when its output has no reader left; both are clean ends. Taking an
item marks the previous one as finished, so a loop takes the next item only after all work for the current
one.
"""

from __future__ import annotations

import contextlib
import copy
import enum
import itertools
import time
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from flowchan.channel.addressed import Addressed
from flowchan.channel.channel import In, Out
from flowchan.errors import Broken, ChannelError, Closed, Drained, Empty
from flowchan.items.combining import Reduced, reduced
from flowchan.items.failed import Failed
from flowchan.items.text import short, shown
from flowchan.run.policy import journal
from flowchan.run.policy.failures import ItemFailed, OwnEnd, Portable, died_over, text_of
from flowchan.run.worker.keyed_call import Unroutable
from flowchan.run.worker.pace import Pace, wait_until
from flowchan.run.worker.requests import NOTHING, Answering, Dropped, bare, has_requests
from flowchan.run.worker.state_log import KeyedStates
from flowchan.run.worker.tracking import Tracking, unmarked

SKIPPED: Any = object()
FAILED_ITEM_INTERVAL_S = 0.5
"""Minimum number of seconds between two reports of failed items from one worker."""


@dataclass
class OperatorJob:
    """Inputs of an operator's loop apart from its ports: the function, options and failure handling."""

    kind: str
    function: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    retries: int = 0
    retry_delay: float | None = None
    retry_on: tuple[type[Exception], ...] = (Exception,)
    timeout: float | None = None  # for an async function; in a process, the function itself sets a timer
    pace: Pace | None = None  # for an async function; any other function itself waits for its starts
    errors: Out[Failed[Any]] | None = None
    states: KeyedStates | None = None  # set if the stage has a state for each key
    answering: Answering | None = None  # set if items may come from ask()
    tracking: Tracking | None = None  # set in a run that can be resumed
    on_retry: Callable[[], None] = lambda: None
    on_result: Callable[[Any], None] = lambda _: None
    on_failed_item: Callable[[str], None] = lambda _: None
    last_report_at: float = -FAILED_ITEM_INTERVAL_S
    on_clean_up: Callable[[], None] = lambda: None  # called when a task begins its cleanup
    unwanted: int = 0  # items whose branch lost its readers, or whose request was cancelled
    predecessors: tuple[str, ...] = ()  # causes of death of earlier workers that processed the first item
    too_late: bool = False  # true if the first item has timed out too often
    is_over: Callable[[], bool] = lambda: False  # returns whether a channel of the worker is broken

    def recover(self, call: Callable[[Any], Any], item: Any, error: BaseException) -> Any:
        """Retry ``call(item)`` after ``error`` and return its result, or fail the item and return SKIPPED."""
        if isinstance(error, ItemFailed):  # raised for a batch member that has already failed
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
        """Wait before a retry. Raise ``Broken`` if the run is aborted or fails before the wait is over."""
        wait_until(time.monotonic() + (self.retry_delay or 0.0), self.is_over, "retry")

    def without_failed(self, items: Any, results: Any) -> Any:
        """Return the results of a batch without those of members that failed.

        An exception in place of a result is the failure of that member. If the results cannot be matched to
        the members, the whole batch fails.
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
        """Send the failure of ``item`` to the errors stream, or to the caller of ``ask``.

        Raises :class:`ItemFailed` if the stage has no errors stream, or if ``error`` is not an ``Exception``.
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
        """Return the item as the user's functions know it."""
        return bare(item) if self.tracking is None else unmarked(item)

    def parts(self, item: Any, elements: Iterable[Any]) -> Iterable[Any]:
        """Return the elements that are put instead of ``item``."""
        return elements if self.tracking is None else self.tracking.parts(item, elements)

    def not_sent(self, out: Out[Any] | Addressed, item: Any, error: Exception) -> None:
        """Handle an error from putting the output for ``item``.

        If the error means that ``out`` has closed or broken, it is raised. Any other error is a failure of
        the item.
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
        """Drop ``item``. If it came from ``ask``, its caller receives an error."""
        if self.answering is not None:
            self.answering.drop_item(item)

    def drop_remaining(self, items: In[Any]) -> int:
        """Drop the remaining input items, whose outputs would have no reader, and return their number.

        Each caller of ``ask`` whose item was dropped receives an error.
        """
        number = 0
        if self.answering is not None:
            items.channel.close()
            items._on_poison(1, lambda *_: None)
            with contextlib.suppress(ChannelError, ValueError):  # drained, or closed by another thread
                while True:
                    item = items.get_nowait()
                    number += 1
                    self.drop_item(item)
        return number

    def count_unwanted(self) -> None:
        """Count one item that had no receiver."""
        self.unwanted += 1

    def poisoned(self, item: Any, deaths: int, error: Exception | None) -> None:
        """Fail an item that cannot be processed, so that the following items can be processed.

        Either ``item`` is an :class:`Unreadable` and ``error`` is the reason, or ``deaths`` workers have died
        while processing the item.
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
    """Return whether ``error`` from a put into ``out`` means that the channel of ``out`` has ended.

    When an item is pickled, its own code may raise the same exceptions for another channel.
    """
    return isinstance(error, Closed | Broken) and bool(out.channel.closed)


def source(job: OperatorJob, *, out: Out[Any]) -> None:
    """Put each element of the source's iterable."""
    iterable = job.options["iterable"] if "iterable" in job.options else job.function(*job.args, **job.kwargs)
    out.put_many(iterable if job.tracking is None else job.tracking.finished.tracked(iterable))


def map_(job: OperatorJob, *, items: In[Any], out: Out[Any]) -> None:
    """Put the function's result for each item."""
    function, put, members = job.function, out.put, "members" in job.options
    for item in items:
        try:
            result = function(item)
        except BaseException as error:
            result = job.recover(function, item, error)
        if members and result is not SKIPPED:
            result = job.without_failed(item, result)
        if result is not SKIPPED:
            try:
                put(result)
            except Exception as error:
                job.not_sent(out, item, error)
        del item, result  # release both before waiting for the next item


def filter_(job: OperatorJob, *, items: In[Any], out: Out[Any]) -> None:
    """Put each item for which the function returns true."""
    function, put = job.function, out.put
    for item in items:
        try:
            wanted = function(item)
        except BaseException as error:
            wanted = job.recover(function, item, error)
        if wanted is not SKIPPED and wanted:
            try:
                put(item)
            except Exception as error:
                job.not_sent(out, item, error)
        del item


def flat_map(job: OperatorJob, *, items: In[Any], out: Out[Any]) -> None:
    """Put every element that the function returns for each item, but only once if the item is retried."""
    function = job.function
    for item in items:
        emitted = 0  # number of outputs that a retry must not repeat

        def emit(item: Any) -> None:
            nonlocal emitted
            for number, output in enumerate(job.parts(item, _elements(function, item))):
                if number == emitted:
                    put_or_end(out, output)
                    emitted += 1

        _emit_outputs(job, emit, item)
        del item


def unbatch(job: OperatorJob, *, items: In[Any], out: Out[Any]) -> None:
    """Put the elements of each item one at a time."""
    tracking = job.tracking
    for item in items:

        def emit(item: Any) -> None:
            for place, element in enumerate(item if tracking is None else tracking.unbatched(item)):
                try:
                    put_or_end(out, element)
                except OwnEnd:
                    if has_requests(item):
                        job.drop_item(item[place:])
                    raise

        _emit_outputs(job, emit, item)
        del item


def put_or_end(out: Out[Any], output: Any) -> None:
    """Put an output while the user's iterator is running. Raise OwnEnd if ``out`` has ended."""
    try:
        out.put(output)
    except Exception as error:
        if is_end_of(out, error):
            raise OwnEnd from error
        raise


def _elements(function: Callable[[Any], Iterable[Any]], item: Any) -> Iterable[Any]:
    elements = function(item)
    if not isinstance(elements, Iterable):
        raise TypeError(f"flat_map: function must return an iterable, got {shown(elements)}")
    return elements


def _emit_outputs(job: OperatorJob, emit: Callable[[Any], Any], item: Any) -> None:
    """Call ``emit(item)``, which puts outputs while the user's iterator is running, and handle its errors."""
    try:
        emit(item)
    except OwnEnd as end:
        raise end.__cause__ or Closed from None
    except BaseException as error:
        job.recover(emit, item, error)


def sink(job: OperatorJob, *, items: In[Any]) -> None:
    """Call the function with each item."""
    function = job.function
    for item in items:
        try:
            function(item)
        except BaseException as error:
            job.recover(function, item, error)
        del item


def collect(job: OperatorJob, *, items: In[Any], out: Out[list[Any]] | None = None) -> None:
    """Collect all items in one list, and report the list as a result."""
    gathered: list[Any] = []
    with contextlib.suppress(Drained):
        while True:
            arrived = items.get_many(1024)
            if job.tracking is None:
                gathered.extend(arrived)
            else:
                gathered.extend(unmarked(arrived))
                job.tracking.left(arrived)
    job.on_result(gathered)
    if out is not None:
        out.put(gathered)


def reduce(job: OperatorJob, *, items: In[Any], out: Out[Any] | None = None) -> None:
    """Fold all items into one value, and report the value as a result."""
    total = copy.deepcopy(job.options["initial"]) if "initial" in job.options else SKIPPED
    for item in items:
        if total is SKIPPED:
            total = item
            continue
        total_so_far = total

        def fold(item: Any, total_so_far: Any = total_so_far) -> Any:
            return job.function(total_so_far, item)

        try:
            total = fold(item)
        except BaseException as error:
            result = job.recover(fold, item, error)
            total = total_so_far if result is SKIPPED else result
    if total is SKIPPED:
        raise TypeError("reduce: initial must be passed if the stream has no items")
    job.on_result(total)
    if out is not None:
        out.put(total)


def batch(job: OperatorJob, *, items: In[Any], out: Out[list[Any]]) -> None:
    """Put lists of ``size`` items. After the timeout or at the end, a list may be shorter."""
    size, timeout = job.options["size"], job.options["timeout"]
    while True:
        try:
            group = items.get_many(size)
        except Drained:
            return
        deadline = None if timeout is None else time.monotonic() + timeout
        while len(group) < size:
            try:
                group.append(
                    items.get_more(None if deadline is None else max(0.0, deadline - time.monotonic()))
                )
            except (Empty, Drained):
                break
        job.pass_on(out, group)


def take(job: OperatorJob, *, items: In[Any], out: Out[Any]) -> None:
    """Pass on the first ``n`` items, and do not take any more."""
    remaining = job.options["n"]
    if remaining == 0:
        return
    for item in items:
        job.pass_on(out, item)
        remaining -= 1
        if remaining == 0:
            return


def tee(job: OperatorJob, *, items: In[Any], **outs: Out[Any]) -> None:
    """Put each item into every branch that still has readers."""
    branches = list(outs.values())
    for item in items:
        copies = [item] * len(branches) if job.tracking is None else job.tracking.copies(item, len(branches))
        for out, copied in zip(list(branches), copies, strict=True):
            # each branch removes requests from its own list
            own = job.answering is not None and has_requests(item)
            try:
                out.put(list(item) if own else copied)
            except Closed:  # the readers of this branch have left, but other branches may have readers
                branches.remove(out)
        if not branches:
            job.drop_item(item)
            return


def partition(job: OperatorJob, *, items: In[Any], **outs: Out[Any]) -> None:
    """Put each item into the branch for its key."""
    branches: dict[int, Out[Any]] = {int(port): out for port, out in outs.items()}
    n = job.options["n"]
    for item in items:
        try:
            key = job.function(item)
            branch = bucket_of(key) % n
        except BaseException as error:
            branch = job.recover(lambda item: bucket_of(job.function(item)) % n, item, error)
            if branch is SKIPPED:
                continue
        if branch not in branches:
            job.unwanted += 1
            job.drop_item(item)
            continue
        try:
            branches[branch].put(item)
        except Exception as error:
            # the readers of this branch have left, but other branches may have readers
            if isinstance(error, Closed) and is_end_of(branches[branch], error):
                job.unwanted += 1
                job.drop_item(item)
                del branches[branch]
            else:
                job.not_sent(branches[branch], item, error)
        if not branches:
            return


_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15  # 2**64 divided by the golden ratio (Knuth, TAOCP vol. 3, section 6.4)


def route(job: OperatorJob, *, items: In[Any], out: Addressed) -> None:
    """Put each item into the channel of a worker that processes its key.

    With ``spread=m``, the items of a key go to m consecutive workers. Multiples of the golden ratio choose
    one of them, because these are evenly distributed over every regular series of items.
    """
    function, put, workers, spread = job.function, out.put, len(out.ports), job.options["spread"]

    def poisoned(item: Any, deaths: int, error: Exception | None) -> None:
        carried: Any = Portable(error) if error is not None and out.channel.transport.copies else error
        put((1, Unroutable(item, carried, deaths)))

    items._on_poison(1, poisoned)
    for number, item in enumerate(items):
        try:
            worker = bucket_of(function(item)) + (((number * _GOLDEN) & _MASK) * spread >> 64)
        except BaseException:  # the worker calls the key function again and reports the error
            worker = 0
        try:
            put((worker % workers + 1, item))
        except Exception as error:
            job.not_sent(out, item, error)
        del item


def bucket_of(key: Any) -> int:
    """Return an integer for ``key`` that is equal for equal keys.

    For built-in types it is the same in every process, unlike the ``hash`` of a string.
    """
    if isinstance(key, str):
        return zlib.crc32(key.encode("utf-8", "surrogatepass"))
    if isinstance(key, bytes):
        return zlib.crc32(key)
    if isinstance(key, tuple):
        number = 0
        for part in key:
            number = number * 1_000_003 ^ bucket_of(part)
        return number
    if isinstance(key, frozenset):
        return sum(map(bucket_of, key))
    if key is None:
        return 0
    if isinstance(key, enum.Enum) and type(key).__hash__ is enum.Enum.__hash__:
        return bucket_of(key.name)
    return hash(key)


def zip_(job: OperatorJob, *, out: Out[tuple[Any, ...]], **inputs: In[Any]) -> None:
    """Put tuples with one item from each input until an input ends."""
    ports = list(inputs.values())
    while True:
        try:
            items = tuple([port.get() for port in ports])
        except Drained:
            return
        out.put(items)


def allreduce(job: OperatorJob, *, out: Out[Any], **inputs: In[Any]) -> None:
    """Put the combination of one item from each input that has not ended."""
    ports = dict(enumerate(inputs.values(), 1))
    op, to_workers = job.options.get("op", job.function), job.options["to_workers"]
    for number in itertools.count():
        items = []
        for worker, port in list(ports.items()):
            try:
                items.append(port.get())
            except Drained:
                del ports[worker]
        if not items:
            return
        try:
            value = reduced(items, op)
        except BaseException as error:
            error.add_note(f"in round {number} of allreduce, from {len(items)} workers")
            raise
        result = Reduced(value, len(items), number)
        for output in ((worker, result) for worker in ports) if to_workers else (result,):
            out.put(output)
        del items, value, result


def merge(job: OperatorJob, *, out: Out[Any], **inputs: In[Any]) -> None:
    """Pass on the items from one input. Each input has its own worker."""
    (items,) = inputs.values()
    for item in items:
        job.pass_on(out, item)


def stage(job: OperatorJob, **ports: In[Any] | Out[Any]) -> None:
    """Call the function of a general stage with all its ports."""
    job.function(**ports, **job.kwargs)
