"""Test that failures name their part, killed workers are replaced, and closed pipes leave nothing behind."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import signal
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from plain import Watched, dense, is_same, on_both_placements, plain
from support.waiting import wait_blocked, wait_until
from torch import Tensor, nn

from flowchan import Closed, StageError, WorkerDied
from flowchan.pipelines import Sequential


class Breaks(nn.Module):
    """Layer that raises for a micro-batch with a negative value."""

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type != "meta" and bool((x < 0).any()):
            raise ArithmeticError(f"negative: {x.min():g}")
        return x


@on_both_placements
def test_failing_part_names_its_layers_and_the_micro_batch(on: Any) -> None:
    with Sequential(
        [nn.Identity(), nn.Identity(), Breaks(), nn.Identity()], on=on, parts=[1, 3], chunks=4
    ) as pipe:
        x = torch.ones(8, 2)
        assert torch.equal(pipe(x), x)
        x[5] = -3
        with pytest.raises(StageError) as raised:
            pipe(x)
        error = raised.value
        assert "part 1 (layers '1' to '3') failed on micro-batch 2 of 4 of batch 1" in str(error)
        assert "ArithmeticError: negative: -3" in str(error)
        assert (error.stage, error.item) == ("part 1", "micro-batch 2 of 4 of batch 1")
        assert isinstance(error.__cause__, ArithmeticError)
        assert torch.equal(pipe(x.abs()), x.abs())  # the pipe can still be used


@on_both_placements
def test_exception_from_a_call_is_freed_at_once(on: Any) -> None:
    """The exception's traceback is not part of a reference cycle."""

    def failure() -> weakref.ref[StageError]:
        try:
            pipe(-torch.ones(8, 2))
        except StageError as error:
            return weakref.ref(error)
        raise AssertionError("nothing was raised")

    with Sequential([nn.Identity(), Breaks()], on=on) as pipe:
        pipe(torch.ones(8, 2))
        gc.disable()
        try:
            found = failure()
            # a thread may hold the exception for a moment
            wait_until(lambda: found() is None, peer_timeout=10)
        finally:
            gc.enable()


@on_both_placements
def test_failure_in_a_stream_does_not_affect_other_streams(on: Any) -> None:
    with Sequential([nn.Identity(), Breaks()], on=on) as pipe:
        good = pipe.stream(torch.ones(4, 1) for _ in range(12))
        assert torch.equal(next(good), torch.ones(4, 1))
        bad = pipe.stream(torch.full((4, 1), value) for value in (1.0, 2.0, -1.0, 4.0))
        assert next(bad)[0] == 1
        assert next(bad)[0] == 2
        with pytest.raises(StageError, match="part 1"):
            next(bad)
        assert list(bad) == []
        assert len(list(good)) == 11


class Killed(nn.Module):
    """Layer that kills its process if a value is negative, at most ``times`` times."""

    def __init__(self, marks: Path, times: int) -> None:
        super().__init__()
        self.marks, self.times = marks, times

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type != "meta" and bool((x < 0).any()) and len(list(self.marks.iterdir())) < self.times:
            (self.marks / str(os.getpid())).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return x


def test_worker_killed_once_is_replaced_without_wrong_outputs(tmp_path: Path) -> None:
    with Sequential([nn.Linear(3, 3), Killed(tmp_path, 1), nn.Linear(3, 3)], parts=3, on="process") as pipe:
        batches = [torch.randn(16, 3) * 10 for _ in range(6)]
        outputs = list(pipe.stream(batches))
        module = pipe.module
        assert len(list(tmp_path.iterdir())) == 1
        assert all(is_same(y, plain(module, x), "process") for x, y in zip(batches, outputs, strict=True))


def test_workers_killed_from_outside_are_replaced(tmp_path: Path) -> None:
    class ReturnsPid(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + os.getpid() * 0 if x.device.type == "meta" else torch.full_like(x, os.getpid())

    with Sequential([ReturnsPid(), nn.Identity()], on="process", chunks=2) as pipe:
        for _ in range(3):
            pid = int(pipe(torch.zeros(2, 1, dtype=torch.int64))[0])
            stream = pipe.stream(torch.zeros(2, 1, dtype=torch.int64) for _ in range(40))
            assert int(next(stream)[0]) == pid
            os.kill(pid, signal.SIGKILL)
            rest = [y.flatten().tolist() for y in stream]
            assert len(rest) == 39
            wait_until(lambda pid=pid: int(pipe(torch.zeros(2, 1, dtype=torch.int64))[0]) != pid)  # type: ignore[misc]


def test_micro_batch_that_kills_every_worker_fails(tmp_path: Path) -> None:
    with Sequential([nn.Identity(), Killed(tmp_path, 99)], on="process", chunks=2) as pipe:
        with pytest.raises(StageError) as raised:
            pipe(torch.tensor([[1.0], [-1.0]]))
        assert (
            "part 1 (layer '1') failed on micro-batch 1 of 2 of batch 0: WorkerDied: 3 workers died"
            in str(raised.value)
        )
        assert isinstance(raised.value.__cause__, WorkerDied)
        assert torch.equal(pipe(torch.ones(4, 1)), torch.ones(4, 1))


@on_both_placements
def test_part_that_exits_ends_only_the_current_run(on: Any) -> None:
    class Exits(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if x.device.type != "meta" and bool((x < 0).any()):
                raise SystemExit(3)
            return x

    with Sequential([nn.Identity(), Exits()], on=on) as pipe:
        assert torch.equal(pipe(torch.ones(2, 1)), torch.ones(2, 1))
        with pytest.raises(StageError, match="part 1") as raised:
            pipe(-torch.ones(2, 1))
        assert isinstance(raised.value.__cause__, SystemExit)
        assert torch.equal(pipe(torch.ones(2, 1)), torch.ones(2, 1))


# --- ending ---


@on_both_placements
def test_close_is_idempotent_and_later_use_raises(on: Any) -> None:
    pipe = Sequential(dense(), on=on)
    stream = pipe.stream(torch.ones(2, 6) for _ in range(100))
    next(stream)
    pipe.close()
    pipe.close()
    with pytest.raises(Closed, match="closed"):
        list(stream)
    with pytest.raises(Closed, match="is closed; create another one"):
        pipe(torch.ones(2, 6))
    with pytest.raises(Closed):
        pipe.stream([])


def test_unused_pipe_can_be_closed() -> None:
    with Sequential(dense(), on="process") as pipe:
        pass
    with pytest.raises(Closed):
        pipe(torch.ones(2, 6))


def test_close_ends_a_call_in_progress() -> None:
    entered, leave = threading.Event(), threading.Event()

    def hold(x: Tensor) -> None:
        entered.set()
        leave.wait()

    pipe = Sequential([nn.Identity(), Watched(hold)])
    ended: list[BaseException] = []

    def call() -> None:
        try:
            pipe(torch.ones(4, 1))
        except Closed as error:
            ended.append(error)

    caller, closer = threading.Thread(target=call), threading.Thread(target=pipe.close)
    caller.start()
    entered.wait()
    closer.start()
    caller.join()  # the call ends without waiting for the part
    leave.set()
    closer.join()
    assert "was closed" in str(ended[0])


def test_ctrl_c_ends_a_waiting_call_but_not_the_pipe() -> None:
    leave = threading.Event()

    def interrupt() -> None:
        wait_until(lambda: 0 in pipe._inference.run.out)
        wait_blocked(pipe._inference.run.out[0].outcome, readers=1)
        os.kill(os.getpid(), signal.SIGINT)

    with Sequential([nn.Identity(), Watched(lambda x: leave.wait())]) as pipe:
        helper = threading.Thread(target=interrupt)
        helper.start()
        with pytest.raises(KeyboardInterrupt):
            pipe(torch.ones(4, 1))
        helper.join()
        leave.set()
        assert torch.equal(pipe(torch.ones(4, 1)), torch.ones(4, 1))


@on_both_placements
def test_ctrl_c_in_a_call_does_not_affect_a_stream(on: Any) -> None:
    """A call also reads outputs of other batches, and Ctrl-C may interrupt it at any point."""
    generator = random.Random(0)
    interrupted = 0
    with Sequential([nn.Identity(), nn.Identity()], on=on, chunks=4) as pipe, interrupting_alarms():
        for _ in range(150):
            stream = pipe.stream(torch.full((1, 1), float(number)) for number in range(8))
            assert next(stream) == 0
            try:
                try:
                    signal.setitimer(signal.ITIMER_REAL, generator.uniform(1e-5, 2e-3))
                    for _ in range(100):
                        pipe(torch.zeros(4, 1))
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                interrupted += 1
            assert [float(y) for y in stream] == [1, 2, 3, 4, 5, 6, 7]
    assert interrupted


@contextlib.contextmanager
def interrupting_alarms() -> Iterator[None]:
    """Make SIGALRM raise ``KeyboardInterrupt``."""
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGALRM, before)


class Stubborn:
    """Object that cannot be unpickled."""

    def __reduce__(self) -> Any:
        return int, ("no number",)


def test_unpicklable_output_ends_only_the_current_run() -> None:
    class Odd(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return Stubborn() if x.device.type != "meta" and bool((x < 0).any()) else x

    with Sequential([nn.Identity(), Odd()], on="process", chunks=1) as pipe:
        assert torch.equal(pipe(torch.ones(2, 1)), torch.ones(2, 1))
        with pytest.raises(ValueError, match="no number"):
            pipe(-torch.ones(2, 1))
        assert torch.equal(pipe(torch.ones(2, 1)), torch.ones(2, 1))


@on_both_placements
def test_pipe_with_unread_outputs_can_be_closed(on: Any) -> None:
    """The channel cannot hold all of the outputs."""
    pipe = Sequential([nn.Identity(), nn.Identity()], on=on, chunks=1)
    for _ in range(30):
        stream = pipe.stream(torch.ones(1, 1) for _ in range(6))
        next(stream)
        stream.close()
    pipe.close()


@on_both_placements
def test_garbage_collected_pipe_releases_all_resources(on: Any) -> None:
    pipe = Sequential(dense(), on=on)
    pipe(torch.ones(4, 6))
    for _ in range(30):  # the channel cannot hold all of the unread outputs
        stream = pipe.stream([torch.ones(1, 6)] * 6)
        next(stream)
        del stream
    reference = weakref.ref(pipe)
    del pipe
    gc.collect()
    assert reference() is None  # the check for leftovers after each test covers the rest


def test_stream_keeps_its_pipe_alive() -> None:
    outputs = list(Sequential(dense()).stream(torch.ones(4, 6) for _ in range(9)))
    assert len(outputs) == 9
