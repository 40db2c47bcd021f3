"""Test Ctrl-C at every point of a remote call at which Python checks for signals (C9).

The item goes to the next call of this process, and the owner keeps no waiting reader.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
from support.peers import HostPeer
from support.waiting import wait_blocked, wait_stats, wait_until

from flowchan import Channel, Empty, hosts, select
from flowchan.channel import latch
from flowchan.remote import connection

pytestmark = pytest.mark.usefixtures("impatient")
OURS = (*(str(Path(module.__file__ or "").parent) for module in (hosts, connection)), str(latch.__file__))
CHECKS_AFTER = ("CALL", "CALL_KW", "CALL_FUNCTION_EX", "JUMP_BACKWARD")


@functools.cache
def instructions(code: CodeType) -> dict[int, str]:
    return {one.offset: one.opname for one in dis.get_instructions(code)}


class Interrupt:
    """Raises KeyboardInterrupt at the check with this number.

    Python checks for signals when one of our functions begins, after it has called native code, and when it
    jumps back.

    Attributes:
        where: Function and line of that check.
    """

    def __init__(self, number: int) -> None:
        self.where = ""
        self._left = number
        self._before: dict[FrameType, str] = {}

    def during(self, call: Callable[..., Any], *arguments: Any) -> Any:
        sys.settrace(self._begin)
        try:
            return call(*arguments)
        except KeyboardInterrupt:
            return None
        finally:
            sys.settrace(None)
            self._before.clear()  # releases the frames and their objects

    def _begin(self, frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(OURS):
            return None
        if frame.f_back is not None:
            self._before.pop(frame.f_back, None)  # Python checks when our function begins, not after the call
        frame.f_trace_opcodes = True
        self._look(frame)
        return self._follow

    def _follow(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "opcode":
            if self._before.get(frame) in CHECKS_AFTER:
                self._look(frame)
            self._before[frame] = instructions(frame.f_code)[frame.f_lasti]
        elif event in ("return", "exception"):  # Python does not check after a call that raised
            self._before.pop(frame, None)
        return self._follow

    def _look(self, frame: FrameType) -> None:
        self._left -= 1
        if self._left == 0:
            self.where = f"{frame.f_code.co_qualname}, line {frame.f_lineno}"
            raise KeyboardInterrupt


def make(capacity=64):
    return Channel(capacity, across="hosts")


def has_pending_calls(channel):
    """Return whether a call of this process has no reply yet."""
    return bool(channel._connection._pending)


GETS = {
    "get": lambda one: one.get(),
    "get_many": lambda one: one.get_many(2)[0],
    "select": lambda one: select([one]).item,
    "select among others": lambda one: select([one, Channel()]).item,
}


@pytest.mark.parametrize("how", GETS)
@pytest.mark.parametrize("is_there", [True, False], ids=["before", "during"])
def test_item_is_still_next_if_ctrl_c_interrupts_get(how, is_there):
    """C9: this holds for items that are already in the channel, come during the wait, or come later.

    Each call is the first on its channel, which opens the port; later calls run no Python.
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
            interrupt = Interrupt(number)
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
        if how != "get_many":  # get_many asks the owner for more items
            assert Interrupt(1).during(get, filled(new)) == ["again"]
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
    """C5, C12: the owner does not count the port, and it does not keep the connection open."""
    one, over = make(), make()

    def walk():
        for number in itertools.count(1):
            interrupt = Interrupt(number)
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
