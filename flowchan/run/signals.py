"""Ctrl-C and SIGTERM around a run: held back where a half-done step would leave something behind, and noted
where it matters later that they came."""

from __future__ import annotations

import contextlib
import signal
import threading
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
    came: list[tuple[Any, ...]] = []
    handlers: dict[signal.Signals, Any] = {}
    for number in (signal.SIGINT, signal.SIGTERM):
        handler = signal.getsignal(number)
        if callable(handler):
            handlers[number] = handler
    for number in handlers:
        signal.signal(number, lambda *arguments: came.append(arguments))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for came_number, frame in came[:1]:
            handlers[signal.Signals(came_number)](came_number, frame)


class Ears:
    """Between ``open`` and ``close`` they note in ``heard`` that a Ctrl-C has raised ``KeyboardInterrupt``. A
    generator that is closed because its reader's loop is interrupted can't see that otherwise."""

    def __init__(self) -> None:
        self.heard = False
        self._usual: Callable[[int, Any], object] | None = None

    def open(self) -> None:
        usual = signal.getsignal(signal.SIGINT)
        if callable(usual) and threading.current_thread() is threading.main_thread():
            self._usual = usual
            signal.signal(signal.SIGINT, self._note)

    def close(self) -> None:
        """Does nothing when the program has set a handler of its own meanwhile."""
        main = threading.current_thread() is threading.main_thread()
        if self._usual is not None and main and signal.getsignal(signal.SIGINT) == self._note:
            signal.signal(signal.SIGINT, self._usual)

    def _note(self, number: int, frame: Any) -> None:
        assert self._usual is not None
        try:
            self._usual(number, frame)
        except KeyboardInterrupt:
            self.heard = True
            raise
