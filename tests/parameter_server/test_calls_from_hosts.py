"""Test that calls of remote clients run exactly once and in order, and that sessions end."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.waiting import wait_until

from benchmarks.slow_connections import cut
from flowchan import Closed, Empty, RunError, hosts, pipelines
from flowchan.pipelines.parameter_server.remote_calls import MOST_OPEN, Gateway, WaitingCall


class Counter:
    """Client in the gateway's process. All clients append their calls to one shared list."""

    def __init__(self, made: list[Counter], calls: list[Any]) -> None:
        made.append(self)
        self.calls, self.closed = calls, threading.Event()
        self.gate = threading.Event()
        self.gate.set()

    def close(self) -> None:
        self.closed.set()


def perform(client: Counter, call: tuple[Any, ...]) -> Any:
    if call[0] == "wait":
        return WaitingCall(client.gate.wait)
    client.gate.wait()
    client.calls.append(call)
    if call[0] == "fail":
        raise ValueError(call[1])
    if call[0] == "strange":
        raise Strange(threading.Lock())
    return call[0] * 2


class Strange(Exception):
    """Exception that cannot be pickled."""


class World:
    """Gateway, with the clients and calls of its sessions."""

    def __init__(self) -> None:
        self.made: list[Counter] = []
        self.calls: list[Any] = []
        self.gateway = Gateway(lambda: Counter(self.made, self.calls), perform)


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.gateway.close()
    del world.gateway  # pytest would keep a reference to the world until all fixtures have finished


def test_results_match_their_calls_in_any_waiting_order(world: World) -> None:
    session = world.gateway.session()
    handles = [session.send((number,)) for number in range(10)]
    assert [handle.result(60) for handle in reversed(handles)] == [2 * number for number in range(9, -1, -1)]
    assert world.calls == [(number,) for number in range(10)]
    session.close()
    wait_until(world.made[0].closed.is_set)


def test_result_raises_the_error_of_a_failed_call_each_time(world: World) -> None:
    session = world.gateway.session()
    handle = session.send(("fail", "why"))
    for _ in range(2):
        with pytest.raises(ValueError, match="why"):
            handle.result(60)
    with pytest.raises(RuntimeError, match="Strange"):
        session.send(("strange",)).result(60)
    assert session.send((1,)).result(60) == 2
    session.close()


def test_unawaited_calls_do_not_block_the_session(world: World) -> None:
    session = world.gateway.session()
    for number in range(5 * MOST_OPEN):
        session.send((number,))
    assert session.send((7,)).result(60) == 14
    assert len(world.calls) == 5 * MOST_OPEN + 1
    session.close()


def test_done_becomes_true_when_the_answer_arrives(world: World) -> None:
    session = world.gateway.session()
    session.send((1,)).result(60)
    world.made[0].gate.clear()
    handle = session.send((2,))
    assert not handle.done()
    with pytest.raises(Empty):
        handle.result(timeout=0)
    world.made[0].gate.set()
    wait_until(handle.done)
    assert handle.result() == 4
    session.close()


def test_send_raises_empty_at_the_limit_of_open_calls(world: World) -> None:
    session = world.gateway.session()
    session.send((1,)).result(60)
    world.made[0].gate.clear()
    handles = [session.send((number,)) for number in range(MOST_OPEN)]
    with pytest.raises(Empty):
        session.send((0,), timeout=0)
    world.made[0].gate.set()
    assert [handle.result(60) for handle in handles] == [2 * number for number in range(MOST_OPEN)]
    assert session.send((0,)).result(60) == 0
    session.close()


def test_calls_raise_closed_after_the_gateway_is_closed() -> None:
    world = World()
    session = world.gateway.session()
    assert session.send((1,)).result(60) == 2
    world.gateway.close()
    with pytest.raises(Closed):
        session.send((2,)).result(60)
    with pytest.raises(Closed):
        world.gateway.session()


def test_close_waits_until_all_received_calls_are_performed() -> None:
    world = World()
    sessions = [world.gateway.session() for _ in range(3)]
    for session in sessions:
        session.send((0,)).result(60)
    for client in world.made:
        client.gate.clear()
    for session in sessions:
        for number in range(1, MOST_OPEN):
            session.send((number,))
        session.close()
    with pytest.raises(TimeoutError):
        world.gateway.close(timeout=0.01)
    closing = threading.Thread(target=world.gateway.close)
    closing.start()
    for client in world.made:
        client.gate.set()
    closing.join()
    assert sorted(world.calls) == [(number,) for number in range(MOST_OPEN) for _ in range(3)]


def test_close_skips_a_call_that_waits_for_others() -> None:
    world = World()
    session = world.gateway.session()
    session.send((0,)).result(60)
    world.made[0].gate.clear()
    waiting = session.send(("wait",))
    world.gateway.close()
    assert not waiting.done()
    world.made[0].gate.set()
    assert waiting.result(60) is True
    with pytest.raises(Closed):
        session.send((1,)).result(60)


def test_close_waits_for_calls_behind_a_call_that_waits() -> None:
    world = World()
    session = world.gateway.session()
    session.send((0,)).result(60)
    world.made[0].gate.clear()
    for call in (("wait",), (1,), (2,)):
        session.send(call)
    session.flush()
    closing = threading.Thread(target=world.gateway.close)
    closing.start()
    wait_until(lambda: world.gateway.channels[0].closed)
    world.made[0].gate.set()
    closing.join()
    assert world.calls == [(0,), (1,), (2,)]
    session.close()


def use_session(gateway: Gateway, worker: int) -> Any:
    session = gateway.session()
    handles = [session.send((f"{worker} {number} ",)) for number in range(100)]
    return [handle.result(60) for handle in handles]


def expected(workers: int) -> list[list[str]]:
    return [[f"{worker} {number} " * 2 for number in range(100)] for worker in range(1, workers + 1)]


@pytest.mark.parametrize("place", [lambda: "process", lambda: hosts.local(2)], ids=["process", "hosts"])
def test_processes_and_hosts_open_sessions(world: World, place: Callable[[], Any]) -> None:
    found = pipelines.map(3, use_session, world.gateway, on=place()).join()
    assert found == expected(3)
    assert len(world.made) == 3
    wait_until(lambda: all(client.closed.is_set() for client in world.made))


def test_each_call_runs_once_while_connections_are_cut(world: World) -> None:
    over = threading.Event()

    def cut_often() -> None:
        # few cuts, because flowchan abandons a link that keeps breaking before an item arrives
        for _ in range(20):
            if over.wait(0.1):
                return
            cut()

    thread = threading.Thread(target=cut_often)
    workers = pipelines.map(2, use_session, world.gateway, on=hosts.local(2))
    thread.start()
    try:
        assert workers.join(60) == expected(2)
    finally:
        over.set()
        thread.join()
    assert len(world.calls) == len(set(world.calls)) == 200


def hold_session(gateway: Gateway, folder: Path, worker: int) -> None:
    session = gateway.session()
    session.send((str(worker),)).result(60)
    (folder / str(os.getpid())).touch()
    while True:
        time.sleep(60)


def test_session_ends_after_its_client_is_killed(world: World, tmp_path: Path) -> None:
    workers = pipelines.map(2, hold_session, world.gateway, tmp_path, on=hosts.local(2))
    wait_until(lambda: len([*tmp_path.iterdir()]) == 2)
    for path in tmp_path.iterdir():
        os.kill(int(path.name), signal.SIGKILL)
    wait_until(lambda: all(client.closed.is_set() for client in world.made))
    with pytest.raises(RunError, match="2 of 2 workers"):
        workers.join(60)
