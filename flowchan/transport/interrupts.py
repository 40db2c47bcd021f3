"""Protect code from Ctrl-C and from signal handlers that raise.

Python runs signal handlers between any two bytecodes of the main thread. Most programs have handlers that
raise: ``KeyboardInterrupt`` for Ctrl-C, ``TimeoutError`` for a time limit. Such an exception may interrupt
the code at any point. The tools in this file keep code correct even then:

- ``interrupts_deferred()``: a block that Ctrl-C and SIGTERM do not interrupt. The signals take effect when
  the block ends.
- ``interrupts_allowed()``: a long wait within such a block, during which signals take effect immediately.
- ``append_result(results, call, …)``: one native call whose result is never lost.
- ``unless_interrupted(OSError)``: in an ``except`` clause, matches errors that the call itself raised, but
  not errors from a signal handler during the call. ``is_interrupt(error)`` is the same test outside an
  ``except`` clause.
- ``InterruptWatch``: notices Ctrl-C and SIGTERM, and can replace the exception that they raise.
- ``terminate_as_interrupt()``: a block in which SIGTERM acts like Ctrl-C.

Algorithm. While a block defers signals or a watch is open, a ``_Layer`` is installed as the signal's handler.
The layer calls the handler below it, which is the program's own. All blocks and watches share one layer, so
they can end in any order. If the program installs another handler later, a second layer is installed above
that handler, and the first layer is never removed.

Invariants. A layer without blocks and watches only passes signals on. If an exception leaves such a layer
installed, the layer does no harm, and the next block removes it. A deferred signal is kept until it is
delivered. If several signals are deferred, only the first is delivered, because all of them ask the program
to end. The block counts all of them. Blocks have an effect only in the main thread, because Python runs
handlers only there.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, MutableSequence
from types import CodeType, FunctionType, MethodType
from typing import Any, TypeVar

T = TypeVar("T")
E = TypeVar("E", bound=BaseException)

DEFERRED = (signal.SIGINT, signal.SIGTERM)


# --- Blocks that are not interrupted ---


@contextlib.contextmanager
def interrupts_deferred() -> Iterator[DeferralBlock]:
    """Defer Ctrl-C and SIGTERM until the block ends. Yield the block, which counts the deferred signals."""
    block = DeferralBlock()
    if not _in_main_thread():
        yield block
        return
    _blocks.append(block)
    try:
        for number in DEFERRED:
            _install(number)
        yield block
    finally:
        _blocks.remove(block)
        try:
            for number in DEFERRED:
                _restore(number)
        finally:
            _deliver()


@contextlib.contextmanager
def interrupts_allowed() -> Iterator[None]:
    """Let Ctrl-C and SIGTERM take effect immediately, inside a block that defers them.

    Use this for a long wait that leaves nothing half done.
    """
    blocks = list(_blocks) if _in_main_thread() else []
    try:
        for block in blocks:
            block.allows = True
        if blocks:
            _deliver()
        yield
    finally:
        for block in blocks:
            block.allows = False


def append_result(results: MutableSequence[T], call: Callable[..., T], *args: Any) -> None:
    """Call a native function and append its result, in a single step of the interpreter.

    An interrupt takes effect either before the call, or once its result is in ``results``. The caller
    therefore always knows what the call received or sent. To acquire a lock, call this in a ``try`` block
    with ``lock.acquire``. The ``finally`` clause then releases the lock if the list contains True.
    """
    results.extend(itertools.starmap(call, (args,)))


@contextlib.contextmanager
def terminate_as_interrupt() -> Iterator[None]:
    """Make SIGTERM raise :class:`Termination` in this block.

    Do nothing if the program has a handler for it, or if this is not the main thread.
    """
    if not _in_main_thread():
        yield
        return
    _begin_termination()
    try:
        yield
    finally:
        _end_termination()


class Termination(KeyboardInterrupt):
    """Raised instead of ``KeyboardInterrupt`` if the signal was SIGTERM."""

    signal = signal.SIGTERM


def signal_of(error: KeyboardInterrupt) -> int:
    """Return the number of the signal that caused an interrupt."""
    return getattr(error, "signal", signal.SIGINT)


def _begin_termination() -> None:
    """Install the SIGTERM handler, unless an event loop or the program handles the signal."""
    _terminating.append(os.getpid())
    asyncio: Any = sys.modules.get("asyncio")
    on_loop = asyncio is not None and asyncio._get_running_loop() is not None
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL and not on_loop:
        signal.signal(signal.SIGTERM, _terminate)


def _end_termination() -> None:
    """Remove the SIGTERM handler after the last block that needs it."""
    _terminating.pop()
    _restore(signal.SIGTERM)


def _terminate(number: int, frame: Any) -> None:
    if os.getpid() in _terminating:
        raise Termination
    # This process has no open block. It was forked inside a block, or the program reinstalled the handler
    # after the last block.
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


_terminating: list[int] = []
"""One entry, the process id, for each block or watch that makes SIGTERM raise ``Termination``."""


class _Forking(threading.local):
    """Signals that this thread blocked before a fork; ``None`` if it blocked none."""

    blocked_before: set[Any] | None = None


_forking = _Forking()


def _block_termination() -> None:
    """Block SIGTERM during a fork.

    Python forgets signals that a child receives before its Python handlers are in place.
    """
    if _terminating:
        _forking.blocked_before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _unblock_termination() -> None:
    before, _forking.blocked_before = _forking.blocked_before, None
    if before is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


os.register_at_fork(
    before=_block_termination, after_in_parent=_unblock_termination, after_in_child=_unblock_termination
)


# --- Errors of signal handlers ---


def unless_interrupted(*kinds: type[E]) -> tuple[type[E], ...]:
    """Return the exception types for an ``except`` clause that must not catch interrupts.

    ``except unless_interrupted(OSError) as error:`` catches a ``TimeoutError`` from the call itself, but not
    one that a signal handler raised during the call.
    """
    error = sys.exception()
    return () if error is not None and is_interrupt(error) else kinds


def is_interrupt(error: BaseException) -> bool:
    """Return whether a signal handler in this process raised the error, or the error ends the program.

    The interrupted call did not cause such an error. ``KeyboardInterrupt``, for example, ends the program.
    """
    if not isinstance(error, Exception):
        return True
    called = list(_called(error))
    if not called:  # native code raised the error, such as a pickling error
        return False
    handlers = {_code(handler) for number in signal.valid_signals() if (handler := _handler(number))}
    return not handlers.isdisjoint(called)


def _called(error: BaseException) -> Iterator[CodeType]:
    """Yield the code of each Python function that the error has left on its way to the handler."""
    trace = error.__traceback__ and error.__traceback__.tb_next
    while trace is not None:
        yield trace.tb_frame.f_code
        trace = trace.tb_next


def _handler(number: int) -> Any:
    """Return the program's own handler of a signal."""
    handler = None
    with contextlib.suppress(ValueError):  # some systems reserve certain signals
        handler = signal.getsignal(number)
        while isinstance(handler, _Layer):
            handler = handler.below
    return handler


def _code(handler: Any) -> CodeType | None:
    while isinstance(handler, functools.partial):
        handler = handler.func
    if isinstance(handler, MethodType):
        handler = handler.__func__
    elif callable(handler) and not isinstance(handler, FunctionType):
        handler = type(handler).__call__
    code: CodeType | None = getattr(handler, "__code__", None)
    return code


# --- Noticing a Ctrl-C ---


class InterruptWatch:
    """Notices Ctrl-C while the watch is open, and makes SIGTERM raise :class:`Termination`.

    A generator needs a watch, because an interrupted loop only closes its generator. The watch may be opened
    several times, and ends when it has been closed the same number of times.

    Attributes:
        seen: True if Ctrl-C or SIGTERM has raised ``KeyboardInterrupt``.
        handled: True if Ctrl-C was pressed, but the program's own handler did not raise. The handler of
            asyncio is an example.
    """

    def __init__(self, instead: Callable[[int], KeyboardInterrupt | None]) -> None:
        """Create a watch.

        ``instead`` returns the exception to raise in place of ``KeyboardInterrupt`` for a signal, or None.
        """
        self.seen = self.handled = False
        self._instead = instead
        self._raised: Callable[[], KeyboardInterrupt | None] = lambda: None
        self._opened = 0
        self._layers: dict[int, _Layer] = {}
        self._terminates = False

    def open(self) -> None:
        self._opened += 1
        if self._opened == 1 and _in_main_thread():
            self._terminates = True
            _begin_termination()
            numbers = [signal.SIGINT, *([signal.SIGTERM] if _handler(signal.SIGTERM) is _terminate else [])]
            self._layers = {number: layer for number in numbers if (layer := _install(number)) is not None}
            for layer in self._layers.values():
                layer.watches.append(self)

    def close(self) -> None:
        self._opened -= 1
        if self._opened == 0 and self._terminates:
            self._terminates = False
            for layer in self._layers.values():
                layer.watches.remove(self)
            self._layers = {}
            _restore(signal.SIGINT)
            _end_termination()

    def still_raised(self) -> KeyboardInterrupt | None:
        """Return the exception that replaced ``KeyboardInterrupt``, if that exception is still being handled.

        Return None if it was caught and dropped.
        """
        return self._raised()

    def _replace(self, error: KeyboardInterrupt) -> KeyboardInterrupt:
        """Return the exception to raise for this error: a watch's replacement, or the error itself."""
        self.seen = True
        if type(error) in (KeyboardInterrupt, Termination):
            error = self._instead(signal_of(error)) or error
        if type(error) is not KeyboardInterrupt:  # only instances of subclasses can be weakly referenced
            self._raised = weakref.ref(error)
        return error


# --- The handlers ---


class DeferralBlock:
    """Block that defers interrupts.

    Attributes:
        deferred: Number of signals deferred so far. Only the first is delivered, so this number reveals a
            second Ctrl-C.
        allows: True during a wait that may be interrupted.
    """

    deferred = 0
    allows = False


class _Layer:
    """Signal handler that is installed while any block or watch is in use.

    ``below`` is the previous handler.
    """

    def __init__(self, below: Callable[[int, Any], object]) -> None:
        self.below = below
        self.watches: list[InterruptWatch] = []

    def __call__(self, number: int, frame: Any) -> None:
        if _defers():
            _deferred.append((self, number, frame))
            for block in _blocks:
                block.deferred += 1
        else:
            self.deliver(number, frame)

    def deliver(self, number: int, frame: Any) -> None:
        """Call the program's handler, and report the signal to all watches, oldest first."""
        watches = list(self.watches)
        try:
            self.below(number, frame)
            for watch in watches:
                watch.handled = True
            return
        except KeyboardInterrupt as error:
            instead: KeyboardInterrupt = error
            for watch in watches:
                instead = watch._replace(instead)
            if instead is error:
                del instead
                raise
        try:
            raise instead
        finally:
            # This frame is in the error's traceback, so this reference would make the error count as "still
            # raised".
            del instead


_blocks: list[DeferralBlock] = []
_deferred: list[tuple[_Layer, int, Any]] = []


def _defers() -> bool:
    return bool(_blocks) and not _blocks[-1].allows


def _deliver() -> None:
    """Deliver the first deferred signal, unless an outer block still defers it."""
    if _deferred and not _defers():
        layer, number, frame = _deferred[0]
        _deferred.clear()
        layer.deliver(number, frame)


def _install(number: int) -> _Layer | None:
    """Return the top layer of a signal's handlers, and install a layer if necessary.

    Return None if the signal's handler is not a Python function.
    """
    handler = signal.getsignal(number)
    if isinstance(handler, _Layer):
        return handler
    if not callable(handler):
        return None
    layer = _Layer(handler)
    signal.signal(number, layer)
    return layer


def _restore(number: int) -> None:
    """Remove the top layer if it is unused, and then the SIGTERM handler if no block needs it."""
    layer = signal.getsignal(number)
    if isinstance(layer, _Layer) and not layer.watches and not _blocks and _in_main_thread():
        signal.signal(number, layer.below)
    if signal.getsignal(number) is _terminate and not _terminating and _in_main_thread():
        signal.signal(number, signal.SIG_DFL)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
