"""C9: an exception from a signal handler, such as a time limit, ends a call in any state.

No item is lost.
"""

from __future__ import annotations

import functools
import os
import signal

import pytest

pytestmark = pytest.mark.copying


class TimeIsUp(Exception):
    """The exception that the signal handler raises."""


def raises(*_):
    raise TimeIsUp


class Handler:
    def method(self, *_):
        raise TimeIsUp

    def __call__(self, *_):
        raise TimeIsUp


HANDLERS = {
    "function": raises,
    "lambda": lambda *_: raises(),
    "method": Handler().method,
    "object": Handler(),
    "partial": functools.partial(raises, 1),
}
left = []


def end_of_time(value):
    """Raise the signal in each of the next ``left`` calls."""
    if left:
        left.pop()
        os.kill(os.getpid(), signal.SIGUSR1)
        for _ in range(1000):  # lets the handler run between two iterations
            pass
    return value


class Received:
    """An item whose unpickling raises the signal."""

    def __init__(self, value):
        self.value = value

    def __reduce__(self):
        return end_of_time, (self.value,)


class Sent:
    """An item whose pickling raises the signal."""

    def __init__(self, value):
        self.value = value

    def __reduce__(self):
        return str, (end_of_time(self.value),)


@pytest.fixture(params=HANDLERS)
def handler(request):
    before = signal.signal(signal.SIGUSR1, HANDLERS[request.param])
    left.append(1)
    yield
    left.clear()
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("port", [False, True])
def test_interrupted_get_takes_nothing(make, handler, port):
    ch = make()
    ch.put_many([Received("first"), "behind"])
    end = ch.reader() if port else ch
    with pytest.raises(TimeIsUp):
        end.get()
    assert (len(ch), ch.stats().leased) == (2, 0)
    assert end.get_many(2) == ["first", "behind"]


def test_interrupted_get_many_returns_the_items_already_taken(make, handler):
    ch = make()
    ch.put_many([1, Received(2), 3])
    with pytest.raises(TimeIsUp) as caught:
        ch.get_many(3)
    assert caught.value.items_got == [1]
    assert ch.get_many(3) == [2, 3]


def test_interrupted_put_puts_nothing(make, handler):
    """The interrupted put does not retry with cloudpickle, although it would retry if pickle had failed."""
    ch = make()
    with pytest.raises(TimeIsUp) as caught:
        ch.put_many([1, Sent("second")])
    assert caught.value.items_put == 1
    assert ch.get_many(2) == [1]


def test_item_error_is_not_mistaken_for_a_handler_exception(make, handler):
    """The item's error has the same type as the handler's exception."""

    def fails():
        raise TimeIsUp

    class Fails:
        def __reduce__(self):
            return fails, ()

    ch = make()
    ch.put_many([Fails(), "behind"])
    with pytest.raises(TimeIsUp):
        ch.get()
    assert ch.get() == "behind"
