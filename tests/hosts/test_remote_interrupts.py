"""Ctrl-C at every place of a call on a channel elsewhere where Python looks for signals (C9): the item is the
next one of this process, and nobody waits at home any more."""

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
LOOKS_AFTER = ("CALL", "CALL_KW", "CALL_FUNCTION_EX", "JUMP_BACKWARD")


@functools.cache
def instructions(code: CodeType) -> dict[int, str]:
    return {one.offset: one.opname for one in dis.get_instructions(code)}


class Interrupt:
    """Raises KeyboardInterrupt at the place of that number: where a function of ours begins, after it has
    called something native, and where it jumps back. ``where``: which place that was."""

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
            self._before.clear()  # frames, and what they hold

    def _begin(self, frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(OURS):
            return None
        if frame.f_back is not None:
            self._before.pop(frame.f_back, None)  # a function of ours looks at its own beginning, not after
        frame.f_trace_opcodes = True
        self._look(frame)
        return self._follow

    def _follow(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "opcode":
            if self._before.get(frame) in LOOKS_AFTER:
                self._look(frame)
            self._before[frame] = instructions(frame.f_code)[frame.f_lasti]
        elif event in ("return", "exception"):  # where what was called has raised, Python looks for no signal
            self._before.pop(frame, None)
        return self._follow

    def _look(self, frame: FrameType) -> None:
        self._left -= 1
        if self._left == 0:
            self.where = f"{frame.f_code.co_qualname}, line {frame.f_lineno}"
            raise KeyboardInterrupt


def make(capacity=64):
    return Channel(capacity, across="hosts")


def asked_for(channel):
    """Whether a question is not answered, of which its asker has not heard, or home."""
    return bool(channel._connection._pending)


GETS = {
    "get": lambda one: one.get(),
    "get_many": lambda one: one.get_many(2)[0],
    "select": lambda one: select([one]).item,
    "select among others": lambda one: select([one, Channel()]).item,
}


@pytest.mark.parametrize("how", GETS)
@pytest.mark.parametrize("there", [True, False], ids=["there before", "comes then"])
def test_get_ended_by_ctrl_c_leaves_its_item_next(how, there):
    """C9: for items already in the channel, items that come during the wait, and later ones.

    Each call is the first on its channel, which opens the port; later calls run no Python.
    """
    one, told, get = make(), make(), GETS[how]

    def walk():
        for number in itertools.count(1):
            new = one._another(4)
            if there:
                new.put([number])
                new.flush()
            else:
                told.put(new)
            interrupt = Interrupt(number)
            found = interrupt.during(get, new)
            if not there:
                told.put("ended")
            if not interrupt.where:
                assert found == [number]
                break
            with contextlib.suppress(Empty):
                found = new.get(20)
            assert found == [number], f"after Ctrl-C in {interrupt.where}"
            with pytest.raises(Empty):
                new.get_nowait()
        if how != "get_many":  # which asks the owner for as many
            assert Interrupt(1).during(get, filled(new)) == ["again"]
        wait_until(lambda: not asked_for(one))
        return number

    def filled(channel):
        channel.put(["again"])
        channel.flush()
        return channel

    def walk_and_tell():
        try:
            return walk()
        finally:
            told.close()

    peer = HostPeer(walk_and_tell)
    if not there:
        for number, new in enumerate(told, 1):
            wait_until(lambda new=new: len(told) or new.stats().waiting_readers)
            new.put([number])
            assert told.get() == "ended"
    assert peer.result() > 15  # Python 3.11 looks at more places than later ones


@pytest.mark.parametrize("end", ["reader", "writer"])
def test_port_is_released_if_ctrl_c_ends_its_opening(end):
    """C5, C12: it does not count at home, and nothing keeps the connection."""
    one, over = make(), make()

    def walk():
        for number in itertools.count(1):
            interrupt = Interrupt(number)
            port = interrupt.during(getattr(one, end))
            if port is not None:
                port.close()
            if not interrupt.where:
                break
        wait_until(lambda: not one._connection._streams and not asked_for(one))
        over.get()
        return number

    peer = HostPeer(walk)
    wait_blocked(over, readers=1)
    wait_stats(one, readers=0, writers=0)
    over.put(None)
    assert peer.result() > 15  # Python 3.11 looks at more places than later ones
