"""Test that each push is applied once if server workers or clients are killed at any point."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from support.waiting import WAIT_LIMIT_S, wait_until

from flowchan import RunError, WorkerDied, worker
from flowchan.pipelines import ParameterClient, ParameterServer, parameter_server
from flowchan.pipelines import map as start
from flowchan.pipelines.parameter_server.shard import MAX_DEATHS, Push, Shard

PRODUCT = str(Path(parameter_server.__file__).parent)
SIZE = 1000
CASES = [(1, "abc"), (1, "b"), (2, "abc")]
"""Numbers of shards, and the tensors that are pushed."""


def state() -> dict[str, Any]:
    return {"a": np.zeros(SIZE), "b": np.zeros(1), "c": np.zeros(SIZE)}


def ones() -> dict[str, Any]:
    return {name: np.ones_like(value) for name, value in state().items()}


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def pids_of(server: ParameterServer) -> list[int]:
    assert server._run is not None
    return [pid for stage in server._run.stats().stages if stage.name == server.name for pid in stage.pids]


class KillAtLine:
    """Trace function that kills this process after it has executed ``line`` lines of the product."""

    def __init__(self, line: int) -> None:
        self.left = line

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(PRODUCT):
            return None
        if event == "line":
            if self.left == 0:
                die()
            self.left -= 1
        return self


@pytest.mark.parametrize(("shards", "names"), CASES)
def test_push_is_applied_once_if_worker_dies_at_any_line(
    shards: int, names: str, monkeypatch: pytest.MonkeyPatch, long_walk: bool
) -> None:
    """Incarnation n of the worker dies during push n, at a later line than incarnation n - 1 did.
    Incarnation n + 1 applies that push.

    ``make test`` kills after every third number of lines. Together, the three cases cover every number.
    """
    serve = Shard._serve
    every, first = (1, 0) if long_walk else (3, CASES.index((shards, names)))

    def serve_and_die(self: Shard, push: Push) -> None:
        line = first + every * worker().incarnation
        if push.number == worker().incarnation and worker().number == 1:
            sys.settrace(KillAtLine(line))
        try:
            serve(self, push)
        finally:
            sys.settrace(None)

    monkeypatch.setattr(Shard, "_serve", serve_and_die)
    pushes = 250 // every
    with ParameterServer(state(), shards=shards) as server:
        client = server.client()
        given = {name: value for name, value in ones().items() if name in names}
        for version in range(1, pushes + 1):
            handle = client.push(given)
            found = client.pull()
            assert len({value for name in names for value in found[name].tolist()}) == 1
            assert handle.wait(WAIT_LIMIT_S) == version
            assert not handle.dropped
        found = client.pull()
        assert all((found[name] == (pushes if name in names else 0)).all() for name in found)
        stats = server.stats()
        assert (stats.version, stats.pushes) == (pushes, pushes)
        assert server._run is not None
        (stage,) = [stage for stage in server._run.stats().stages if stage.name == server.name]
        # the last workers survive, because a push executes fewer lines than the number of the line at which
        # they would die
        assert 40 // every < stage.restarts < pushes


def push_and_check(client: ParameterClient, pushes: int, worker: int) -> int:
    total = 0
    for number in range(pushes):
        handle = client.push(ones(), scale=float(number))
        total += number
        found = client.pull()
        assert len({value for one in found.values() for value in one.tolist()}) == 1
        if number % 7 == 0:
            handle.wait(WAIT_LIMIT_S)
    client.pull(at_least=handle.wait(WAIT_LIMIT_S))
    return total


@pytest.mark.any_value
@pytest.mark.parametrize("shards", [1, 2])
def test_sum_is_exact_despite_kills_at_random_times(shards: int) -> None:
    randomness = random.Random(shards)
    with ParameterServer(state(), shards=shards) as server:
        pushing = start(2, push_and_check, server.client(), 2000, on="process")
        stop = threading.Event()
        kills = 0
        while kills < 20:
            wait_until(lambda: bool(pids_of(server)))
            stop.wait(randomness.random() / 50)
            with contextlib.suppress(ProcessLookupError):
                os.kill(randomness.choice(pids_of(server) or [0x7FFFFFFF]), signal.SIGKILL)
                kills += 1
        totals = pushing.join()
        found = server.client().pull()
        assert {value for one in found.values() for value in one.tolist()} == {float(sum(totals))}
        assert server.stats().pushes == 4000


def test_killed_client_leaves_whole_pushes_and_frees_its_slot() -> None:
    def push_until_killed(client: ParameterClient, worker: int) -> None:
        while True:
            client.push(ones())
            client.pull()

    with ParameterServer(state()) as server:
        client = server.client()
        client.pull()
        for _ in range(5):
            before = server.stats().version
            pushing = start(1, push_until_killed, server.client(), on="process")
            wait_until(lambda: server.stats().version > before + 10)  # noqa: B023
            (stage,) = [stage for stage in pushing._run.stats().stages if stage.pids]
            os.kill(stage.pids[0], signal.SIGKILL)
            with pytest.raises(RunError, match="1 of 1 workers"):
                pushing.join()
        version = client.push(ones()).wait(WAIT_LIMIT_S)
        found = client.pull()
        assert {value for one in found.values() for value in one.tolist()} == {float(version)}
        shard = client._connected().shards[0]
        assert client._connected().slot == 0
        assert shard.slowest(0) is None  # the killed clients no longer have slots


def test_push_fails_if_it_kills_every_worker() -> None:
    def dies(current: Any, given: Any) -> Any:
        die()

    with ParameterServer(state()) as server:
        client = server.client()
        handle = client.push(ones(), rule=dies)
        with pytest.raises(WorkerDied, match=f"{MAX_DEATHS} server workers died"):
            handle.wait(WAIT_LIMIT_S)
        assert client.push(ones()).wait(WAIT_LIMIT_S) == 2
        assert (client.pull()["a"] == 1).all()


def test_dropped_push_counts_once_if_the_worker_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    end = Shard._end

    def end_and_die(self: Shard, record: Any) -> None:
        if worker().incarnation == 0 and record.dropped:
            self._own.commit(record)
            die()
        end(self, record)

    monkeypatch.setattr(Shard, "_end", end_and_die)
    with ParameterServer(state()) as server:
        client = server.client()
        client.push(ones()).wait(WAIT_LIMIT_S)
        handle = client.push(ones(), at=0, max_staleness=0)
        assert handle.wait(WAIT_LIMIT_S) == 1
        assert handle.dropped
        assert (server.stats().dropped, server.stats().version) == (1, 1)


PROGRAM = """
import os, signal, sys, time
import numpy as np
from flowchan import Broken
from flowchan.pipelines import ParameterServer
server = ParameterServer({"w": np.zeros(3)})
client, program = server.client(), os.getpid()
if os.fork():
    signal.pause()
client.push({"w": np.ones(3)}).wait()
os.kill(program, signal.SIGKILL)
while os.getppid() == program:
    time.sleep(0.01)
def push_without_waiting():
    while True:
        client.push({"w": np.ones(3)})
found = []
for call in (
    push_without_waiting,
    client.pull,
    lambda: client.pull(at_least=10**9),
    lambda: client.prefetch().wait(),
):
    try:
        call()
    except Exception as error:
        found.append(type(error).__name__)
with open(sys.argv[1] + ".new", "w") as file:
    file.write(" ".join(found))
os.rename(sys.argv[1] + ".new", sys.argv[1])
"""


def test_connected_client_of_a_killed_program_gets_broken(tmp_path: Path) -> None:
    answer = tmp_path / "answer"
    subprocess.run([sys.executable, "-c", PROGRAM, str(answer)], check=False, timeout=WAIT_LIMIT_S)
    wait_until(answer.exists)
    assert answer.read_text() == " ".join(["Broken"] * 4)
