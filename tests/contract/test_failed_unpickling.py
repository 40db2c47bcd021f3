"""C1, C9: an item that cannot be unpickled, now or ever, causes no other item to be lost."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import signal

import numpy as np
import pytest

from flowchan import Channel, Drained, select

pytestmark = pytest.mark.copying

LARGE = 50_000  # bytes; such an item is copied or viewed without the lock


class NeverArrives:
    """An item that can be pickled but not unpickled."""

    def __init__(self, size=0, buffer=False):
        self.rest = np.zeros(size, "uint8") if buffer else b"x" * size

    def __reduce__(self):
        return fails, (self.rest,)


def fails(_):
    raise ArithmeticError("no way to read me back")


KINDS = {"small": (0, False), "large": (LARGE, False), "in view": (LARGE, True)}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("port", [False, True])
def test_get_many_returns_the_items_before_an_unreadable_one(make, kind, port):
    """C1: the next call raises the unreadable item's error, and the call after that returns later items."""
    ch = make(8)
    ch.put_many([1, "two", NeverArrives(*KINDS[kind]), [4]])
    ch.close()
    end = ch.reader() if port else ch
    assert end.get_many(8) == [1, "two"]
    with pytest.raises(ArithmeticError, match="no way"):
        end.get_many(8)
    assert end.get_many(8) == [[4]]
    with pytest.raises(Drained):
        end.get()


CALLS = {
    "get": lambda ch: ch.get(),
    "next": lambda ch: next(ch),
    "get_nowait": lambda ch: ch.get_nowait(),
    "select": lambda ch: select([ch]),
    "aget": lambda ch: asyncio.run(ch.aget()),
}


@pytest.mark.parametrize("call", CALLS)
def test_next_call_raises_the_error_of_the_unreadable_item(make, call):
    """C1: the error comes before later items, and before Drained."""
    ch = make(8)
    ch.put_many([1, NeverArrives()])
    ch.close()
    assert ch.get_many(8) == [1]
    assert not ch.drained
    with pytest.raises(ArithmeticError):
        CALLS[call](ch)
    assert ch.drained


class Once:
    """An item whose first unpickling raises ``error`` and whose second succeeds."""

    error: BaseException | None = None

    def __init__(self, size=0, buffer=False):
        self.rest = np.arange(size, dtype="uint8") if buffer else bytes(size)

    def __reduce__(self):
        return arrives, (self.rest,)


def arrives(rest):
    error, Once.error = Once.error, None
    if error is not None:
        raise error
    return ("whole", len(rest))


NOT_NOW = [(MemoryError,), (KeyboardInterrupt,)]
NOT_NOW += [(OSError, number, "") for number in (errno.EMFILE, errno.ENFILE, errno.ENOMEM)]


@pytest.mark.each_pair
@pytest.mark.parametrize("error", NOT_NOW, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("port", [False, True])
def test_item_that_cannot_be_received_now_is_put_back(make, error, kind, port):
    """C9: the failed item is again the next item for any reader, even in a full channel."""
    ch = make(3)
    size, buffer = KINDS[kind]
    ch.put_many([Once(size, buffer), "behind", "last"])
    end = ch.reader() if port else ch
    kind_of_error, *arguments = error
    Once.error = kind_of_error(*arguments)
    with pytest.raises(kind_of_error):
        end.get()
    stats = ch.stats()
    assert (stats.inside, stats.leased, stats.items_out) == (3, 0, 0)
    assert ch.get() == ("whole", size)
    assert end.get_many(3) == ["behind", "last"]


def test_item_that_was_put_back_precedes_later_items(make, spawn_peer):
    """C1, C2: the channel may exceed its capacity. The writer that took the free place does not wait."""
    ch = make(1)
    ch.put(Once())
    writer = spawn_peer(ch.put_many, ["second", "third"])
    Once.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        ch.get()
    assert ch.get() == ("whole", 0)
    assert [ch.get(), ch.get()] == ["second", "third"]
    writer.result()


def test_only_the_failed_item_of_a_batch_is_put_back(make):
    """C1: the reader keeps the earlier items of the batch; only the failed item is put back."""
    ch = make(8)
    ch.put_many([1, 2, Once(), 4])
    end = ch.reader()
    assert [end.get(), end.get_more()] == [1, 2]
    Once.error = MemoryError()
    with pytest.raises(MemoryError):
        end.get_more()
    assert (ch.stats().leased, len(ch)) == (2, 2)
    assert [end.get_more(), end.get_more()] == [("whole", 0), 4]
    end.close()
    assert ch.stats().leased == 0


def test_ctrl_c_in_get_many_reports_the_items_already_taken(make):
    """C9: Ctrl-C ends the call at once, and the exception contains the items that the call has taken."""
    ch = make(8)
    ch.put_many([1, Once(), 3])
    Once.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt) as caught:
        ch.get_many(8)
    assert caught.value.items_got == [1]
    assert ch.get_many(8) == [("whole", 0), 3]


def interrupted():
    os.kill(os.getpid(), signal.SIGINT)
    for _ in range(1000):  # lets the handler run between two iterations
        pass
    return "never"


class Interrupts:
    def __reduce__(self):
        return interrupted, ()


def test_ctrl_c_while_unpickling_takes_nothing(make):
    """C9: an interrupted call takes no item that it cannot return."""
    ch = make(2)
    ch.put_many([Interrupts(), "behind"])
    with pytest.raises(KeyboardInterrupt):
        ch.get()
    assert len(ch) == 2


def open_all():
    """Open descriptors up to the limit of the process."""
    while True:
        try:
            yield os.open("/dev/null", os.O_RDONLY)
        except OSError:
            return


@pytest.mark.other_process
@pytest.mark.not_hosts("receiving needs a connection, which is retried for a while")
def test_channel_can_be_received_after_a_shortage_of_descriptors(make, spawn_peer, transport):
    """C14: the error names the shortage and a remedy, and the item stays in its channel."""
    carrier = make()

    def receive():
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        taken = list(open_all())
        with pytest.raises(
            OSError, match=r"can't be received now and stays in its channel.*ulimit -n"
        ) as caught:
            carrier.get()
        assert caught.value.errno == errno.EMFILE
        for fd in taken:
            os.close(fd)
        return carrier.get().get()

    peer = spawn_peer(receive)
    sent = transport.make()  # made after the peer's start, so that the peer has not inherited it
    sent.put("inside")
    carrier.put(sent)
    assert peer.result() == "inside"


def test_threads_channel_returns_the_object_without_unpickling():
    """C13: the object itself is passed."""
    ch = Channel()
    ch.put_many([NeverArrives(), Once()])
    assert [type(item) for item in ch.get_many(2)] == [NeverArrives, Once]
