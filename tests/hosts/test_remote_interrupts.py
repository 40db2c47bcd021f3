"""Test Ctrl-C at every point where a remote call checks for signals (C9).

After the interrupt, the item goes to the next call in this process, and the owner counts no waiting reader.
"""

from __future__ import annotations

import contextlib
import itertools
from pathlib import Path

import pytest
from support.peers import HostPeer
from support.scripted_interrupt import Interrupt
from support.waiting import wait_blocked, wait_stats, wait_until

from flowchan import Channel, Empty, hosts, select
from flowchan.channel import latch
from flowchan.remote import connection

pytestmark = pytest.mark.usefixtures("impatient")
OURS = (*(str(Path(module.__file__ or "").parent) for module in (hosts, connection)), str(latch.__file__))


def make(capacity=64):
    return Channel(capacity, across="hosts")


def has_pending_calls(channel):
    """Return whether a call of this process is still waiting for its reply."""
    return bool(channel._connection._pending)


GETS = {
    "get": lambda one: one.get(),
    "get_many": lambda one: one.get_many(2)[0],
    "select": lambda one: select([one]).item,
    "select among others": lambda one: select([one, Channel()]).item,
}


@pytest.mark.parametrize("how", GETS)
@pytest.mark.parametrize("is_there", [True, False], ids=["before", "during"])
def test_next_call_gets_the_item_of_an_interrupted_get(how, is_there):
    """C9: the item may already be in the channel, or arrive during the wait.

    Each call is the first on its channel, so it opens the port in Python. Later calls run no Python code.
    """
    one, channels, get = make(), make(), GETS[how]

    def walk():
        for number in itertools.count(1):
            new = one._another(4)
            if is_there:
                new.put([number])
                new.flush()
            else:
                channels.put(new)
            interrupt = Interrupt(number, OURS)
            found = interrupt.during(get, new)
            if not is_there:
                channels.put("ended")
            if not interrupt.where:
                assert found == [number]
                break
            with contextlib.suppress(Empty):
                found = new.get(20)
            assert found == [number], f"after Ctrl-C in {interrupt.where}"
            with pytest.raises(Empty):
                new.get_nowait()
        if how != "get_many":  # get_many always asks the owner for more
            assert Interrupt(1, OURS).during(get, filled(new)) == ["again"]
        wait_until(lambda: not has_pending_calls(one))
        return number

    def filled(channel):
        channel.put(["again"])
        channel.flush()
        return channel

    def walk_and_close():
        try:
            return walk()
        finally:
            channels.close()

    peer = HostPeer(walk_and_close)
    if not is_there:
        for number, new in enumerate(channels, 1):
            wait_until(lambda new=new: len(channels) or new.stats().waiting_readers)
            new.put([number])
            assert channels.get() == "ended"
    assert peer.result() > 15  # Python 3.11 checks more often than later versions


@pytest.mark.parametrize("end", ["reader", "writer"])
def test_port_is_released_if_ctrl_c_interrupts_its_opening(end):
    """C5, C12: the owner does not count the port, and the port does not keep the connection open."""
    one, over = make(), make()

    def walk():
        for number in itertools.count(1):
            interrupt = Interrupt(number, OURS)
            port = interrupt.during(getattr(one, end))
            if port is not None:
                port.close()
            if not interrupt.where:
                break
        wait_until(lambda: not one._connection._streams and not has_pending_calls(one))
        over.get()
        return number

    peer = HostPeer(walk)
    wait_blocked(over, readers=1)
    wait_stats(one, readers=0, writers=0)
    over.put(None)
    assert peer.result() > 15  # Python 3.11 checks more often than later versions
