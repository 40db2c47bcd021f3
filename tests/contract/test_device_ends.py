"""Test what happens when senders of device tensors end, in a run or outside of a run, on a fake device."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from fake_device import FAKE, FakeTensor, kept
from support.waiting import wait_until

from flowchan import Channel, ChannelError, Full, Graph, RunError
from flowchan.transport.device import arenas

MB = 1 << 20

pytestmark = [pytest.mark.copying, pytest.mark.usefixtures("fake_device")]


def _put_and_return(ch: Channel, count: int) -> None:
    for number in range(count):
        ch.put(FakeTensor(np.full(10, number)))


def _put_and_leave(ch: Channel, count: int) -> None:
    _put_and_return(ch, count)
    os._exit(0)


@pytest.mark.other_process
def test_c12_producer_that_exits_after_its_put_loses_no_item(make, spawn_peer):
    ch = make(64)
    peer = spawn_peer(_put_and_return, ch, 20)
    assert ch.get().numpy()[0] == 0
    wait_until(lambda: len(ch) == 19)
    assert [int(ch.get().numpy()[0]) for _ in range(19)] == list(range(1, 20))
    assert peer.join() == 0


@pytest.mark.other_process
def test_error_names_the_producer_that_exited_abruptly_and_the_remedy(make, spawn_peer, monkeypatch):
    """The error is the same whether or not the reader has already opened the producer's memory."""
    ch = make(64)
    peer = spawn_peer(_put_and_leave, ch, 2)
    pid = peer._process.pid
    peer.join()
    for _ in range(2):
        with pytest.raises(ChannelError, match=rf"process {pid} put.*has ended.*FLOWCHAN_CUDA_IPC=0"):
            ch.get()
    assert len(ch) == 0
    monkeypatch.setenv("FLOWCHAN_CUDA_IPC", "0")
    spawn_peer(_put_and_leave, ch, 2).join()
    assert [int(ch.get().numpy()[0]) for _ in range(2)] == [0, 1]


def _put_one_by_one(ch: Channel, go: Channel) -> None:
    for number in range(2):
        ch.put(FakeTensor(np.full(10, number)))
    go.get()


@pytest.mark.other_process
def test_items_from_a_killed_producer_raise_and_free_its_memory(make, spawn_peer):
    ch, go = make(64), make(1)
    peer = spawn_peer(_put_one_by_one, ch, go)
    wait_until(lambda: len(ch) == 2)
    assert ch.get().numpy()[0] == 0
    peer.kill()
    peer.join()
    with pytest.raises(ChannelError, match="has ended"):
        ch.get()
    assert (FAKE.counts["open"], FAKE.counts["close"]) == (1, 1)
    other = spawn_peer(_put_and_return, ch, 1)
    assert ch.get().numpy()[0] == 0
    other.join()
    assert (FAKE.counts["open"], FAKE.counts["close"]) == (2, 1)
    another = spawn_peer(_put_and_return, ch, 1)
    assert ch.get().numpy()[0] == 0
    assert (FAKE.counts["open"], FAKE.counts["close"]) == (3, 2)
    another.join()


SCRIPT = """
import sys
sys.path[:0] = {paths!r}
import numpy as np
from fake_device import FAKE, FakeTensor
from flowchan import Channel
from flowchan.transport.device import transfer as crossing
crossing.use(FAKE)
channel = Channel(across="processes")
channel.put(FakeTensor(np.ones(10)))
print("put", flush=True)
{more}
"""


def _script(more: str, **environment: str) -> subprocess.CompletedProcess[str]:
    here = Path(__file__).parent
    code = SCRIPT.format(paths=[str(here), str(here.parent)], more=more)
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        timeout=100,
    )


def test_exit_does_not_wait_for_tensors_without_readers():
    ended = _script("")
    assert (ended.stdout, ended.stderr, ended.returncode) == ("put\n", "", 0)


def test_exit_stops_waiting_at_its_time_limit_and_reports_losses():
    """Another process has the channel but never reads it."""
    more = (
        "import os, signal, threading, time\n"
        "if (child := os.fork()) == 0:\n"
        "    signal.pause()\n"
        "import atexit\n"
        "atexit.register(os.kill, child, signal.SIGKILL)\n"
        "import multiprocessing.util as util\n"
        "atexit.register(util._exit_function)\n"  # runs before multiprocessing kills the child
    )
    ended = _script(more, FLOWCHAN_CUDA_EXIT_WAIT="0.5")
    assert "ends with 1 items in <Channel(" in ended.stderr
    assert "no process has read for 0.5 s (FLOWCHAN_CUDA_EXIT_WAIT)" in ended.stderr
    assert ended.returncode == 0


# --- In a run, and across forks ---


def _made(number: int) -> FakeTensor:
    return FakeTensor(np.full(1000, number))


def _doubled(tensor: FakeTensor) -> FakeTensor:
    tensor.fill(2 * int(tensor.numpy()[0]))
    return tensor


def _killing(tensor: FakeTensor) -> Any:
    """Change the received tensor and, the first time only, kill this process."""
    number = int(tensor.numpy()[0])
    tensor.fill(-1)
    if number == 30 and (marker := Path(os.environ["MARKER"])).exists():
        marker.unlink()
        os.kill(os.getpid(), 9)
    return number


def test_stages_in_processes_forward_tensors(tmp_path, monkeypatch):
    marker = tmp_path / "marker"
    marker.touch()
    monkeypatch.setenv("MARKER", str(marker))
    graph = Graph("device")
    tensors = (
        graph.source(range(50)).map(_made, on="process", workers=2).map(_doubled, on="process", workers=2)
    )
    numbers = tensors.map(_killing, on="process").collect()
    assert graph.run()[numbers] == [2 * number for number in range(50)]
    assert not marker.exists()


def test_workers_of_a_stopped_run_exit_without_waiting(monkeypatch, capfd):
    """If the channel has no reader, its tensors need no memory, even if other processes have it open."""
    monkeypatch.setenv("FLOWCHAN_CUDA_EXIT_WAIT", "1")
    graph = Graph("early")
    first = graph.source(range(1000)).map(_made, on="process").take(3).collect()
    assert [int(tensor.numpy()[0]) for tensor in graph.run()[first]] == [0, 1, 2]
    assert capfd.readouterr().err == ""


def _made_until_killed(number: int) -> FakeTensor:
    if number == 30 and not (marker := Path(os.environ["MARKER"])).exists():
        marker.write_text(str(os.getpid()))
        os.kill(os.getpid(), 9)
    return _made(number)


def _read_late(tensor: FakeTensor) -> int:
    marker = Path(os.environ["MARKER"])
    wait_until(lambda: marker.exists() and marker.read_text() != "" and not _runs(int(marker.read_text())))
    return int(tensor.numpy()[0])


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("switch", ["1", "0"])
def test_device_tensors_of_killed_worker_survive_only_in_host_memory(tmp_path, monkeypatch, switch):
    """The run must report the loss, and must not continue without the tensors."""
    monkeypatch.setenv("MARKER", str(tmp_path / "marker"))
    monkeypatch.setenv("FLOWCHAN_CUDA_IPC", switch)
    graph = Graph("killed")
    numbers = (
        graph.source(range(50)).map(_made_until_killed, on="process").map(_read_late, on="process").collect()
    )
    if switch == "0":
        assert graph.run()[numbers] == list(range(50))
    else:
        with pytest.raises(RunError) as raised:
            graph.run()
        assert "FLOWCHAN_CUDA_IPC=0" in str(raised.value.exceptions[0].__cause__)


COUNT = 150


def _put_at_random(ch: Channel, seed: int) -> None:
    """Put tensors of all sizes from two threads, stopping the stream often."""

    stream = FAKE.stream("fake-A")

    def go_on() -> None:
        stream.held = False
        stream.go_on()

    def put(thread: int) -> None:
        chance = random.Random(10 * seed + thread)
        for number in range(thread, COUNT, 2):
            stream.held = chance.random() < 0.3
            name = seed * COUNT + number
            size = chance.choice([1, 1000, 50_000, 300_000])
            item = name, FakeTensor(np.full(size, name)), FakeTensor([name], "fake-B")
            try:
                ch.put(item, timeout=0.05)
            except Full:  # the readers that could make room wait for our stream
                go_on()
                ch.put(item)
            if chance.random() < 0.5:
                go_on()
        go_on()

    threads = [threading.Thread(target=put, args=(thread,)) for thread in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _check_and_spoil(ch: Channel, seen: Channel, dies_after: int) -> None:
    with ch.reader() as reader:
        for count, (name, large, small) in enumerate(reader):
            assert (large.numpy() == name).all()
            assert small.numpy().tolist() == [name]
            large.fill(-1)
            seen.put(name)
            if count == dies_after:
                os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.other_process
def test_tensors_arrive_intact_under_load_while_receivers_are_killed(make, spawn_peer, monkeypatch):
    monkeypatch.setattr(arenas, "ARENA", MB)
    ch, seen = make(16), make(10_000)
    receivers = [
        spawn_peer(_check_and_spoil, ch, seen, dies_after) for dies_after in (10, 20, COUNT**2, COUNT**2)
    ]
    wait_until(lambda: ch.stats().readers == len(receivers))
    senders = [spawn_peer(_put_at_random, ch, seed) for seed in range(3)]
    for sender in senders:
        sender.result()
    ch.close()
    for receiver in receivers[2:]:
        receiver.result()
    seen.close()
    assert set(seen) == set(range(3 * COUNT))


def _use_and_return(ch: Channel, back: Channel) -> int:
    item = ch.get()
    back.put(FakeTensor(item.numpy() + 1))
    return FAKE.counts["open"]


@pytest.mark.other_process
def test_forked_child_has_its_own_arenas_and_opens_the_parents(make, spawn_peer):
    ch, back = make(2), make(2)
    ch.put(FakeTensor(np.zeros(10)))
    peer = spawn_peer(_use_and_return, ch, back)  # by now, the parent has an arena
    assert back.get().numpy().tolist() == [1] * 10
    assert peer.result() == 1
    assert kept() == 0
