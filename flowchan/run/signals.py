"""Ctrl-C and SIGTERM around a run: held back where a half-done step would leave something behind, and noted
where it matters later that they came."""

from __future__ import annotations

import contextlib
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def terminate_as_interrupt() -> Iterator[None]:
    """Within it SIGTERM means what Ctrl-C means, unless the program has its own handler or this is no main
    thread."""
    usual = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if not usual or threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextlib.contextmanager
def interrupts_held() -> Iterator[None]:
    """Within it nothing is interrupted half-way: Ctrl-C and SIGTERM count when it is left."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers: dict[signal.Signals, Any] = {}
    for number in (signal.SIGINT, signal.SIGTERM):
        handler = signal.getsignal(number)
        if callable(handler):
            handlers[number] = handler
    held = _Held(handlers)
    for number in handlers:
        signal.signal(number, held.hear)
    _holding.append(held)
    try:
        yield
    finally:
        _holding.remove(held)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        held.count()


@contextlib.contextmanager
def interrupts_let_through() -> Iterator[None]:
    """Around a wait that may last long and leaves nothing half-done: within it, what was held back counts at
    once."""
    if threading.current_thread() is not threading.main_thread() or not _holding:
        yield
        return
    held = list(_holding)  # the handlers of one are those of the one around it
    try:
        for one in held:
            one.lets_through = True
        held[-1].count()
        yield
    finally:
        for one in held:
            one.lets_through = False


class _Held:
    """The signals that came and do not count yet. ``handlers``: what they are for when they do."""

    def __init__(self, handlers: dict[signal.Signals, Any]) -> None:
        self.lets_through = False
        self._handlers = handlers
        self._came: list[tuple[int, Any]] = []

    def hear(self, number: int, frame: Any) -> None:
        self._came.append((number, frame))
        if self.lets_through:
            self.count()

    def count(self) -> None:
        """The first of them counts; the others were the same wish."""
        came, self._came = self._came[:1], []
        for number, frame in came:
            self._handlers[signal.Signals(number)](number, frame)


_holding: list[_Held] = []
"""Those of the main thread."""


class Ears:
    """Between ``open`` and ``close`` they note in ``heard`` that a Ctrl-C has raised ``KeyboardInterrupt``. A
    generator that is closed because its reader's loop is interrupted can't see that otherwise. ``instead``:
    what is raised in its place, if anything."""

    def __init__(self, instead: Callable[[], KeyboardInterrupt | None]) -> None:
        self.heard = False
        self.handled = False  # one came, and the program's own handler, asyncio's for example, took it
        self._instead = instead
        self._raised: Callable[[], KeyboardInterrupt | None] = lambda: None
        self._usual: Callable[[int, Any], object] | None = None
        self._opened = 0

    def open(self) -> None:
        self._opened += 1
        usual = _in_use(signal.getsignal(signal.SIGINT))
        main = threading.current_thread() is threading.main_thread()
        if self._opened == 1 and callable(usual) and main:
            self._usual = usual
            signal.signal(signal.SIGINT, self._note)

    def close(self) -> None:
        """Does nothing when the program has set a handler of its own meanwhile."""
        self._opened -= 1
        main = threading.current_thread() is threading.main_thread()
        ours = main and signal.getsignal(signal.SIGINT) == self._note
        if self._opened == 0 and self._usual is not None and ours:
            signal.signal(signal.SIGINT, _in_use(self._usual))

    def still_raised(self) -> KeyboardInterrupt | None:
        """What was raised instead, unless somebody has caught it and done with it."""
        return self._raised()

    def _note(self, number: int, frame: Any) -> None:
        assert self._usual is not None
        try:
            self._usual(number, frame)
            self.handled = True
            return
        except KeyboardInterrupt as error:
            self.heard = True
            if type(error) is not KeyboardInterrupt:  # of another run
                self._raised = weakref.ref(error)
                raise
            instead = self._instead() if self._opened else None
            if instead is None:
                raise
            self._raised = weakref.ref(instead)
        try:
            raise instead
        finally:
            del instead  # or its traceback would keep it, and it would count as still raised


def _in_use(handler: Any) -> Any:
    """The handler without those of closed ears, above and below: who opens and closes in turn with others
    can't take its own out of the middle."""
    while isinstance(ears := getattr(handler, "__self__", None), Ears):
        if ears._opened:
            ears._usual = _in_use(ears._usual)
            break
        handler = ears._usual
    return handler
