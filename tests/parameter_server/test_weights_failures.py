"""Test ``Weights`` while trainers and readers are killed or stopped."""

from __future__ import annotations

import contextlib
import os
import random
import signal
from collections import Counter
from typing import Any

import numpy as np
import pytest
from published_weights import everywhere, reader_of, remote_reader
from support.peers import HostPeer, ProcessPeer
from support.waiting import wait_until

from flowchan import Broken, Channel, Empty, hosts
from flowchan.pipelines import Weights, WeightsReader


def train(where: str, readers: Channel[Any], go_on: Channel[None]) -> None:
    """Publish once, send two readers, wait for ``go_on``, and publish until the process is killed."""
    hosts.serve(peer_timeout=2)  # maximum seconds until a remote reader notices that the trainer is dead
    weights = Weights({"w": np.ones(50_000)}, name="policy")
    weights.publish()
    readers.put(reader_of(weights, where))
    readers.put(weights.reader())
    go_on.get()
    while True:
        weights.publish()


@everywhere
def test_refresh_raises_broken_with_weights_name_if_trainer_is_killed(where: str) -> None:
    readers: Channel[WeightsReader] = Channel(across="hosts")
    go_on: Channel[None] = Channel(across="hosts")
    trainer = HostPeer(train, where, readers, go_on)
    early, late = readers.get(60), readers.get(60)
    assert early.refresh(timeout=60) == 1
    trainer.kill()
    trainer.join()
    for reader in (early, late):
        with pytest.raises(
            Broken, match=rf"weights 'policy': the trainer \(process {trainer.pid()}\) has exited"
        ):
            reader.refresh(timeout=60)


@everywhere
def test_waiting_refresh_raises_broken_if_the_trainer_is_killed(where: str) -> None:
    readers: Channel[WeightsReader] = Channel(across="hosts")
    go_on: Channel[None] = Channel(across="hosts")
    trainer = HostPeer(train, where, readers, go_on)
    reader = readers.get(60)
    reader.refresh(timeout=60)

    def wait() -> None:
        with pytest.raises(Broken, match="weights 'policy': "):
            reader.refresh(at_least=10**9)

    waiting = ProcessPeer(wait)
    assert waiting.running()
    trainer.kill()
    trainer.join()
    waiting.result()


@everywhere
def test_readers_see_whole_versions_if_trainer_dies_at_random_time(where: str) -> None:
    for _ in range(3):
        readers: Channel[WeightsReader] = Channel(across="hosts")
        go_on: Channel[None] = Channel(across="hosts")
        trainer = HostPeer(train, where, readers, go_on)
        reader = readers.get(60)
        go_on.put(None)
        last, until = 0, random.randrange(1, 30)
        try:
            while True:
                reader.refresh(at_least=last + 1, timeout=60)
                last = reader.version
                assert set(reader.values["w"].tolist()) == {1.0}
                if last >= until:
                    trainer.kill()
        except Broken:
            trainer.join()
        assert last >= until


def open_files() -> Counter[str]:
    """Count this process's open files by kind, except the memory of the weights."""
    found: Counter[str] = Counter()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found[os.readlink(f"/proc/self/fd/{number}").partition(":[")[0]] += 1
    del found["/memfd:flowchan weights (deleted)"]
    return found


def refresh_forever(reader: WeightsReader, begun: Channel[None]) -> None:
    reader.refresh(timeout=60)
    begun.put(None)
    while True:
        reader.refresh()


@everywhere
def test_killed_readers_leave_no_resources_in_use(where: str) -> None:
    """The trainer releases the memory, slots and files of the killed readers."""
    trained = {"w": np.ones(50_000)}
    with Weights(trained) as weights:
        weights.publish()
        reader = reader_of(weights, where)
        reader.refresh()
        files = open_files()
        for _ in range(5):
            begun: Channel[None] = Channel(across="hosts")
            killed = HostPeer(refresh_forever, reader_of(weights, where), begun)
            begun.get(60)
            for _ in range(random.randrange(30)):
                trained["w"] += 1
                weights.publish()
            killed.kill()
            killed.join()
            del begun
        for _ in range(2):
            weights.publish()
        reader.refresh()
        weights.publish()
        reader.refresh()
        assert weights._memory.count() <= (3 if where == "remote" else 2)
        wait_until(lambda: not open_files() - files, 10, lambda: open_files() - files)


@everywhere
def test_stopped_reader_stalls_neither_trainer_nor_other_readers(where: str) -> None:
    trained = {"w": np.ones(50_000)}
    with Weights(trained) as weights:
        weights.publish()
        begun: Channel[None] = Channel(across="hosts")
        stopped = HostPeer(refresh_forever, reader_of(weights, where), begun)
        begun.get(60)
        os.kill(stopped.pid(), signal.SIGSTOP)
        reader = reader_of(weights, where)
        for _ in range(10):
            version = weights.publish()
            assert reader.refresh(timeout=60) == version
        assert weights._memory.count() <= 4
        stopped.kill()
        stopped.join()


def test_remote_refresh_times_out_while_the_trainer_is_stopped() -> None:
    readers: Channel[WeightsReader] = Channel(across="hosts")
    go_on: Channel[None] = Channel(across="hosts")
    trainer = HostPeer(train, "remote", readers, go_on)
    reader = readers.get(60)
    assert reader.refresh(timeout=60) == 1
    os.kill(trainer.pid(), signal.SIGSTOP)
    with pytest.raises(Empty, match="weights 'policy': the trainer did not answer within the timeout"):
        reader.refresh(timeout=0.1)
    os.kill(trainer.pid(), signal.SIGCONT)
    assert reader.refresh(timeout=60) is None
    trainer.kill()
    trainer.join()


def test_trainer_stopped_while_publishing_does_not_stall_readers() -> None:
    readers: Channel[WeightsReader] = Channel(across="hosts")
    go_on: Channel[None] = Channel(across="hosts")
    trainer = HostPeer(train, "here", readers, go_on)
    reader = readers.get(60)
    go_on.put(None)
    for _ in range(10):
        reader.refresh(at_least=reader.version + 1, timeout=60)
        os.kill(trainer.pid(), signal.SIGSTOP)
        reader.refresh()
        assert reader.refresh() is None
        os.kill(trainer.pid(), signal.SIGCONT)
    trainer.kill()
    trainer.join()


def test_remote_refresh_copies_whole_version_after_an_interrupted_refresh(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trained = {"w": np.ones(1000)}
    with Weights(trained) as weights:
        weights.publish()
        reader = remote_reader(weights)
        reader.refresh()
        copy = reader._remote
        assert copy is not None
        trained["w"][:] = 2
        weights.publish()

        def interrupted(*_: Any) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr("flowchan.pipelines.parameter_server.weights.apply_delta", interrupted)
            trained["w"][0] = 3
            weights.publish()
            with pytest.raises(KeyboardInterrupt):
                reader.refresh()
        assert reader.refresh() == 3
        assert reader.values["w"].tolist() == trained["w"].tolist()
