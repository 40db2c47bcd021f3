"""Parked outputs of an ordered stage are as safe as other items, but not yet available."""

from __future__ import annotations

import pytest
from support.waiting import wait_until

from flowchan import Channel, Closed, Drained, Graph, In


def workers(items, results):
    """Return the ports of three workers, which have items 0, 1 and 2 on lease."""
    items.put_many(range(3))
    readers, writers = [items.reader() for _ in range(3)], [results.writer() for _ in range(3)]
    for reader, writer in zip(readers, writers, strict=True):
        writer._follow(reader, True, True)
        reader.get()
    return readers, writers


@pytest.mark.not_hosts("across hosts, the workers of a graph use their own channels")
def test_items_waiting_for_earlier_ones_can_be_read_after_close(make):
    """C3, C4: readers get the items in order, and then the channel is drained."""
    readers, writers = workers(make(), results := make())
    writers[2].put("two")
    writers[1].put("one")
    assert (len(results), results.stats().items_in) == (0, 2)
    results.close()
    with pytest.raises(Closed):
        writers[0].put("zero")
    assert results.get_many(5, timeout=0) == ["one", "two"]
    with pytest.raises(Drained):
        results.get_nowait()
    assert results.drained
    for port in (*readers, *writers):
        port.close()


@pytest.mark.not_hosts("across hosts, the workers of a graph use their own channels")
def test_waiting_reader_gets_remaining_items_when_the_last_writer_closes(make, spawn_peer):
    readers, writers = workers(make(), results := make())
    writers[1].put("one")
    peer = spawn_peer(list, results)
    for port in (*writers, *readers):
        port.close()
    assert peer.result() == ["one"]


@pytest.mark.parametrize("place", ["thread", "process"])
def test_stage_after_an_ordered_stage_may_close_its_input(place):
    """The stage gets the items that are still inside, and then the graph ends."""
    late, got = (Channel(8, across="processes") for _ in range(2))

    def late_with_three(number: int) -> int:
        if number == 3:
            late.get()
        return number

    def some(numbers: In[int]) -> None:
        for number in numbers:
            got.put(number)
            if number == 2:
                wait_until(lambda: numbers.channel.stats().items_in > 4)
                numbers.channel.close()
                late.put("now")

    graph = Graph("parked")
    graph.stage(some, graph.source(range(8)).map(late_with_three, workers=2, on=place))
    graph.run()
    found = got.get_many(8)
    assert found[:3] == [0, 1, 2]
    assert found[3:]
    assert found[3:] == list(range(4, 8))[: len(found) - 3]
