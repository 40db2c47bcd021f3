"""C10: ``select`` does exactly one of several operations, fairly, with any mix of transports."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections import Counter

import pytest
from support.peers import HostPeer, ProcessPeer, ThreadPeer
from support.waiting import no_waiters, wait_blocked, wait_until
from transports import TRANSPORTS, Transport

from flowchan import Broken, Channel, Closed, Drained, Empty, Full, NothingReady, Selected, native, select

MIXES = [*([transport] for transport in TRANSPORTS), *map(list, itertools.combinations(TRANSPORTS, 2))]
REMOTE = Transport("remote_channel", "hosts", peers=(), copies=True)
"""Channels that another program owns."""
REMOTE_MIXES = [[REMOTE], [TRANSPORTS[0], REMOTE]] if native.is_compiled() else []


def hold(reply, over):
    """Own channels for a test, in another process."""
    own = Channel(across="hosts")
    reply.put(own)
    with contextlib.suppress(Drained):
        over.get()


@pytest.fixture(scope="module", autouse=True)
def remote_channel():
    """Yield a channel that another process owns; its method ``_another`` makes more channels there.

    The channel's connection is already in use when a test starts to count processes or threads.
    """
    if not native.is_compiled():
        yield None
        return
    reply, over = Channel(across="hosts"), Channel(across="hosts")
    owner = HostPeer(hold, reply, over)
    remote_end = reply.get()
    with contextlib.suppress(NothingReady):
        select([remote_end._another(1) for _ in range(10)], timeout=0)
    wait_until(lambda: len(remote_end._link._notices) == 0)
    remote_end.stats()
    yield remote_end
    over.close()
    owner.result()


def name(mix):
    return "+".join(transport.name for transport in mix)


@pytest.fixture(params=[*MIXES, *REMOTE_MIXES], ids=name)
def several(request, remote_channel):
    """Return ``several(n, capacity)``, which makes n channels.

    The channels have one transport, or two transports in turn.
    """

    def make(n, capacity=64):
        transports = itertools.islice(itertools.cycle(request.param), n)
        return [
            remote_channel._another(capacity) if one is REMOTE else one.make(capacity) for one in transports
        ]

    return make


@pytest.fixture(params=MIXES, ids=name)
def several_local(request):
    """Return the same function as ``several``, without remote channels.

    Other tests cover ports of remote channels. A hundred remote channels would make a connection use more
    memory.
    """

    def make(n, capacity=64):
        return [request.param[i % len(request.param)].make(capacity) for i in range(n)]

    return make


def counts(channels):
    """Return how many operations the channels have completed. Each select must add one operation."""
    return sum(ch.stats().items_in + ch.stats().items_out for ch in channels)


# --- Exactly one operation ---


def test_select_gets_from_the_channel_that_has_an_item(several):
    """Check C10."""
    a, b, c = several(3)
    b.put("item")
    assert select([a, b, c]) == Selected(b, "item", put=False)


def test_select_puts_into_the_channel_with_room(several):
    """Check C10."""
    a, b = several(2, capacity=1)
    a.put("old")
    assert select(puts=[(a, 1), (b, 2)]) == Selected(b, 2, put=True)
    assert (a.get(), b.get()) == ("old", 2)


def test_select_does_exactly_one_of_many_possible_operations(several):
    """C10: several gets and puts are possible at the same time."""
    channels = several(6)
    for ch in channels[:3]:
        ch.put_many(range(10))
    before = counts(channels)
    for done in range(1, 20):
        select(channels[:3], puts=[(ch, "new") for ch in channels[3:]])
        assert counts(channels) == before + done


def test_a_channel_may_be_read_and_written_by_one_select(several):
    """C10: an empty channel allows only a put, and a full channel allows only a get."""
    (ch,) = several(1, capacity=1)
    assert select([ch], puts=[(ch, "in")]).put
    assert select([ch], puts=[(ch, "in")]) == Selected(ch, "in", put=False)
    assert len(ch) == 0


def test_none_is_an_item_like_any_other(several):
    """Check C1 and C10."""
    (ch,) = several(1)
    select(puts=[(ch, None)])
    assert select([ch], timeout=0) == Selected(ch, None, put=False)


def test_ports_are_selected_like_channels(several_local):
    """C5, C10: the port leases its item until its next request."""
    a, b = several_local(2)
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


def test_select_raises_for_an_item_that_cannot_be_sent():
    """Check C10 and C13."""
    ch = Channel(across="processes")
    with pytest.raises(TypeError, match="can't send"):
        select(puts=[(ch, threading.Lock())])
    assert len(ch) == 0


@pytest.mark.parametrize("gets", [[3], [None], ["channel"]])
def test_select_names_an_argument_of_the_wrong_type(gets):
    """C10: the error names the invalid argument."""
    with pytest.raises(TypeError, match="select: gets must be channels or In ports"):
        select(gets)


def test_select_rejects_puts_that_are_not_pairs():
    """C10: ``puts`` may not be a channel itself, because iterating over a channel would wait for items."""
    for puts in (ch := Channel(4), [ch], [(ch, 1, 2)], [3]):
        with pytest.raises(TypeError, match="select: puts must be"):
            select(puts=puts)
    select(puts=[[ch, 1]])
    assert ch.get() == 1


def test_select_rejects_a_channel_instead_of_a_list(several_local):
    """C10: the gets may not be a channel itself, because iterating over a channel would take its items."""
    (ch,) = several_local(1)
    check_that_no_list_is_refused(ch)


def check_that_no_list_is_refused(ch):
    ch.put(1)
    for target in (ch, ch.reader()):
        with pytest.raises(TypeError, match="list of channels"):
            select(target)
    assert len(ch) == 1


def test_select_rejects_ports_of_the_wrong_side(several_local):
    """Check C10."""
    (ch,) = several_local(1)
    check_that_ends_are_not_mixed_up(ch)


def check_that_ends_are_not_mixed_up(ch):
    with pytest.raises(TypeError):
        select([ch.writer()])
    with pytest.raises(TypeError):
        select(puts=[(ch.reader(), 1)])


@pytest.mark.parametrize("number", [0, 129])
def test_select_accepts_1_to_128_operations(several_local, number):
    """Check C10."""
    with pytest.raises(ValueError, match="1 to 128 operations"):
        select(several_local(number), timeout=0)


def test_select_waits_on_128_channels(several_local):
    """Check C10."""
    channels = several_local(128)
    with pytest.raises(NothingReady):
        select(channels, timeout=0.01)
    channels[77].put("there")
    assert select(channels).item == "there"
    assert no_waiters(*channels)


# --- Immediate returns and timeouts ---


@pytest.mark.parametrize("timeout", [0, 0.02])
def test_select_that_times_out_does_nothing(several, timeout):
    """C7, C10: the error is both an Empty and a Full, so either class catches it."""
    a, b = several(2, capacity=1)
    b.put("old")
    for kind in (NothingReady, Empty, Full, TimeoutError):
        with pytest.raises(kind):
            select([a], puts=[(b, "new")], timeout=timeout)
    assert (len(a), b.get()) == (0, "old")
    assert no_waiters(a, b)


@pytest.mark.parametrize("timeout", [-1, float("nan"), "1", True])
def test_invalid_select_timeout_raises(several, timeout):
    """Check C7 and C10."""
    with pytest.raises(ValueError, match="timeout must be"):
        select(several(2), timeout=timeout)


# --- How channels end ---


def test_select_skips_drained_channels(several):
    """Check C4 and C10."""
    a, b = several(2)
    a.close()
    b.put(1)
    b.close()
    assert select([a, b]) == Selected(b, 1, put=False)
    with pytest.raises(Drained):
        select([a, b])


def test_select_gets_items_left_in_a_closed_channel(several):
    """Check C3 and C10."""
    a, b = several(2)
    a.put_many([1, 2])
    a.close()
    assert [select([a, b]).item for _ in range(2)] == [1, 2]
    with pytest.raises(Empty):
        select([a, b], timeout=0)


def test_select_that_puts_into_a_closed_channel_raises_closed(several):
    """C3, C10: this is the caller's mistake, even if other operations may become possible later."""
    a, b = several(2)
    b.close()
    with pytest.raises(Closed):
        select([a], puts=[(b, 1)])


def test_select_on_a_broken_channel_raises_broken_from_its_cause(several):
    """Check C6 and C10."""
    a, b = several(2)
    b.abort(LookupError("gone"))
    with pytest.raises(Broken) as caught:
        select([a, b])
    assert isinstance(caught.value.__cause__, LookupError)


@pytest.mark.parametrize(("end", "raised"), [("close", Drained), ("abort", Broken)])
def test_waiting_select_is_woken_by_close_or_abort(several, end, raised):
    """C3, C6, C10: close ends the call only if no other operation is left; abort ends it at once."""
    a, b = several(2)
    a.close()
    waiting = ThreadPeer(select, [a, b])
    wait_blocked(b, readers=1)
    getattr(b, end)()
    with pytest.raises(raised):
        waiting.result()
    assert no_waiters(a, b)


def test_select_rejects_a_closed_port(several_local):
    """Check C5 and C10."""
    (ch,) = several_local(1)
    check_that_a_closed_port_is_refused(ch)


def check_that_a_closed_port_is_refused(ch):
    keep, reader, writer = ch.reader(), ch.reader(), ch.writer()
    reader.close()
    writer.close()
    for operations in ([reader], ()), ([], [(writer, 1)]):
        with pytest.raises(ValueError, match=r"this port of .* was closed"):
            select(*operations, timeout=0)
    keep.close()


@pytest.mark.parametrize(
    "check",
    [check_that_no_list_is_refused, check_that_ends_are_not_mixed_up, check_that_a_closed_port_is_refused],
)
def test_select_rejects_the_same_mistakes_with_remote_ports(check):
    """Check C5 and C10."""
    ch = Channel(across="hosts")
    HostPeer(check, ch).result()


def test_closing_a_port_ends_a_select_that_waits_on_it(several_local):
    """Check C5 and C10."""
    a, b = several_local(2)
    keep, reader = a.reader(), a.reader()
    waiting = ThreadPeer(select, [reader, b])
    wait_blocked(a, readers=1)
    reader.close()
    with pytest.raises(ValueError, match=r"this port of .* was closed"):
        waiting.result()
    assert no_waiters(a, b)
    keep.close()


# --- Waking ---


def test_select_passes_on_the_wake_up_of_an_unused_channel(several):
    """C8, C10: a waiting reader must not sleep while there is an item that the select did not take."""
    for _ in range(30):
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
        assert no_waiters(a, b)


# --- Fairness and totals ---


def test_ready_channels_are_chosen_about_equally_often(several):
    """C10: each of three channels gets 300 of 900 choices, within eight standard deviations."""
    channels = several(3, capacity=1_000)
    for ch in channels:
        ch.put_many(range(900))
    chosen = Counter(channels.index(select(channels).channel) for _ in range(900))
    assert sum(chosen.values()) == 900
    assert all(190 < chosen[index] < 410 for index in range(3)), chosen


@pytest.mark.each_value
@pytest.mark.parametrize("before", [2, 8])
def test_empty_channels_do_not_bias_the_choice(several, before):
    """C10: each of two ready channels gets 450 of 900 choices, within eight standard deviations."""
    channels = several(before + 2, capacity=1_000)
    for ch in channels[before:]:
        ch.put_many(range(900))
    chosen = Counter(channels.index(select(channels).channel) for _ in range(900))
    assert 330 < chosen[before] < 570, chosen


def test_nonblocking_select_finds_an_item_that_moves_between_channels(several, make_gate, long_walk):
    """C10: exactly one of two channels has an item at any moment.

    A select that checks the channels in turn must not miss the item.
    """
    first, second = channels = several(2)
    first.put("item")
    gate = make_gate(1)

    def move():
        gate.arrive()
        while not (first.closed or second.closed):
            for source, target in ((first, second), (second, first)):
                try:
                    target.put("item")
                    target.flush()
                    source.get()
                except Closed:
                    return

    mover = ThreadPeer(move) if first.across == "threads" or second.across == "threads" else ProcessPeer(move)
    gate.open()
    for _ in range((300 if hasattr(second, "is_remote") else 3_000) // (1 if long_walk else 3)):
        done = select(channels, timeout=0)
        done.channel.put(done.item)
    for ch in channels:
        ch.close()
    mover.result()


def test_gets_and_puts_are_chosen_about_equally_often(several):
    """Check C10."""
    full, free = several(2, capacity=1_000)
    full.put_many(range(600))
    puts = sum(select([full], puts=[(free, 0)]).put for _ in range(600))
    assert 200 < puts < 400


def test_many_concurrent_selects_take_each_item_once(several, long_walk):
    """C8, C10: selects that read and selects that write share channels, and no item is lost."""
    channels, each, parties = several(3, capacity=2), 600 if long_walk else 200, 4

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
    assert no_waiters(*channels)
