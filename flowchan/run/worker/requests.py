"""Send requests through a running graph: ``await run.ask(stream, item)``.

``ask`` sends its item in a numbered :class:`Request`. In each worker, a wrapper around the user's function
unwraps the item and wraps the result again. At the end of the graph, the number identifies the caller that
gets the result. If the item fails, a worker event carries the error to the caller.

A cancelled request is marked on a board. The next worker that takes its item drops the item.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import pickle
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flowchan.declare.callables import is_async
from flowchan.declare.values import Stage
from flowchan.errors import Full
from flowchan.items.arguments import whole
from flowchan.items.codec import Packed, Unreadable, pack, unpack
from flowchan.items.sampled_item import SampledItem
from flowchan.items.text import short
from flowchan.run.policy.events import Answered, Event, WorkerId
from flowchan.run.policy.failures import Portable, text_of
from flowchan.run.policy.plan import Plan
from flowchan.run.worker.cancelled_requests import CancelledRequests, is_cancelled
from flowchan.transport.descriptors import shortage

if TYPE_CHECKING:
    import asyncio

NOTHING: Any = object()
_PLAIN = frozenset((str, bytes, int, float, bool, type(None)))
"""Types whose values every process can unpickle."""


@dataclass(frozen=True, slots=True)
class Request:
    """Item of one ``ask`` call, with the call's number and the path of the board that shows cancellations."""

    question: int
    item: Any
    board: str

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the item separately: if it cannot be unpickled, the request itself must still arrive."""
        if type(self.item) in _PLAIN:
            return Request, (self.question, self.item, self.board)
        return _arrived, (self.question, pack(self.item), self.board)


def _arrived(question: int, packed: Packed, board: str) -> Request:
    item: Any
    try:
        item = unpack(packed)
    except Exception as error:
        if isinstance(error, MemoryError) or (isinstance(error, OSError) and shortage("the item", error)):
            raise  # memory or descriptors have run out, so a later attempt may succeed
        item = NotRead(error)
    return Request(question, item, board)


class _Unknown:
    """Placeholder for any object that is not a request, while a pickle is searched for requests."""

    def __new__(cls, *_: Any, **__: Any) -> _Unknown:
        return object.__new__(cls)

    def _nothing(self, *_: Any) -> None: ...

    __setstate__ = append = extend = add = update = __setitem__ = _nothing


class _Questions(pickle.Unpickler):
    """Unpickler that creates only the requests in a pickle, so that the search runs no user code."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == (SampledItem.__module__, SampledItem.__name__):
            return _bare
        requests = module == __name__ and name in (Request.__name__, _arrived.__name__)
        return _question if requests else _Unknown


def _bare(item: Any, _: Any) -> Any:
    """Return the item that a box contains."""
    return item


def _question(number: int, _: Any, board: str) -> Request:
    return Request(number, None, board)


def _questions_in(item: Unreadable) -> Any:
    """Return only the requests in an unreadable item, or ``None`` if its pickle cannot be searched."""
    try:
        return _Questions(io.BytesIO(item.data), buffers=itertools.repeat(b"")).load()
    except Exception:
        return None


class NotRead:
    """Placeholder for an item that could not be unpickled; ``error`` is the reason."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __reduce__(self) -> tuple[Any, ...]:
        return NotRead, (Portable(self.error),)

    def __repr__(self) -> str:
        return "<an item that can't be unpickled>"


class Dropped(BaseException):
    """Raised if no caller is waiting for the item's result any more."""


# --- in the workers ---


class Answering:
    """Handles the requests among one worker's items.

    ``sends`` is true if the worker's events go to another process.
    """

    def __init__(self, stage: Stage, worker: WorkerId, tell: Callable[[Event], None], sends: bool) -> None:
        self._stage = stage
        self._worker = worker
        self._tell = tell
        self._sends = sends

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the user's function so that it receives items without requests."""
        if self._stage.operator.calls != "item":
            return function

        async def call_later(item: Any) -> Any:
            wanted = self._wanted_part(item)
            return self._forwarded(wanted, await function(bare(wanted)))

        def call(item: Any) -> Any:
            wanted = self._wanted_part(item)
            return self._forwarded(wanted, function(bare(wanted)))

        return call_later if is_async(function) else call

    def _wanted_part(self, item: Any) -> Any:
        """Return the item if its caller is still waiting. Reduce a batch to its members with waiting callers.

        Raise ``Dropped`` if nothing is left, or the original error if the item could not be unpickled.
        """
        if type(item) is Request:
            if is_cancelled(item.question, item.board):
                raise Dropped
            if type(item.item) is NotRead:
                raise item.item.error
        elif has_requests(item):
            item[:] = [one for one in item if type(one) is not Request or self._is_usable(one)]
            if not item:
                raise Dropped
        return item

    def _is_usable(self, member: Request) -> bool:
        """Return whether a batch member is readable and its caller waits. Refuse an unreadable member."""
        if type(member.item) is NotRead:
            self.refuse(member, member.item.error)
        return type(member.item) is not NotRead and not is_cancelled(member.question, member.board)

    def _forwarded(self, item: Any, result: Any) -> Any:
        """Return the result for the next stage, and answer the requests that this stage completes."""
        operator, batch = self._stage.operator, has_requests(item)
        members = [item] if type(item) is Request else item if batch else []
        if operator.one_output:
            return self._wrapped(item, result)
        parts = result if _fits(result, item, batch) else [result] * len(members)
        for one, given in zip(members, parts, strict=True):
            if type(one) is Request and operator.ends:
                self.answer(one, given)
            elif type(one) is Request and operator.lets_go and not result:
                self.drop_item(one)
        return result

    def _wrapped(self, item: Any, result: Any) -> Any:
        """Wrap a result in the request of its item, for an operator with one output per item.

        In a batch, each member's result is wrapped. A result that is an exception goes to the member's
        caller instead.
        """
        if type(item) is Request:
            return Request(item.question, result, item.board)
        if not has_requests(item):
            return result
        if not _fits(result, item, True):
            raise TypeError(
                f"stage {self._stage.name!r}: the function must return a list of {len(item)} results for a "
                f"batch with items from ask(), got {short(result, 60)}"
            )
        given = []
        for one, part in zip(item, result, strict=True):
            if type(one) is not Request:
                given.append(part)
            elif not isinstance(part, Exception):
                given.append(Request(one.question, part, one.board))
            elif "members" in self._stage.options:
                given.append(part)  # without_failed() will report the failure
            else:
                self.refuse(one, part)
        return given

    def answer(self, item: Request, value: Any) -> None:
        """Send ``value`` to the caller as the answer to its request."""
        self._tell(Answered(self._worker, item.question, value, None))

    def refuse(self, item: Request, error: BaseException, failed: int = 0) -> None:
        """Answer a request with ``error``, and add ``failed`` to the number of failed items of the stage."""
        carried: Any = Portable(error) if self._sends else error
        self._tell(Answered(self._worker, item.question, None, carried, failed))

    def give_up(self, item: Any, error: BaseException) -> Any:
        """Report the failure of an item to its callers, and return the rest of the item.

        The rest of a batch consists of the members without a caller. If every member has a caller, return
        ``NOTHING`` and count one failed item. An unreadable item is returned whole unless every member has a
        caller.
        """
        requests: list[Request] = []
        if type(item) is Unreadable:
            others = without_requests(_questions_in(item), requests.append)
            remaining = NOTHING if others is NOTHING else item
        else:
            remaining = without_requests(item, requests.append)
        for index, one in enumerate(requests):
            self.refuse(one, error, failed=int(remaining is NOTHING and index == 0))
        return remaining

    def drop_item(self, item: Any) -> None:
        """Tell the callers of a dropped item that they get no answer."""
        error = LookupError(f"stage {self._stage.name!r} dropped the item, so it has no answer")
        without_requests(item, lambda one: self.refuse(one, error))


def answers_in(item: Any, settle: Callable[[int, Any, BaseException | None], None]) -> Any:
    """Send the answers in an item at an end of the graph to their callers.

    Args:
        item: An item, or a batch of items.
        settle: Function that takes a request's number, its answer and its error.

    Returns:
        The rest of the item: its members without a caller, or ``NOTHING``.
    """

    def answer(one: Request) -> None:
        if type(one.item) is NotRead:
            settle(one.question, None, one.item.error)
        else:
            settle(one.question, one.item, None)

    return without_requests(item, answer)


def without_requests(item: Any, found: Callable[[Request], object]) -> Any:
    """Call ``found`` with each request in an item. Return the item without its requests, or ``NOTHING``."""
    if not (type(item) is Request or has_requests(item)):
        return item
    members = [item] if type(item) is Request else item
    for one in members:
        if type(one) is Request:
            found(one)
    return [one for one in members if type(one) is not Request] or NOTHING


def has_requests(item: Any) -> bool:
    """Return whether the item is a batch that contains requests."""
    return type(item) is list and any(type(one) is Request for one in item)


def _fits(result: Any, item: Any, batch: bool) -> bool:
    """Return whether the result of a batch has one entry for each member."""
    return batch and isinstance(result, list) and len(result) == len(item)


def bare(item: Any) -> Any:
    """Return the item as the program put it, with requests replaced by their items."""
    if type(item) is Request:
        return item.item
    return [one.item if type(one) is Request else one for one in item] if has_requests(item) else item


# --- in the program ---


class Requests:
    """Keeps the unanswered requests of one run.

    ``failure`` returns the error of a failed run, or None. ``on_cancelled`` receives the number of each
    cancelled request.
    """

    def __init__(
        self, failure: Callable[[], BaseException | None], on_cancelled: Callable[[int], None]
    ) -> None:
        self._failure = failure
        self._on_cancelled = on_cancelled
        self._numbers = itertools.count(1)
        # For each request, by number: the stage of its input, and the future for its answer.
        self._open: dict[int, tuple[str, asyncio.Future[Any]]] = {}
        self._waiting_at: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._cancelled: CancelledRequests | None = None
        self._over = False

    @property
    def waiting(self) -> int:
        """Return the number of requests that wait for an answer."""
        return len(self._open)

    def begin(
        self, item: Any, stage: str, max_waiting: int | None = None
    ) -> tuple[Request, asyncio.Future[Any]]:
        """Start a request at the input ``stage``. Return the request and the future for its answer.

        Raise ``Full`` if ``max_waiting`` requests at this input already wait for answers.
        """
        import asyncio

        if max_waiting is not None:
            whole("ask", "max_waiting", max_waiting, 1)
        future = asyncio.get_running_loop().create_future()
        with self._lock:
            if self._over:
                raise self._why()
            if max_waiting is not None and self._waiting_at[stage] >= max_waiting:
                raise Full(
                    f"ask: max_waiting={max_waiting} requests at input {stage!r} have no answer yet; "
                    "try again later"
                )
            self._cancelled = self._cancelled or CancelledRequests()
            question = next(self._numbers)
            self._open[question] = stage, future
            self._waiting_at[stage] += 1
            return Request(question, item, self._cancelled.path), future

    def forget(self, question: int) -> None:
        """Cancel a request, because its caller no longer waits. Do nothing if it has been answered."""
        with self._lock:
            if self._take(question) is None or self._cancelled is None:
                return
            self._cancelled.mark_cancelled(question)
        self._on_cancelled(question)

    def settle(self, question: int, value: Any, error: BaseException | None) -> None:
        """Pass the first answer to a request to its caller, from any thread. Ignore later answers."""
        with self._lock:
            future = self._take(question)
        if future is not None:
            with contextlib.suppress(RuntimeError):  # the caller's event loop is closed
                future.get_loop().call_soon_threadsafe(_settle, future, value, error)

    def _take(self, question: int) -> asyncio.Future[Any] | None:
        """Remove an open request and return its future. The caller must hold the lock."""
        stage, future = self._open.pop(question, ("", None))
        if future is not None:
            self._waiting_at[stage] -= 1
        return future

    def end(self) -> None:
        """Answer all open requests with an error, because the run has ended."""
        with self._lock:
            self._over = True
            remaining, board, self._cancelled = list(self._open), self._cancelled, None
        for question in remaining:
            self.settle(question, None, self._why())
        if board is not None:
            board.close()

    def _why(self) -> BaseException:
        return self._failure() or RuntimeError("the run has ended without an answer to this item")


def _settle(future: asyncio.Future[Any], value: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(value)
    elif isinstance(error, StopIteration):  # set_exception() rejects StopIteration
        future.set_exception(RuntimeError(f"the item failed with {text_of(error)}"))
    else:
        future.set_exception(error)


def answering_ends(plan: Plan, stage: str) -> list[str]:
    """Return the names of the results that contain the answers to requests at the input ``stage``.

    Raise ``ValueError`` if items from this input reach an operator that does not return one output per item,
    or never reach a result or sink.
    """
    stages = {one.name: one for one in plan.graph.stages}
    found, now, seen = [], [stage], {stage}
    sinks = False
    while now:
        name = now.pop()
        operator = stages[name].operator
        readers = [edge.reader for edge in plan.edges if edge.writer == name and not edge.errors]
        if not operator.answers or (operator.gathers and readers):
            raise ValueError(
                f"ask: items from input {stage!r} must not reach {name!r}, because {operator.name} does "
                "not return one output per item; use other operators, or send IDs along"
            )
        if operator.gathers:
            found.append(name)
        sinks = sinks or operator.ends
        now += [reader for reader in readers if reader is not None and reader not in seen]
        seen.update(now)
    if not found and not sinks:
        raise ValueError(
            f"ask: items from input {stage!r} must reach a collect() or a sink(), which returns the answers"
        )
    return found
