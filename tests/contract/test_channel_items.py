"""C14: a channel can be put into another channel, unless the other channel reaches more processes or hosts.

Dropped channels and unread items are freed.
"""

from __future__ import annotations

import gc
import os
import weakref
from itertools import pairwise

import pytest
from support.waiting import wait_blocked

from flowchan import Channel, Drained


def test_a_channel_received_through_a_channel_is_the_same_channel(make):
    """C14: the original channel delivers items that were put into the received channel."""
    carrier, sent = make(1), make(3)
    carrier.put(sent)
    arrived = carrier.get()
    arrived.put(1)
    assert sent.get() == 1
    sent.put(2)
    assert arrived.get() == 2
    assert (arrived.capacity, arrived.across) == (3, sent.across)
    sent.close()
    assert arrived.closed


def test_a_peer_can_reply_through_a_received_channel(make, spawn_peer):
    """C14: the request contains the channel for the reply."""
    requests = make()

    def serve():
        for number, reply in requests:
            reply.put(number * number)
            reply.close()

    server = spawn_peer(serve)
    for number in range(10):
        reply = make(1)
        requests.put((number, reply))
        assert list(reply) == [number * number]
    requests.close()
    server.result()


@pytest.mark.not_hosts("the channel's owner ends as soon as it has received the items")
def test_channel_made_by_a_peer_works_after_it_was_sent(make, spawn_peer, transport):
    """C14: a channel made by another process works in both directions."""
    carrier = make(1)

    def offer():
        own = transport.make(2)
        carrier.put(own)
        return [own.get(), own.get()]

    peer = spawn_peer(offer)
    arrived = carrier.get()
    arrived.put_many(["from", "here"])
    assert peer.result() == ["from", "here"]


def test_peer_closes_a_sent_channel_while_the_sender_waits(make, spawn_peer):
    """Check C14 and C3."""
    carrier, sent = make(1), make(1)
    closer = spawn_peer(lambda: carrier.get().close())
    reader = spawn_peer(sent.get)
    wait_blocked(sent, readers=1)
    carrier.put(sent)
    closer.result()
    with pytest.raises(Drained):
        reader.result()


def test_channels_can_be_nested_in_items(make):
    """C14: a channel may be inside tuples, lists and dicts."""
    carrier, sent = make(), make()
    carrier.put({"replies": [sent, sent], "pair": (sent, 1)})
    item = carrier.get()
    item["replies"][0].put("a")
    item["replies"][1].put("b")
    item["pair"][0].put("c")
    assert sent.get_many(5) == ["a", "b", "c"]


def test_a_channel_can_be_sent_twice(make):
    """Check C14."""
    carrier, sent = make(), make()
    carrier.put_many([sent, sent])
    first, second = carrier.get_many(2)
    first.put(1)
    assert second.get() == 1


def test_channel_passes_through_many_processes(make, spawn_peer):
    """C14: the channel passes through several channels and returns to the process that made it.

    Each sender has ended before the next process receives the channel.
    """
    hops = [make(1) for _ in range(4)]
    sent = make()
    hops[0].put(sent)
    for source, target in pairwise(hops):
        spawn_peer(lambda source=source, target=target: target.put(source.get())).result()
    hops[-1].get().put("arrived")
    assert sent.get() == "arrived"


@pytest.mark.copying
def test_a_threads_channel_cannot_be_sent_to_another_process(make):
    """C14: the put raises an error that names the item, and has no other effect."""
    carrier = make()
    for item in (Channel(across="threads"), {"reply": Channel(across="threads")}):
        with pytest.raises((TypeError, ValueError), match="threads") as caught:
            carrier.put(item)
        assert "processes" in str(caught.value)
    assert len(carrier) == 0


@pytest.mark.copying
def test_a_processes_channel_can_be_put_into_a_threads_channel(make):
    """C14: a ``threads`` channel passes the object itself."""
    carrier, sent = Channel(across="threads"), make()
    carrier.put(sent)
    assert carrier.get() is sent


def test_channel_can_be_an_item_of_itself(make):
    """C14: an item that contains its own channel is useless, but its put must not hang."""
    ch = make()
    ch.put(ch)
    arrived = ch.get()
    arrived.put("through itself")
    assert ch.get() == "through itself"


class Cause(Exception):
    """An item that supports weak references."""


class Item:
    pass


def test_items_of_a_dropped_channel_are_freed():
    """The last reference to a channel frees its items too."""
    ch = Channel(across="threads")
    item = Item()
    reference = weakref.ref(item)
    ch.put_many([item, item])
    del item, ch
    gc.collect()
    assert reference() is None


def test_channel_keeps_no_reference_to_a_received_item():
    """A ``threads`` channel passes the object itself, so a kept reference would keep the object alive."""
    ch = Channel(across="threads")
    item = Item()
    reference = weakref.ref(item)
    ch.put(item)
    assert ch.get() is item
    del item
    assert reference() is None


def test_a_channel_that_contains_itself_is_collected():
    """A reference cycle through a ``threads`` channel must not leak."""
    ch = Channel(across="threads")
    item = Item()
    reference = weakref.ref(item)
    ch.put_many([ch, item])
    del item, ch
    gc.collect()
    assert reference() is None


def test_channel_referenced_by_its_abort_cause_is_collected():
    """An exception refers to all objects in its traceback."""
    ch = Channel(across="threads")
    cause = Cause(ch)
    reference = weakref.ref(cause)
    ch.abort(cause)
    del cause, ch
    gc.collect()
    assert reference() is None


@pytest.mark.not_hosts("the owner keeps a sent channel, even if the item is dropped")
def test_channels_in_dropped_unread_items_leave_no_open_descriptor(transport):
    """C12: many channels are filled with other channels and then dropped."""
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        outer, inner = transport.make(4), transport.make(4)
        inner.put_many([b"x" * 1_000, 2])
        outer.put(inner)
        del outer, inner
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def test_destructor_of_a_discarded_item_may_use_the_channel():
    """A ``threads`` channel holds no lock while it runs the destructor of an item."""
    ch = Channel(across="threads")
    seen = []

    class Curious:
        def __del__(self):
            seen.append((len(ch), ch.broken))

    ch.put_many([Curious(), Curious()])
    ch.abort()
    assert seen == [(0, True), (0, True)]
