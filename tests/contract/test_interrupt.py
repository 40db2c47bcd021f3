"""C9: Ctrl-C ends any blocked call in the main thread.

A script blocks in a call, its second thread reports that, and the test sends the signal.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from support.scripts import start

pytestmark = pytest.mark.usefixtures("forked_programs")

READS = ["ch.get()", "ch.get(timeout=1e6)", "ch.get_many(3)", "next(ch)", "list(ch)", "ch.reader().get()"]
WRITES = ["ch.put(2)", "ch.put(2, timeout=1e6)", "ch.put_many([2, 3])", "ch.writer().put(2)"]

SCRIPT = """
import os, signal, sys, threading
from support.waiting import wait_blocked
from flowchan import Channel

def tell_when_blocked():
    wait_blocked(ch, {side}=1)
    os.write(1, b"blocked\\n")  # not print(), whose lock could block the interpreter's exit

ch = Channel(1, across={across!r})
{prepare}
threading.Thread(target=tell_when_blocked, daemon=True).start()
try:
    print("ended with", {call}, flush=True)
except KeyboardInterrupt:
    stats = ch.stats()
    print("interrupted", stats.waiting_readers, stats.waiting_writers, len(ch), flush=True)
{after}
"""


@pytest.fixture(autouse=True)
def _finds_the_tests(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))


def run_until_blocked(**parts):
    """Start the script, and return when its main thread is blocked in the call."""
    script = start("-c", SCRIPT.format(**parts))
    assert script.stdout is not None
    assert script.stdout.readline() == "blocked\n"
    return script


def answer_after(script, signum):
    """Send the signal, and return the script's output. The script must exit with code 0."""
    script.send_signal(signum)
    answer, errors = script.communicate()
    assert script.returncode == 0, errors
    return answer


@pytest.mark.parametrize("call", READS)
def test_ctrl_c_interrupts_a_waiting_reader(transport, call):
    """C9: after Ctrl-C, no call waits, and the channel works as before."""
    after = "ch.put('next'); print(ch.get())" if "reader()" not in call else "print('next')"
    script = run_until_blocked(across=transport.across, side="readers", prepare="", call=call, after=after)
    assert answer_after(script, signal.SIGINT) == "interrupted 0 0 0\nnext\n"


@pytest.mark.parametrize("call", WRITES)
def test_ctrl_c_interrupts_a_waiting_writer(transport, call):
    """C9: after Ctrl-C, the item was not put, no call waits, and the channel works as before."""
    after = "print(ch.get_many(5))"
    script = run_until_blocked(
        across=transport.across, side="writers", prepare="ch.put(1)", call=call, after=after
    )
    assert answer_after(script, signal.SIGINT) == "interrupted 0 0 1\n[1]\n"


def test_call_keeps_waiting_after_a_signal_handler_has_returned(transport):
    """C9: the call resumes its wait when the handler has returned. Here, the handler puts the item."""
    prepare = "signal.signal(signal.SIGUSR1, lambda *_: ch.put_nowait('from the handler'))"
    script = run_until_blocked(
        across=transport.across, side="readers", prepare=prepare, call="ch.get()", after=""
    )
    assert answer_after(script, signal.SIGUSR1) == "ended with from the handler\n"


def test_handler_may_close_the_channel_of_the_waiting_call(transport):
    """C9, C3: no lock is held while a handler runs."""
    prepare = "signal.signal(signal.SIGUSR1, lambda *_: ch.close())"
    script = run_until_blocked(
        across=transport.across, side="readers", prepare=prepare, call="list(ch)", after=""
    )
    assert answer_after(script, signal.SIGUSR1) == "ended with []\n"


def test_handler_exception_propagates_from_the_call(transport):
    """C9: the handler's exception ends the call, as it would end any blocked call of Python."""
    prepare = "ch.put(1)\nsignal.signal(signal.SIGUSR1, lambda *_: 1 / 0)"
    call = "[error for error in [None] if catch(lambda: ch.put(2))]"
    catch = """
def catch(call):
    try:
        call()
    except ZeroDivisionError:
        print("came out", len(ch), flush=True)
"""
    script = run_until_blocked(
        across=transport.across, side="writers", prepare=prepare + catch, call=call, after=""
    )
    assert answer_after(script, signal.SIGUSR1) == "came out 1\nended with []\n"
