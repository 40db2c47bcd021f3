"""C10: ``select(ready=...)`` returns a channel on which a get would not wait, and leaves the item there."""

from __future__ import annotations

import pytest
from support.peers import ProcessPeer, ThreadPeer
from support.waiting import no_waiters, wait_blocked

from flowchan import Broken, Channel, NothingReady, Selected, select


def moved(channel):
    """Return how many items were put, and how many were taken."""
    stats = channel.stats()
    return stats.items_in, stats.items_out


def test_select_ready_leaves_the_item_in_the_channel(make):
    """Check C10."""
    a, b = make(1), make(1)
    with pytest.raises(NothingReady, match="none of 2 operations"):
        select([a], ready=[b], timeout=0)
    b.put("item")
    for _ in range(2):
        assert select([a], ready=[b]) == Selected(b, None, put=False)
    assert (b.get(), sum(moved(a))) == ("item", 0)


def test_drained_channel_is_ready_unless_an_item_is_leased(make):
    """C4, C10: a channel with a leased item is not drained."""
    ch = make(1)
    keep, reader = ch.reader(), ch.reader()
    ch.put(1)
    ch.close()
    assert reader.get() == 1
    with pytest.raises(NothingReady):
        select(ready=[ch], timeout=0)
    reader.close()
    assert select(ready=[ch], timeout=0).channel is ch
    keep.close()


@pytest.mark.parametrize("kind", [ThreadPeer, ProcessPeer])
def test_closing_a_channel_ends_all_selects_on_ready(kind):
    """C3, C10: some selects wait for items, others for room."""
    across = "threads" if kind is ThreadPeer else "processes"
    work, full, stop = Channel(across=across), Channel(1, across=across), Channel(1, across=across)
    full.put("old")

    def wait(gets, puts):
        return select(gets, puts, ready=[stop]).item

    peers = [kind(wait, [work], []) for _ in range(3)] + [kind(wait, [], [(full, "new")]) for _ in range(2)]
    wait_blocked(stop, readers=5)
    stop.close()
    assert [peer.result() for peer in peers] == [None] * 5
    assert (moved(work), moved(full)) == ((0, 0), (1, 0))
    assert no_waiters(work, full, stop)


def test_select_on_ready_leaves_the_item_to_a_reader(make):
    """C8, C10: a reader must not sleep while there is an item that selects have seen but not taken."""
    for _ in range(30):
        ch = make(1)
        looking = [ThreadPeer(lambda ch=ch: select(ready=[ch])) for _ in range(2)]
        wait_blocked(ch, readers=2)
        plain = ThreadPeer(ch.get)
        wait_blocked(ch, readers=3)
        ch.put("item")
        assert plain.result() == "item"
        ch.close()  # a select may have missed the item before it was taken
        for looker in looking:
            looker.result()
        assert no_waiters(ch)


def test_select_on_ready_raises_broken_from_its_cause(make):
    """Check C6 and C10."""
    ch = make(1)
    waiting = ThreadPeer(lambda: select(ready=[ch]))
    wait_blocked(ch, readers=1)
    ch.abort(LookupError("gone"))
    with pytest.raises(Broken) as caught:
        waiting.result()
    assert isinstance(caught.value.__cause__, LookupError)


def test_select_accepts_only_a_list_of_channels_as_ready(make):
    """C10: the next get of a port would finish its leased item, and iterating over a channel takes items."""
    ch = make(1)
    with ch.reader() as reader:
        for wrong in (ch, [reader], reader, ["channel"]):
            with pytest.raises(TypeError, match="ready must be a list of channels"):
                select(ready=wrong)
