"""Define the loops of the operators.

Each function is the loop of one operator. Like the function of a general stage, it takes items from ports and
puts items into ports; it also gets an :class:`OperatorJob`. The loop returns when its input is drained, or
raises ``Closed`` when its output has no readers; both are clean ends. Taking an item finishes the previous
one, so a loop takes the next item only after all work on the current one.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import time
from collections.abc import Callable, Iterable
from typing import Any

from flowchan import _core
from flowchan.channel.addressed import Addressed
from flowchan.channel.channel import In, Out
from flowchan.errors import Closed, Drained, Empty
from flowchan.items.buckets import bucket_of
from flowchan.items.combining import Reduced, reduced
from flowchan.items.text import shown
from flowchan.run.policy.failures import OwnEnd, Portable
from flowchan.run.worker.keyed_call import Unroutable
from flowchan.run.worker.operator_job import SKIPPED, OperatorJob, is_end_of
from flowchan.run.worker.requests import has_requests
from flowchan.run.worker.tracking import unmarked


def source(job: OperatorJob, *, out: Out[Any]) -> None:
    """Put each element of the source's iterable."""
    iterable = job.options["iterable"] if "iterable" in job.options else job.function(*job.args, **job.kwargs)
    out.put_many(iterable if job.tracking is None else job.tracking.finished.tracked(iterable))


def map_(job: OperatorJob, *, items: In[Any], out: Out[Any]) -> None:
    """Put the function's result for each item."""
    plain = isinstance(out, Out) and not {"members", "key"} & job.options.keys()
    if plain and items.channel.transport.copies and out.channel.transport.copies:
        _map_between_processes(job, items, out)
        return
    function = job.function
    for item in items:
        try:
            result = function(item)
        except BaseException as error:
            result = job.recover(function, item, error)
        _put_result(job, out, item, result)
        del item, result  # release both before waiting for the next item


def _map_between_processes(job: OperatorJob, items: In[Any], out: Out[Any]) -> None:
    """Run the loop in native code.

    The native code returns each item for which calling the function and putting the result is not enough.
    """
    while stopped := items._map(out, job.function):
        if isinstance(stopped, tuple):
            item, failure, returned = stopped
            del stopped
            if returned:
                assert isinstance(failure, Exception)
                job.not_sent(out, item, failure)
            else:
                try:
                    raise failure
                except BaseException as error:
                    result = job.recover(job.function, item, error)
                _put_result(job, out, item, result)
                del result
            del item, failure


def _put_result(job: OperatorJob, out: Out[Any], item: Any, result: Any) -> None:
    """Put the result for ``item``, unless the item failed and was skipped."""
    if "members" in job.options and result is not SKIPPED:
        result = job.without_failed(item, result)
    if result is not SKIPPED:
        try:
            out.put(result)
        except Exception as error:
            job.not_sent(out, item, error)


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
    """Put all elements that the function returns for each item. A retry puts no element twice."""
    function = job.function
    for item in items:
        emitted = 0  # number of outputs that a retry must skip

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
    """Put an output while the user's iterator runs. Raise ``OwnEnd`` if the channel of ``out`` has ended."""
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
    """Call ``emit(item)``, which puts outputs while the user's iterator runs, and handle its errors."""
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
    """Collect all items in one list, and report it as a result."""
    gathered: list[Any] = []
    # The list is needed only at the end of the input. This thread therefore sleeps briefly after each get, so
    # that one wake-up serves many items.
    naps = items.channel.transport.copies and job.tracking is None
    with contextlib.suppress(Drained):
        while True:
            arrived = items.get_many(1024)
            if job.tracking is None:
                gathered.extend(arrived)
                if naps:
                    items._nap()
            else:
                gathered.extend(unmarked(arrived))
                job.tracking.left(arrived)
    job.on_result(gathered)
    if out is not None:
        out.put(gathered)


def reduce(job: OperatorJob, *, items: In[Any], out: Out[Any] | None = None) -> None:
    """Fold all items into one value, and report it as a result."""
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
    """Put lists of ``size`` items, or of fewer items after the timeout or at the end of the input."""
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
    """Pass on the first ``n`` items, and then end."""
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
            # Each branch removes requests from its list, so each needs a separate list.
            own = job.answering is not None and has_requests(item)
            try:
                out.put(list(item) if own else copied)
            except Closed:  # this branch has no readers left, but other branches may have some
                branches.remove(out)
        if not branches:
            job.drop_item(item)
            return


def partition(job: OperatorJob, *, items: In[Any], **outs: Out[Any]) -> None:
    """Put each item into the branch that its key selects."""
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
            # This branch has no readers left, but other branches may have some.
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
    """Put each item into the channel of a worker that is responsible for the item's key.

    With ``spread=m``, m consecutive workers are responsible for a key. To choose one of them, the loop uses
    multiples of the golden ratio, which are evenly distributed for any regular sequence of items.

    An output that stays on another host arrives as a reference. The worker that made the output has already
    called the key function.
    """
    function, put, workers, spread = job.function, out.put, len(out.ports), job.options["spread"]
    reference = _core.Reference

    def poisoned(item: Any, deaths: int, error: Exception | None) -> None:
        carried: Any = Portable(error) if error is not None and out.channel.transport.copies else error
        put((1, Unroutable(item, carried, deaths)))

    items._on_poison(1, poisoned)
    for number, item in enumerate(items):
        try:
            first = item.worker if type(item) is reference else bucket_of(function(item))
            worker = first + (((number * _GOLDEN) & _MASK) * spread >> 64)
        except BaseException:  # the worker will call the key function again and report the error
            worker = 0
        try:
            put((worker % workers + 1, item))
        except Exception as error:
            job.not_sent(out, item, error)
        del item


def zip_(job: OperatorJob, *, out: Out[tuple[Any, ...]], **inputs: In[Any]) -> None:
    """Put tuples of one item from each input until an input ends."""
    ports = list(inputs.values())
    while True:
        try:
            items = tuple([port.get() for port in ports])
        except Drained:
            return
        out.put(items)


def allreduce(job: OperatorJob, *, out: Out[Any], **inputs: In[Any]) -> None:
    """Put one value per round, which combines one item from each input that has not ended."""
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
    """Pass on the items from one input. A merge runs one worker for each of its inputs."""
    (items,) = inputs.values()
    for item in items:
        job.pass_on(out, item)


def record(job: OperatorJob, *, items: In[Any], out: Out[Any]) -> None:
    """Write each item to a file, and pass it on unchanged.

    The worker is a thread of the program. Each item is written once, because both channels deliver each item
    once and a thread dies only with the program.
    """
    with job.options["recording"].opened() as writer:
        for item in items:
            writer.write(job.bare(item))
            try:
                out.put(item)
            except Exception as error:
                job.not_sent(out, item, error)
            del item


def stage(job: OperatorJob, **ports: In[Any] | Out[Any]) -> None:
    """Call the function of a general stage with all its ports."""
    job.function(**ports, **job.kwargs)
