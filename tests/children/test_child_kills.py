"""Test K1: when a parent or child exits, no process remains, and waiting calls raise ``ChildDied``."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from family import CALL_TIMEOUT_S, PEER_TIMEOUT_S, Family, work
from support.network_proxy import Wire, wired
from support.ssh_stub import ssh_stub
from support.waiting import wait_until

from flowchan import ChildDied, hosts
from flowchan.pipelines import children

PLACEMENTS = ("process", "local", "ssh")
DEEDS = (
    *((on, deed) for on in PLACEMENTS for deed in ("parent", "interrupt", "child")),
    ("local", "agent"),
    ("ssh", "agent"),
    ("ssh", "ssh"),
)
"""Placements of the children and the process to kill; ``interrupt`` sends SIGINT to the parent."""
THIS_HOST = ("", socket.gethostname())
everywhere = pytest.mark.parametrize("on", PLACEMENTS)


@pytest.fixture(autouse=True)
def ssh_here(tmp_path: Path) -> Iterator[None]:
    with ssh_stub(tmp_path):
        yield


@pytest.fixture
def family() -> Iterator[Family]:
    with contextlib.closing(Family()) as family:
        yield family


def wait_gone(family: Family) -> None:
    wait_until(lambda: not family.processes(), what=lambda: family.processes())


# --- random kills ---


@pytest.mark.timeout(3600)
def test_k1_random_kills_leave_nothing_and_raise_child_died(long_walk: bool) -> None:
    """A failure names its seed. With the same seed, the same process is killed, but the timing may differ."""
    family = None
    try:
        for seed in range(504 if long_walk else len(DEEDS)):
            if family is None or family.program.poll() is not None:
                if family is not None:
                    family.close()
                family = Family()
            try:
                kill_one(family, *DEEDS[seed % len(DEEDS)], random.Random(seed))
            except BaseException as error:
                error.add_note(f"seed {seed}")
                raise
    finally:
        if family is not None:
            family.close()


def kill_one(family: Family, on: str, victim: str, chance: random.Random) -> None:
    """Let the program start children, kill one process, and check the error and the leaks."""
    call = chance.choice(["join", "send", "receive", "talk", "wait"])
    family.order(on=on, call=call, deep=chance.random() < 0.3)
    pause = threading.Event()
    if victim in ("parent", "interrupt") and chance.random() < 0.5:  # the children may still be starting
        pause.wait(chance.uniform(0, 0.5))
    else:
        kids = family.answer()["kids"]
        pause.wait(chance.uniform(0, 0.05))
    if victim in ("parent", "interrupt"):
        family.program.send_signal(signal.SIGKILL if victim == "parent" else signal.SIGINT)
        family.program.wait(CALL_TIMEOUT_S)
        wait_gone(family)
        return
    number, host, pid = chance.choice(kids)
    if victim == "agent":
        psutil.Process(pid).parent().kill()
    else:
        if victim == "ssh":  # the agent has its own connection, so it survives
            chance.choice(family.ssh_clients()).kill()
            pause.wait(chance.uniform(0, 0.05))
        os.kill(pid, signal.SIGKILL)
    died = family.answer()["died"]
    if victim == "agent":
        assert died[:3] in [kid for kid in kids if kid[1] == host]
    else:
        assert died == [number, host, pid, signal.SIGKILL]
    assert family.answer()["left"] == []
    wait_gone(family)


# --- exits of a parent ---


@everywhere
@pytest.mark.parametrize("end", ["return", "exception", "interrupt", "terminate", "kill"])
def test_k1_parent_leaves_no_process_however_it_exits(family: Family, on: str, end: str) -> None:
    family.order(on=on, call="wait", deep=True, end=end, kids=2)
    assert len(family.answer()["kids"]) == 2
    if number := {"interrupt": signal.SIGINT, "terminate": signal.SIGTERM, "kill": signal.SIGKILL}.get(end):
        family.program.send_signal(number)
    family.program.wait(CALL_TIMEOUT_S)
    wait_gone(family)


@everywhere
def test_k1_busy_child_exits_when_its_parent_is_killed(family: Family, on: str) -> None:
    """The child is busy in its function and never calls its parent."""
    family.order(on=on, call="busy", kids=2)
    family.answer()
    family.program.kill()
    family.program.wait()
    wait_gone(family)


# --- exits of a child ---


def blocked_calls(kids: children.Children) -> dict[str, Callable[[], Any]]:
    """Return calls that need child 1, which never answers."""

    def send() -> None:
        while True:
            kids[1].send(bytes(1_000_000), timeout=CALL_TIMEOUT_S)

    return {
        "join": lambda: kids[1].join(timeout=CALL_TIMEOUT_S),
        "group join": lambda: kids.join(timeout=CALL_TIMEOUT_S),
        "receive": lambda: kids[1].receive(timeout=CALL_TIMEOUT_S),
        "receive into": lambda: kids[1].receive(timeout=CALL_TIMEOUT_S, into=np.zeros(8)),
        "group receive": lambda: kids.receive(timeout=CALL_TIMEOUT_S),
        "send": send,
        "wait": lambda: kids[1].wait(timeout=CALL_TIMEOUT_S),
        "group wait": lambda: kids.wait(timeout=CALL_TIMEOUT_S),
    }


CALLS = ("join", "group join", "receive", "receive into", "group receive", "send", "wait", "group wait")


@pytest.mark.parametrize("call", CALLS)
def test_k1_waiting_call_raises_child_died_with_details(call: str) -> None:
    with children.start(2) as kids:
        kids[1].run(work, "wait", False)
        kids[2].run(work, {"group join": "join", "group receive": "receive"}.get(call, "wait"), False)
        kids.join(timeout=CALL_TIMEOUT_S)
        pid = kids[1].pid
        killer = threading.Timer(0.05, os.kill, (pid, signal.SIGKILL))
        killer.start()
        with pytest.raises(ChildDied) as caught:
            blocked_calls(kids)[call]()
        killer.join()
        error = caught.value
        assert (error.number, error.pid, error.signal) == (1, pid, signal.SIGKILL)
        assert error.host in THIS_HOST
        with pytest.raises(ChildDied):  # later calls also raise the error
            blocked_calls(kids)[call]()
        assert psutil.pid_exists(kids[2].pid)
    assert not psutil.pid_exists(pid)


def exit_with(parent: Any, code: int) -> None:
    os._exit(code)


def test_child_that_exits_is_reported_without_a_signal() -> None:
    with children.start(1) as kids:
        kids.run(exit_with, 3)
        with pytest.raises(ChildDied) as caught:
            kids.wait(timeout=CALL_TIMEOUT_S)
        assert (caught.value.signal, caught.value.exitcode) == (None, 3)


@pytest.mark.parametrize("call", ["receive", "wait"])
def test_k1_child_on_a_silent_host_counts_as_dead(call: str) -> None:
    wire = Wire()
    with wired(1, wire, peer_timeout=PEER_TIMEOUT_S) as pool, children.start(1, on=pool) as kids:
        kids.run(work, "wait", False)
        kids.join(timeout=CALL_TIMEOUT_S)
        wire.be_silent(CALL_TIMEOUT_S)
        with pytest.raises(ChildDied) as caught:
            blocked_calls(kids)[call]()
        assert (caught.value.number, caught.value.host) == (1, "local-1")
        assert caught.value.signal is None


def test_k1_children_of_other_agents_survive_a_killed_agent() -> None:
    with children.start(2, on=hosts.local(2)) as kids:
        kids.run(work, "talk", False)
        kids.join(timeout=CALL_TIMEOUT_S)
        lost, kept = kids[1], kids[2]
        psutil.Process(lost.pid).parent().kill()
        with pytest.raises(ChildDied) as caught:
            lost.wait(timeout=CALL_TIMEOUT_S)
        assert (caught.value.number, caught.value.host, caught.value.pid) == (1, lost.host, lost.pid)
        kept.join(timeout=CALL_TIMEOUT_S)
        kept.send("still here")
        assert kept.receive(timeout=CALL_TIMEOUT_S) == "still here"


def test_group_call_serves_live_children_before_it_raises() -> None:
    with children.start(3) as kids:
        kids.run(work, "talk", False)
        kids.join(timeout=CALL_TIMEOUT_S)
        os.kill(kids[2].pid, signal.SIGKILL)
        with pytest.raises(ChildDied):
            kids.join(timeout=CALL_TIMEOUT_S)
        living = kids[1, 3]
        living.send("met")
        assert living.receive(timeout=CALL_TIMEOUT_S) == {1: "met", 3: "met"}


def test_close_ends_children_and_grandchildren(family: Family) -> None:
    family.order(on="process", call="wait", deep=True, kids=2)
    kids = family.answer()["kids"]
    assert len(family.processes()) >= 4
    os.kill(kids[0][2], signal.SIGKILL)  # the program closes the other child
    assert family.answer()["died"][0] == 1
    assert family.answer()["left"] == []
    wait_gone(family)


# --- serialisation ---


class Counted:
    """A value whose class counts how often instances are serialised."""

    times = 0

    def __reduce__(self) -> tuple[Any, ...]:
        Counted.times += 1
        return bytes, (1000,)


@pytest.mark.parametrize("on", ["process", "local"])
def test_value_sent_to_all_children_is_serialised_once(on: str) -> None:
    with children.start(16, on=hosts.local(2) if on == "local" else "process") as kids:
        kids.run(return_received)
        Counted.times = 0
        kids.send(Counted(), timeout=CALL_TIMEOUT_S)
        assert Counted.times == 1
        assert kids.wait(timeout=CALL_TIMEOUT_S) == dict.fromkeys(range(1, 17), bytes(1000))


def return_received(parent: Any) -> Any:
    return parent.receive(timeout=CALL_TIMEOUT_S)
