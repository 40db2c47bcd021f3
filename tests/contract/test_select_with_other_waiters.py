"""C8 to C11: other threads and processes wake, interrupt or kill a ``select``, or compete with it."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from support.peers import ProcessPeer, ThreadPeer
from support.waiting import no_waiters, wait_blocked, wait_until
from transports import TRANSPORTS

from flowchan import Channel, Drained, NothingReady, Selected, select


@pytest.mark.parametrize("kind", [ThreadPeer, ProcessPeer])
@pytest.mark.parametrize("chosen", [0, 1])
def test_put_by_another_thread_or_process_wakes_a_select(kind, chosen):
    """C8, C10: another thread puts the item, or another process if the transport allows that."""
    channels = [Channel(across="processes"), Channel(across="threads" if kind is ThreadPeer else "processes")]
    waiting = ThreadPeer(select, channels)
    for ch in channels:
        wait_blocked(ch, readers=1)
    assert [ch.stats().selecting for ch in channels] == [1, 1]
    kind(channels[chosen].put, "item").result()
    assert waiting.result() == Selected(channels[chosen], "item", put=False)
    assert no_waiters(*channels)


@pytest.mark.parametrize("kind", [ThreadPeer, ProcessPeer])
def test_get_by_another_thread_wakes_a_select_that_puts(kind):
    """Check C8 and C10."""
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


@pytest.mark.parametrize("across", [pytest.param(one.across, id=one.name) for one in TRANSPORTS])
def test_ctrl_c_interrupts_a_waiting_select(across):
    """C9, C10: no operation was done, no call waits, and the channels work as before."""
    text = f"""
import threading
from support.waiting import no_waiters, wait_blocked
from flowchan import Channel, select

def tell():
    wait_blocked(a, readers=1)
    wait_blocked(b, writers=1)
    print("blocked", flush=True)

a, b = Channel(1, across={across!r}), Channel(1)
b.put("old")
telling = threading.Thread(target=tell, daemon=True)
telling.start()
try:
    select([a], puts=[(b, "new")])
except KeyboardInterrupt:
    telling.join()  # a daemon thread that prints could block the interpreter's exit
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


def test_selects_and_plain_gets_share_items_across_processes():
    """C8, C10: processes and threads put items.

    Selects with timeouts and plain readers compete for these items.
    """
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


def test_process_killed_in_select_does_not_count_as_waiter():
    """C10, C11: the dead process uses up no wake-up, and is not counted as a waiter."""
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
