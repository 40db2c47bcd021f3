"""Measure a rendezvous with four children, and the transfer of 64 MB to sixteen children."""

from __future__ import annotations

import contextlib
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import execnet
import numpy as np

from benchmarks.harness import Case, Effort, Report, Result, Row, at_least, at_most, in_words
from flowchan.pipelines import children

ISOLATES = (
    "The parent and its forked children run on one machine. In the first measurement, the parent meets each "
    "of four children 1,000 times; the time is per round and child. In the second measurement, which repeats "
    "the example of lua---parallel's README, the parent also sends an array of 100 × 100 floats and receives "
    "a short string from each child. The version for multiprocessing has one duplex Pipe per child; the "
    "parent first sends to all children and then receives from all of them. In the last measurement, the "
    "parent sends one array of 64 MB to 16 children. The clock stops when each child has read one byte of "
    "every page and has answered. For execnet, each child has one gateway, which starts a new Python "
    "interpreter; the parent sends bytes."
)

CONTEXT = multiprocessing.get_context("fork")
KIDS, ROUNDS, MOST_S = 4, 1_000, 50e-6
MANY, LARGE, PAGE = 16, 64 << 20, 4096


def measure(effort: Effort) -> Report:
    report = Report()
    rounds = ROUNDS if effort.full else 20
    works = {
        f"rendezvous with {KIDS} children": (_meet, _pipe_meet),
        f"rendezvous, array and reply, {KIDS} children": (_talk, _pipe_talk),
    }
    for work, (ours, theirs) in works.items():
        cases = [
            Case("flowchan", "s", partial(_timed, ours, rounds)),
            Case("multiprocessing.Pipe", "s", partial(_timed, theirs, rounds)),
        ]
        mine, pipe = report.interleave(work, cases, effort.rounds)
        if ours is _meet:
            report.rows.append(_absolute(mine))
        report.rows.append(at_most(1, mine, pipe))

    size = LARGE if effort.full else LARGE >> 4
    sends: dict[str, Callable[[int], float]] = {
        "flowchan": _send_large, "multiprocessing.Pipe": _pipe_large, "execnet": _execnet_large,
    }  # fmt: skip
    cases = [Case(name, "B/s", partial(_rate, send, size)) for name, send in sends.items()]
    mine, *peers = report.interleave(f"{size >> 20} MB to {MANY} children", cases, effort.rounds)
    report.rows += [at_least(2, mine, peer) for peer in peers]
    return report


def _absolute(mine: Result) -> Row:
    took = mine.figure()
    return Row(mine.work, f"≤ {in_words(MOST_S, 's')}", in_words(took, "s"), "", "", took <= MOST_S)


def _timed(rounds: Callable[[int], float], count: int) -> tuple[Sequence[float], int]:
    return [rounds(count) / count / KIDS], count * KIDS


def _rate(send: Callable[[int], float], size: int) -> tuple[Sequence[float], int]:
    return [MANY * size / send(size)], MANY


def _sent() -> dict[str, Any]:
    return {"name": "my variable", "data": np.random.default_rng(1).normal(size=(100, 100))}


# --- flowchan ---


def _clocked(kids: children.Children, count: int, one: Callable[[], Any]) -> float:
    for _ in range(10):
        one()
    began = time.perf_counter()
    for _ in range(count):
        one()
    took = time.perf_counter() - began
    kids.join("break")
    kids.wait()
    return took


def _meet(count: int) -> float:
    with children.start(KIDS) as kids:
        kids.run(_pauses)
        return _clocked(kids, count, kids.join)


def _pauses(parent: Any) -> None:
    while parent.pause() != "break":
        pass


def _talk(count: int) -> float:
    sent = _sent()

    def one() -> None:
        kids.join()
        kids.send(sent)
        kids.receive()

    with children.start(KIDS) as kids:
        kids.run(_replies)
        return _clocked(kids, count, one)


def _replies(parent: Any) -> None:
    while parent.pause() != "break":
        parent.receive()
        parent.send("this is my response")


def _send_large(size: int) -> float:
    array = np.ones(size, np.uint8)
    with children.start(MANY) as kids:
        kids.run(_read)
        kids.join()
        began = time.perf_counter()
        kids.send(array)
        sums = kids.receive()
        took = time.perf_counter() - began
        kids.wait()
    assert set(sums.values()) == {size // PAGE}
    return took


def _read(parent: Any) -> None:
    parent.pause()
    parent.send(_pages(parent.receive()))


def _pages(array: Any) -> int:
    return int(array[::PAGE].sum(dtype=np.int64))


# --- multiprocessing.Pipe ---


@contextlib.contextmanager
def _piped(count: int, work: Callable[[Any], None]) -> Iterator[list[Any]]:
    """Start children with one duplex pipe each. After the block, end them with the message ``"break"``."""
    pipes = [CONTEXT.Pipe() for _ in range(count)]
    processes = [CONTEXT.Process(target=work, args=(theirs,)) for _, theirs in pipes]
    for process in processes:
        process.start()
    ours = [pipe for pipe, _ in pipes]
    yield ours
    for pipe in ours:
        pipe.send("break")
    for process in processes:
        process.join()
    for pipe, theirs in pipes:
        pipe.close()
        theirs.close()


def _exchange(pipes: list[Any], message: Any) -> list[Any]:
    for pipe in pipes:
        pipe.send(message)
    return [pipe.recv() for pipe in pipes]


def _pipe_clocked(count: int, work: Callable[[Any], None], one: Callable[[list[Any]], Any]) -> float:
    with _piped(KIDS, work) as pipes:
        for _ in range(10):
            one(pipes)
        began = time.perf_counter()
        for _ in range(count):
            one(pipes)
        return time.perf_counter() - began


def _pipe_meet(count: int) -> float:
    return _pipe_clocked(count, _echoes, lambda pipes: _exchange(pipes, ""))


def _echoes(pipe: Any) -> None:
    while (message := pipe.recv()) != "break":
        pipe.send(message)


def _pipe_talk(count: int) -> float:
    sent = _sent()

    def one(pipes: list[Any]) -> None:
        _exchange(pipes, "")
        _exchange(pipes, sent)

    return _pipe_clocked(count, _pipe_replies, one)


def _pipe_replies(pipe: Any) -> None:
    while (message := pipe.recv()) != "break":
        pipe.send(message)
        pipe.recv()
        pipe.send("this is my response")


def _pipe_large(size: int) -> float:
    array = np.ones(size, np.uint8)
    with _piped(MANY, _pipe_reads) as pipes:
        began = time.perf_counter()
        sums = _exchange(pipes, array)
        took = time.perf_counter() - began
    assert set(sums) == {size // PAGE}
    return took


def _pipe_reads(pipe: Any) -> None:
    pipe.send(_pages(pipe.recv()))
    pipe.recv()


# --- execnet ---


def _execnet_large(size: int) -> float:
    data = np.ones(size, np.uint8).tobytes()
    group = execnet.Group([f"popen//id=child{number}" for number in range(MANY)])
    try:
        channels = [gateway.remote_exec(EXECNET_READ) for gateway in group]
        began = time.perf_counter()
        for channel in channels:
            channel.send(data)
        sums = [channel.receive() for channel in channels]
        took = time.perf_counter() - began
    finally:
        group.terminate(timeout=10)
    assert set(sums) == {size // PAGE}
    return took


EXECNET_READ = f"channel.send(sum(channel.receive()[::{PAGE}]))"
