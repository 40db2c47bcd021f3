"""Define the loops of the operators for ``async def`` functions.

They correspond to the loops in ``operator_loops.py``, but await where those loops block. With ``workers=n``,
a stage runs n tasks in one event loop. Each task has its own ports. Ordering, errors, retries and ends
therefore work as they do with n threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator
from typing import Any

from flowchan.channel.channel import In, Out
from flowchan.errors import Closed
from flowchan.run.policy.failures import OwnEnd
from flowchan.run.worker.item_timeout import set_message
from flowchan.run.worker.operator_job import SKIPPED, OperatorJob, is_end_of


async def _call(job: OperatorJob, item: Any) -> Any:
    """Call the function with ``item``. After an error, retry as often as the stage allows.

    Return the result, or SKIPPED if the item finally failed.
    """
    for attempt in range(1, job.retries + 2):
        await _wait_for_start(job)
        try:
            async with asyncio.timeout(job.timeout) as limit:
                return await job.function(item)
        except BaseException as error:
            set_message(f"the worker took longer than timeout={job.timeout} s", error, limit)
            if attempt > job.retries or not isinstance(error, job.retry_on):
                job.give_up(item, error, attempt)
                return SKIPPED
            job.on_retry()
            await asyncio.sleep(job.retry_delay or 0.0)
    raise AssertionError("the loop above returns or raises")


async def _wait_for_start(job: OperatorJob) -> None:
    """Wait until the next item or retry may start, if the stage has a rate limit."""
    if job.pace is not None:
        await asyncio.sleep(max(0.0, job.pace.take_start() - time.monotonic()))


async def _put(job: OperatorJob, out: Out[Any], item: Any, output: Any) -> None:
    try:
        await out.aput(output)
    except Exception as error:
        job.not_sent(out, item, error)


async def source(job: OperatorJob, *, out: Out[Any]) -> None:
    """Put each element of the iterable that the function returns."""
    elements = _elements(job.function(*job.args, **job.kwargs))
    if job.tracking is not None:
        elements = job.tracking.finished.tracked_later(elements)
    try:
        async for element in elements:
            await out.aput(element)
    finally:
        job.on_clean_up()
        await elements.aclose()


async def map_(job: OperatorJob, *, items: In[Any], out: Out[Any]) -> None:
    """Put the awaited result of the function for each item."""
    async for item in items:
        result = await _call(job, item)
        if "members" in job.options and result is not SKIPPED:
            result = job.without_failed(item, result)
        if result is not SKIPPED:
            await _put(job, out, item, result)
        del item, result


async def filter_(job: OperatorJob, *, items: In[Any], out: Out[Any]) -> None:
    """Put each item for which the awaited result is true."""
    async for item in items:
        wanted = await _call(job, item)
        if wanted is not SKIPPED and wanted:
            await _put(job, out, item, item)
        del item, wanted


async def flat_map(job: OperatorJob, *, items: In[Any], out: Out[Any]) -> None:
    """Put all elements that the function returns for each item. A retry puts no element twice."""
    async for item in items:
        emitted = 0  # number of outputs that a retry must skip
        for attempt in range(1, job.retries + 2):
            await _wait_for_start(job)
            try:
                async with (
                    asyncio.timeout(job.timeout) as limit,
                    contextlib.aclosing(_parts(job, item)) as elements,
                ):
                    number = 0
                    async for output in elements:
                        if number == emitted:
                            async with _does_not_count(limit):
                                await _put_or_end(out, output)
                            emitted += 1
                        number += 1
                break
            except OwnEnd as end:
                raise end.__cause__ or Closed from None
            except BaseException as error:
                set_message(f"the worker took longer than timeout={job.timeout} s", error, limit)
                if attempt > job.retries or not isinstance(error, job.retry_on):
                    job.give_up(item, error, attempt)
                    break
                job.on_retry()
                await asyncio.sleep(job.retry_delay or 0.0)
        del item


@contextlib.asynccontextmanager
async def _does_not_count(limit: asyncio.Timeout) -> AsyncIterator[None]:
    """Stop the item's time limit while the worker waits for room in its output."""
    until, clock = limit.when(), asyncio.get_running_loop().time
    remaining = None if until is None else until - clock()
    limit.reschedule(None)
    yield
    limit.reschedule(None if remaining is None else clock() + remaining)


async def _put_or_end(out: Out[Any], output: Any) -> None:
    try:
        await out.aput(output)
    except Exception as error:
        if is_end_of(out, error):
            raise OwnEnd from error
        raise


def _parts(job: OperatorJob, item: Any) -> AsyncGenerator[Any, None]:
    elements = _elements(job.function(item))
    return elements if job.tracking is None else job.tracking.parts_later(item, elements)


async def _elements(called: Any) -> AsyncGenerator[Any, None]:
    """Yield the elements of an async iterator, or of an iterable that a coroutine returns.

    An async generator is closed as soon as its consumer stops iterating over it.
    """
    if not isinstance(called, AsyncIterable):
        for element in await called:
            yield element
        return
    try:
        async for element in called:
            yield element
    finally:
        if isinstance(called, AsyncGenerator):
            await called.aclose()


async def sink(job: OperatorJob, *, items: In[Any]) -> None:
    """Call the function with each item, and await it."""
    async for item in items:
        await _call(job, item)
        del item


async def stage(job: OperatorJob, **ports: In[Any] | Out[Any]) -> None:
    """Call the function of a general stage with all its ports, and await it."""
    await job.function(**ports, **job.kwargs)
