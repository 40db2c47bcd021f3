"""Test ``flowchan.pipelines.children`` with the samples and examples of lua---parallel.

Each test is named after a section of lua---parallel's README or a file in ``examples``, but contains none of
the original code. Arrays replace Torch's tensors. Endless examples end here after a fixed number of rounds,
so the tests can check their results. The following samples differ from the originals:

``parallel.children``, ``parallel.nchildren``
    ``start`` returns the children, and ``len(kids)`` and ``kids.alive`` replace the count.
``ip=``, ``cores=``, ``protocol=``, ``lua=``
    A pool names the hosts, their cores and their Python.
code as a string
    ``run`` takes the name of a function.
``pcall`` with ``parallel.close()``
    The ``with`` block of the children replaces the protected call.
``cloudPBS``
    ``hosts.slurm()`` replaces ``cloudPBS``; see tests/hosts_real.
``clientStorage``, ``serverStorage``
    These examples use only ZeroMQ; see tests/pipelines/test_client_server.py.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.ssh_stub import ssh_stub
from support.waiting import WAIT_LIMIT_S

from flowchan import hosts
from flowchan.hosts import Pool
from flowchan.pipelines import children

PREFIX = r"<child 00{0}( on \S+)?> "
"""Pattern for the prefix of a line from ``parent.print``."""


@pytest.fixture
def ssh_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make ``ssh`` start agents on this machine, and let the agents import this file."""
    here = Path(__file__).parent
    path = filter(None, (os.environ.get("PYTHONPATH"), str(here), str(here.parent)))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))
    with ssh_stub(tmp_path):
        yield


def lines_of(out: str, number: int) -> list[str]:
    """Return the lines of this child's output, without their prefixes."""
    prefix = re.compile(PREFIX.format(number))
    return [line[match.end() :] for line in out.splitlines() if (match := prefix.match(line))]


# --- README: starting children ---


def test_fork_and_nfork_start_children() -> None:
    with children.start(1) as one, children.start(4) as kids:
        assert (len(one), len(kids)) == (1, 4)
        assert [kid.number for kid in kids] == [1, 2, 3, 4]
        assert len({kid.pid for kid in (*one, *kids)}) == 5


def test_nfork_places_children_on_two_servers() -> None:
    pool = hosts.ssh({"myserver.org": 4, "myserver2.org": 6}, python="/path/to/python")
    assert Counter(pool.dealt(10)) == {"myserver.org": 4, "myserver2.org": 6}


def test_addremote_and_sfork_deal_children_by_cores() -> None:
    pool = hosts.ssh({"server1.org": 8, "server2.org": 16, "server3.org": 4})
    assert Counter(pool.dealt(16)) == {"server1.org": 6, "server2.org": 6, "server3.org": 4}


def test_calibrate_sets_the_speeds_of_children() -> None:
    pool = hosts.local(2)
    speeds = pool.calibrate(timeout=WAIT_LIMIT_S)
    assert max(speeds.values()) == 1.0
    assert all(0 < speed <= 1 for speed in speeds.values())
    with children.start(2, on=pool) as kids:
        assert {kid.host: kid.speed for kid in kids} == speeds


# --- README: running code ---


def introduce(parent: Any, *args: Any) -> None:
    parent.print(np.arange(10))
    parent.send((parent.number, args))


def test_children_exec_code_with_arguments(capfd: pytest.CaptureFixture[str]) -> None:
    with children.start(2) as kids:
        kids.run(introduce, "an argument", 2)
        assert kids.receive(timeout=WAIT_LIMIT_S) == {1: (1, ("an argument", 2)), 2: (2, ("an argument", 2))}
        kids.wait(timeout=WAIT_LIMIT_S)
    out = capfd.readouterr().out
    assert [lines_of(out, number) for number in (1, 2)] == [["[0 1 2 3 4 5 6 7 8 9]"]] * 2


def test_exec_runs_the_named_function_in_each_child() -> None:
    with children.start(2) as kids:
        for kid in kids:
            kid.run(f"{__name__}:introduce", kid.number * 10)
        assert kids.receive(timeout=WAIT_LIMIT_S) == {1: (1, (10,)), 2: (2, (20,))}
        kids.wait(timeout=WAIT_LIMIT_S)


def find_parent(parent: Any) -> tuple[bool, bool]:
    return children.parent() is not None, children.parent().number == parent.number


def test_child_knows_its_parent_and_the_program_has_none() -> None:
    assert children.parent() is None
    with children.start(1) as kids:
        kids.run(find_parent)
        assert kids.wait(timeout=WAIT_LIMIT_S) == {1: (True, True)}


# --- README: yield and join ---


def print_something(parent: Any) -> None:
    while True:
        parent.print("something")
        if parent.pause() == "break":
            break


def test_yield_and_join_meet_in_each_round(capfd: pytest.CaptureFixture[str]) -> None:
    with children.start(1) as kids:
        kids.run(print_something)
        for _ in range(10):
            kids[1].join(timeout=WAIT_LIMIT_S)
    assert len(lines_of(capfd.readouterr().out, 1)) in (10, 11)


def test_join_with_break_ends_the_loop(capfd: pytest.CaptureFixture[str]) -> None:
    with children.start(1) as kids:
        kids.run(print_something)
        kids[1].join("break", timeout=WAIT_LIMIT_S)
        kids.wait(timeout=WAIT_LIMIT_S)
    assert lines_of(capfd.readouterr().out, 1) == ["something"]


def do_nothing(parent: Any) -> None:
    pass


def test_sync_waits_and_nchildren_counts() -> None:
    with children.start(1) as kids:
        kids.run(do_nothing)
        assert len(kids) == 1
        kids.wait(timeout=WAIT_LIMIT_S)
        assert not kids.alive
    with children.start(2) as others:
        assert len(others) == 2
        assert others.alive


# --- README: send, receive and print ---


def print_objects(parent: Any, count: int) -> None:
    for _ in range(count):
        parent.print("received object:", parent.receive(timeout=WAIT_LIMIT_S))


def test_send_and_receive_transfer_objects(capfd: pytest.CaptureFixture[str]) -> None:
    table = {1: "a table", "entry2": "with arbitrary entries", "tensor": np.zeros((2, 2))}
    with children.start(2) as kids:
        kids.run(print_objects, 3)
        for _ in range(3):
            kids[1].send(table)
            kids[2].send(table["entry2"])
        kids.wait(timeout=WAIT_LIMIT_S)
    out = capfd.readouterr().out
    assert out.count("received object: {1: 'a table', 'entry2': 'with arbitrary entries'") == 3
    assert lines_of(out, 2) == ["received object: with arbitrary entries"] * 3


def wait_endlessly(parent: Any) -> None:
    parent.receive()


def fail_with_children(kids: children.Children) -> None:
    with kids:
        kids.run(wait_endlessly)
        print(1 / 0)


def test_protected_call_closes_children_after_an_error() -> None:
    kids = children.start(2)
    with pytest.raises(ZeroDivisionError):
        fail_with_children(kids)
    assert not kids.alive


# --- README: complete example, also in examples/parallelLocal and parallelRemote ---


def answer(parent: Any) -> int:
    parent.print(f"I am a worker, my number is {parent.number} and my host is {parent.host}")
    rounds = 0
    while parent.pause(timeout=WAIT_LIMIT_S) != "break":
        received = parent.receive(timeout=WAIT_LIMIT_S)
        parent.print("received object with norm:", np.linalg.norm(received["data"]))
        parent.send("this is my response")
        rounds += 1
    return rounds


def talk(kids: children.Children, rounds: int) -> None:
    """Run the loop of the README's complete example."""
    kids.run(answer)
    sent = {"name": "my variable", "data": np.random.default_rng(1).normal(size=(100, 100))}
    for _ in range(rounds):
        kids.join(timeout=WAIT_LIMIT_S)
        kids.send(sent, timeout=WAIT_LIMIT_S)
        replies = kids.receive(timeout=WAIT_LIMIT_S)
        assert replies == dict.fromkeys(range(1, len(kids) + 1), "this is my response")
    kids.join("break", timeout=WAIT_LIMIT_S)
    assert set(kids.wait(timeout=WAIT_LIMIT_S).values()) == {rounds}


def test_parallel_local_completes_all_rounds(capfd: pytest.CaptureFixture[str]) -> None:
    with children.start(4) as kids:
        talk(kids, 1000)
    out = capfd.readouterr().out
    norm = np.linalg.norm(np.random.default_rng(1).normal(size=(100, 100)))
    for number in range(1, 5):
        first, *others = lines_of(out, number)
        assert first.startswith(f"I am a worker, my number is {number} and my host is ")
        assert others == [f"received object with norm: {norm}"] * 1000


@pytest.mark.usefixtures("ssh_here")
def test_parallel_remote_runs_children_over_ssh(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Place three children on a host with two cores."""
    pool = hosts.ssh({"localhost": 2}, python=sys.executable)
    with children.start(3, on=pool) as kids:
        assert "has 2 cores in total, but gets 3 workers" in caplog.text
        assert [kid.host for kid in kids] == ["localhost"] * 3
        talk(kids, 5)
    out = capfd.readouterr().out
    assert out.count("<child 003 on localhost> received object with norm: ") == 5


# --- examples ---


def time_additions(parent: Any) -> None:
    ones, sums = np.ones(10_000), np.zeros(10_000)
    parent.pause(timeout=WAIT_LIMIT_S)
    began = time.perf_counter()
    for _ in range(100):
        sums += 13 * ones
    parent.send(time.perf_counter() - began)


def test_parallel_fork_and_sync_can_run_twice() -> None:
    for _ in range(2):
        with children.start(4) as kids:
            assert len(kids) == 4
            kids.run(time_additions)
            kids.join(timeout=WAIT_LIMIT_S)
            times = kids.receive(timeout=WAIT_LIMIT_S)
            assert sorted(times) == [1, 2, 3, 4]
            assert all(seconds > 0 for seconds in times.values())
            kids.wait(timeout=WAIT_LIMIT_S)
            assert not kids.alive


@pytest.fixture
def two_machines(ssh_here: None) -> Pool:
    return hosts.ssh({"first": 2, "second": 2}, python=sys.executable)


def test_parallel_calibrate_measures_two_machines(two_machines: Pool) -> None:
    speeds = two_machines.calibrate(timeout=WAIT_LIMIT_S)
    assert sorted(speeds) == ["first", "second"]
    assert two_machines.speeds == speeds
    with children.start(4, on=two_machines) as kids:
        assert {(kid.host, kid.speed) for kid in kids} == set(speeds.items())


def add_images(parent: Any, count: int) -> Any:
    total = np.float64(0)
    for _ in range(count):
        parent.pause(timeout=WAIT_LIMIT_S)
        total += parent.receive(timeout=WAIT_LIMIT_S).sum(dtype=np.float64)
    return total


def test_parallel_big_transfer_delivers_all_images() -> None:
    image = np.random.default_rng(1).random((3, 480, 640), dtype=np.float32)
    with children.start(1) as process:
        process.run(add_images, 100)
        for _ in range(100):
            process.join(timeout=WAIT_LIMIT_S)
            process.send(image, timeout=WAIT_LIMIT_S)
        (total,) = process.wait(timeout=WAIT_LIMIT_S).values()
    assert total == pytest.approx(100 * image.sum(dtype=np.float64))


def call_functions(parent: Any) -> int:
    while (code := parent.receive(timeout=WAIT_LIMIT_S)) is not None:
        code(parent)
    return saved


saved = 0


def save_next_frame(parent: Any, folder: Path) -> None:
    """Save the next frame under a consecutive number, which the child counts."""
    global saved
    frame = parent.receive(timeout=WAIT_LIMIT_S)
    np.save(folder / f"frame_{saved:05}.npy", frame)
    saved += 1


def test_parallel_process_queue_saves_all_frames(tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    frames = [random.random((30, 40), dtype=np.float32) for _ in range(100)]
    with children.start(1) as queue:
        queue.run(call_functions)
        for frame in frames:
            queue.send(lambda parent: save_next_frame(parent, tmp_path), timeout=WAIT_LIMIT_S)
            queue.send(frame, timeout=WAIT_LIMIT_S)
        queue.send(None)
        assert queue[1].wait(timeout=WAIT_LIMIT_S) == 100
    for number, frame in enumerate(frames):
        assert (np.load(tmp_path / f"frame_{number:05}.npy") == frame).all()


def receive_in_place(parent: Any) -> tuple[bool, list[float]]:
    """Receive five arrays into one array. Return whether each call returned that array."""
    storage = np.empty(100)
    same = True
    for _ in range(5):
        same = parent.receive(timeout=WAIT_LIMIT_S, into=storage) is storage and same
    return same, storage[:3].tolist()


def test_parallel_test_receives_into_the_same_storage() -> None:
    """Example from the first README: each of four workers receives five storages."""
    with children.start(4) as kids:
        kids.run(receive_in_place)
        for _ in range(5):
            kids.send(np.arange(1.0, 101.0), timeout=WAIT_LIMIT_S)
        assert kids.wait(timeout=WAIT_LIMIT_S) == dict.fromkeys(range(1, 5), (True, [1.0, 2.0, 3.0]))
