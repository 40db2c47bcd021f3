"""C10: ``select`` completes exactly one of several operations, fairly, over any mix of media in one
process."""

from __future__ import annotations

import itertools
import os
import random
import signal
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import pytest
from media import MEDIA
from peers import ProcessPeer, ThreadPeer
from waiting import wait_blocked, wait_until

from flowchan import Broken, Channel, Closed, Drained, Empty, Full, NothingReady, Selected, select

MIXES = [*([medium] for medium in MEDIA), *map(list, itertools.combinations(MEDIA, 2))]


@pytest.fixture(params=MIXES, ids=lambda mix: "+".join(medium.name for medium in mix))
def several(request):
    """``several(n, capacity)``: n channels of one medium, or of two in turn."""

    def make(n, capacity=64):
        return [request.param[i % len(request.param)].make(capacity) for i in range(n)]

    return make


def counts(channels):
    """How much has happened to the channels: exactly one of it may, for one select."""
    return sum(ch.stats().items_in + ch.stats().items_out for ch in channels)


def nobody_waits(channels):
    return all(
        ch.stats().waiting_readers == ch.stats().waiting_writers == ch.stats().selecting == 0
        for ch in channels
    )


# exactly one


def test_select_gets_from_the_channel_that_has_an_item(several):
    """C10."""
    a, b, c = several(3)
    b.put("item")
    assert select([a, b, c]) == Selected(b, "item", put=False)


def test_select_puts_into_the_channel_that_has_a_place(several):
    """C10."""
    a, b = several(2, capacity=1)
    a.put("old")
    assert select(puts=[(a, 1), (b, 2)]) == Selected(b, 2, put=True)
    assert (a.get(), b.get()) == ("old", 2)


def test_exactly_one_of_many_possible_operations_is_done(several):
    """C10: gets and puts that could all be done at once."""
    channels = several(6)
    for ch in channels[:3]:
        ch.put_many(range(10))
    before = counts(channels)
    for done in range(1, 20):
        select(channels[:3], puts=[(ch, "new") for ch in channels[3:]])
        assert counts(channels) == before + done


def test_a_channel_may_be_read_and_written_by_one_select(several):
    """C10: an empty channel can only be put into, a full one only be got from."""
    (ch,) = several(1, capacity=1)
    assert select([ch], puts=[(ch, "in")]).put
    assert select([ch], puts=[(ch, "in")]) == Selected(ch, "in", put=False)
    assert len(ch) == 0


def test_none_is_an_item_like_any_other(several):
    """C1, C10."""
    (ch,) = several(1)
    select(puts=[(ch, None)])
    assert select([ch], timeout=0) == Selected(ch, None, put=False)


def test_ports_are_selected_like_channels(several):
    """C5, C10: what came through a port is on lease until the port is asked again."""
    a, b = several(2)
    reader, writer = a.reader(), b.writer()
    a.put_many([1, 2])
    assert select([reader], timeout=0) == Selected(reader, 1, put=False)
    assert a.stats().leased == 1
    assert select(puts=[(writer, "x")]) == Selected(writer, "x", put=True)
    assert select([reader, b], timeout=0).item in (2, "x")
    reader.close()
    writer.close()
    assert a.closed
    assert b.closed


def test_an_item_that_cannot_be_sent_raises_at_the_caller_and_puts_nothing():
    """C10, C13."""
    ch = Channel(across="processes")
    with pytest.raises(TypeError, match="can't be pickled"):
        select(puts=[(ch, threading.Lock())])
    assert len(ch) == 0


@pytest.mark.parametrize("gets", [[3], [None], ["channel"]])
def test_what_is_no_channel_is_named(gets):
    """C10."""
    with pytest.raises(TypeError, match="select gets from channels and In ports"):
        select(gets)


def test_a_channel_in_place_of_a_list_is_refused_and_keeps_its_items(several):
    """C10: iterating over it would take them."""
    (ch,) = several(1)
    ch.put(1)
    for target in (ch, ch.reader()):
        with pytest.raises(TypeError, match="list of channels"):
            select(target)
    assert len(ch) == 1


def test_ends_are_not_mixed_up(several):
    """C10."""
    (ch,) = several(1)
    with pytest.raises(TypeError):
        select([ch.writer()])
    with pytest.raises(TypeError):
        select(puts=[(ch.reader(), 1)])


@pytest.mark.parametrize("number", [0, 129])
def test_select_takes_1_to_128_operations(several, number):
    """C10."""
    with pytest.raises(ValueError, match="1 to 128 operations"):
        select(several(number), timeout=0)


def test_128_channels_at_once(several):
    """C10."""
    channels = several(128)
    with pytest.raises(NothingReady):
        select(channels, timeout=0.01)
    channels[77].put("there")
    assert select(channels).item == "there"
    assert nobody_waits(channels)


# now or later


@pytest.mark.parametrize("timeout", [0, 0.02])
def test_when_the_time_is_over_nothing_was_done(several, timeout):
    """C7, C10: what it raises is an Empty and a Full, so both ways of catching it work."""
    a, b = several(2, capacity=1)
    b.put("old")
    for kind in (NothingReady, Empty, Full, TimeoutError):
        with pytest.raises(kind):
            select([a], puts=[(b, "new")], timeout=timeout)
    assert (len(a), b.get()) == (0, "old")
    assert nobody_waits([a, b])


@pytest.mark.parametrize("timeout", [-1, float("nan"), "1", True])
def test_a_timeout_that_is_none_is_refused(several, timeout):
    """C7, C10."""
    with pytest.raises(ValueError, match="timeout must be"):
        select(several(2), timeout=timeout)


# ends


def test_drained_channels_are_left_out(several):
    """C4, C10."""
    a, b = several(2)
    a.close()
    b.put(1)
    b.close()
    assert select([a, b]) == Selected(b, 1, put=False)
    with pytest.raises(Drained):
        select([a, b])


def test_a_closed_channel_that_still_holds_items_is_read(several):
    """C3, C10."""
    a, b = several(2)
    a.put_many([1, 2])
    a.close()
    assert [select([a, b]).item for _ in range(2)] == [1, 2]
    with pytest.raises(Empty):
        select([a, b], timeout=0)


def test_a_put_into_a_closed_channel_raises_closed(several):
    """C3, C10: it is the caller's mistake, whatever else could be done only later."""
    a, b = several(2)
    b.close()
    with pytest.raises(Closed):
        select([a], puts=[(b, 1)])


def test_a_broken_channel_raises_broken_from_its_cause(several):
    """C6, C10."""
    a, b = several(2)
    b.abort(LookupError("gone"))
    with pytest.raises(Broken) as caught:
        select([a, b])
    assert isinstance(caught.value.__cause__, LookupError)


@pytest.mark.parametrize(("end", "raised"), [("close", Drained), ("abort", Broken)])
def test_an_end_wakes_a_waiting_select(several, end, raised):
    """C3, C6, C10: close ends it when nothing else is left, abort at once."""
    a, b = several(2)
    a.close()
    waiting = ThreadPeer(select, [a, b])
    wait_blocked(b, readers=1)
    getattr(b, end)()
    with pytest.raises(raised):
        waiting.result()
    assert nobody_waits([a, b])


def test_a_closed_port_is_refused(several):
    """C5, C10."""
    (ch,) = several(1)
    keep, reader, writer = ch.reader(), ch.reader(), ch.writer()
    reader.close()
    writer.close()
    for operations in ([reader], ()), ([], [(writer, 1)]):
        with pytest.raises(ValueError, match="this port was closed"):
            select(*operations, timeout=0)
    keep.close()


def test_a_port_closed_while_a_select_waits_in_it_ends_the_select(several):
    """C5, C10."""
    a, b = several(2)
    keep, reader = a.reader(), a.reader()
    waiting = ThreadPeer(select, [reader, b])
    wait_blocked(a, readers=1)
    reader.close()
    with pytest.raises(ValueError, match="this port was closed"):
        waiting.result()
    assert nobody_waits([a, b])
    keep.close()


# waking


@pytest.mark.parametrize("kind", [ThreadPeer, ProcessPeer])
@pytest.mark.parametrize("chosen", [0, 1])
def test_a_put_elsewhere_wakes_a_waiting_select(kind, chosen):
    """C8, C10: from another thread for each medium, from another process for one that reaches it."""
    channels = [Channel(across="processes"), Channel(across="threads" if kind is ThreadPeer else "processes")]
    waiting = ThreadPeer(select, channels)
    for ch in channels:
        wait_blocked(ch, readers=1)
    assert [ch.stats().selecting for ch in channels] == [1, 1]
    kind(channels[chosen].put, "item").result()
    assert waiting.result() == Selected(channels[chosen], "item", put=False)
    assert nobody_waits(channels)


@pytest.mark.parametrize("kind", [ThreadPeer, ProcessPeer])
def test_a_get_elsewhere_wakes_a_select_that_waits_to_put(kind):
    """C8, C10."""
    channels = [
        Channel(1, across="processes"),
        Channel(1, across="threads" if kind is ThreadPeer else "processes"),
    ]
    for ch in channels:
        ch.put("old")
    waiting = ThreadPeer(select, [], [(ch, "new") for ch in channels])
    for ch in channels:
        wait_blocked(ch, writers=1)
    assert kind(channels[1].get).result() == "old"
    assert waiting.result() == Selected(channels[1], "new", put=True)
    assert [ch.get() for ch in channels] == ["old", "new"]


def test_a_select_that_used_another_channel_passes_its_wake_up_on(several):
    """C8, C10: beside it a plain reader waits, which must not sleep beside the item that the select did not
    take."""
    for _ in range(100):
        a, b = several(2)
        plain = ThreadPeer(a.get)
        wait_blocked(a, readers=1)
        choosing = ThreadPeer(select, [a, b])
        wait_blocked(a, readers=2)
        putting = ThreadPeer(b.put, "b")
        a.put("a")
        putting.result()
        done = choosing.result()
        if done.channel is a:
            a.put("a")
        assert plain.result() == "a"
        assert nobody_waits([a, b])


@pytest.mark.parametrize("across", [pytest.param(one.across, id=one.name) for one in MEDIA])
def test_ctrl_c_interrupts_a_waiting_select(across):
    """C9, C10: nothing was done, nobody waits, and the channels work as before."""
    text = f"""
import threading
from waiting import wait_blocked
from flowchan import Channel, select

def tell():
    wait_blocked(a, readers=1)
    wait_blocked(b, writers=1)
    print("blocked", flush=True)

a, b = Channel(1, across={across!r}), Channel(1)
b.put("old")
threading.Thread(target=tell, daemon=True).start()
try:
    select([a], puts=[(b, "new")])
except KeyboardInterrupt:
    print("interrupted", a.stats().selecting, b.stats().selecting, len(a), b.get())
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    with subprocess.Popen(
        [sys.executable, "-c", text], stdout=subprocess.PIPE, text=True, env=environment
    ) as script:
        assert script.stdout is not None
        assert script.stdout.readline() == "blocked\n"
        script.send_signal(signal.SIGINT)
        assert script.stdout.read() == "interrupted 0 0 0 old\n"
    assert script.returncode == 0


# fairness and totals


def test_of_several_ready_channels_each_is_chosen_about_equally_often(several):
    """C10: 900 choices among three; each one's share is 300 within eight standard deviations."""
    channels = several(3, capacity=1_000)
    for ch in channels:
        ch.put_many(range(900))
    chosen = Counter(channels.index(select(channels).channel) for _ in range(900))
    assert sum(chosen.values()) == 900
    assert all(190 < chosen[index] < 410 for index in range(3)), chosen


@pytest.mark.parametrize("before", [2, 8])
def test_channels_that_are_not_ready_favour_none_of_those_that_are(several, before):
    """C10: each of two ready ones behind empty ones has half of 900 choices, within eight standard
    deviations."""
    channels = several(before + 2, capacity=1_000)
    for ch in channels[before:]:
        ch.put_many(range(900))
    chosen = Counter(channels.index(select(channels).channel) for _ in range(900))
    assert 330 < chosen[before] < 570, chosen


def test_a_select_that_does_not_wait_misses_no_item_on_its_way(several, make_gate):
    """C10: one channel or the other has an item at every moment; looking at them one after the other must not
    miss it."""
    here, there = channels = several(2)
    here.put("item")
    gate = make_gate(1)

    def move():
        gate.arrive()
        while not (here.closed or there.closed):
            for source, target in ((here, there), (there, here)):
                try:
                    target.put("item")
                    source.get()
                except Closed:
                    return

    mover = ThreadPeer(move) if here.across == "threads" or there.across == "threads" else ProcessPeer(move)
    gate.open()
    for _ in range(3_000):
        done = select(channels, timeout=0)
        done.channel.put(done.item)
    for ch in channels:
        ch.close()
    mover.result()


def test_gets_and_puts_are_chosen_about_equally_often(several):
    """C10."""
    full, free = several(2, capacity=1_000)
    full.put_many(range(600))
    puts = sum(select([full], puts=[(free, 0)]).put for _ in range(600))
    assert 200 < puts < 400


def test_no_item_is_lost_or_taken_twice_by_many_selects_at_once(several):
    """C8, C10: selecting readers and selecting writers over the same channels; every item is accounted
    for."""
    channels, each, parties = several(3, capacity=2), 600, 4

    def write(number):
        for i in range(each):
            select(puts=[(ch, (number, i)) for ch in channels])

    def read():
        taken = []
        while True:
            try:
                taken.append(select(channels).item)
            except Drained:
                return taken

    readers = [ThreadPeer(read) for _ in range(parties)]
    writers = [ThreadPeer(write, number) for number in range(parties)]
    for writer in writers:
        writer.result()
    for ch in channels:
        ch.close()
    taken = Counter(item for reader in readers for item in reader.result())
    assert taken == dict.fromkeys(((number, i) for number in range(parties) for i in range(each)), 1)
    assert nobody_waits(channels)


def test_selects_beside_plain_calls_and_other_processes():
    """C8, C10: selecting and plain readers share the items that processes and threads put; timeouts take
    part."""
    shared, local = Channel(3, across="processes"), Channel(3)
    each = 500

    def read_either(seed):
        chance, taken = random.Random(seed), []
        while True:
            try:
                taken.append(select([shared, local], timeout=chance.choice([None, 0, 0.0005])).item)
            except NothingReady:
                continue
            except Drained:
                return taken

    readers = [ThreadPeer(read_either, seed) for seed in range(3)]
    readers += [ThreadPeer(list, shared), ThreadPeer(list, local)]
    writers = [ProcessPeer(shared.put_many, [("process", n, i) for i in range(each)]) for n in range(2)]
    writers += [ThreadPeer(local.put_many, [("thread", n, i) for i in range(each)]) for n in range(2)]
    for writer in writers:
        writer.result()
    shared.close()
    local.close()
    taken = Counter(item for reader in readers for item in reader.result())
    assert len(taken) == 4 * each
    assert set(taken.values()) == {1}


def test_a_process_killed_while_it_selects_is_forgotten():
    """C10, C11: it takes no wake-up with it, and it is no longer counted among those that wait."""
    a, b = Channel(across="processes"), Channel(across="processes")
    peer = ProcessPeer(select, [a, b])
    wait_blocked(a, readers=1)
    wait_blocked(b, readers=1)
    peer.kill()
    peer.join()
    plain = ThreadPeer(a.get)
    wait_until(lambda: a.stats().waiting_readers == 1 and a.stats().selecting == 0, what=a.stats)
    a.put("item")
    assert plain.result() == "item"
