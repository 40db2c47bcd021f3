"""Test the recordings of runs with killed workers, and of killed programs."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

import pytest
from kill_points import Deaths
from support.optional_packages import optional
from support.scripts import forked, script, start
from support.waiting import wait_until

from flowchan import Graph, Recording

numpy = optional("numpy")

ITEMS = 60

PROGRAM = """
    import os
    import numpy
    from flowchan import Graph

    effects = os.open("effects", os.O_WRONLY | os.O_APPEND | os.O_CREAT)


    def made(number):
        return number, numpy.full(number * 97 % 50_000, number)


    def effect(item):
        os.write(effects, b"%d\\n" % item[0])


    graph = Graph("kills")
    graph.source(range(100_000)).map(made, on="process", workers=2, name="made").sink(effect, on="process")
    graph.record("made", "items.rec")
    graph.run()
"""


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("payload", [0, 100_000])
def test_items_are_recorded_once_if_workers_are_killed(workers: int, payload: int, tmp_path: Path) -> None:
    writing, reading = Deaths(0, 7, 8, ITEMS - 1), Deaths(0, 20, 21, ITEMS - 1)

    def write(number: int) -> tuple[int, bytes]:
        writing.at(number)
        return number, bytes(payload)

    def read(item: tuple[int, bytes]) -> int:
        reading.at(item[0])
        return item[0]

    graph = Graph("recorded")
    items = graph.source(range(ITEMS)).map(write, on="process", workers=workers, name="write", capacity=4)
    numbers = items.map(read, on="process", workers=workers, name="read").collect()
    graph.record("write", tmp_path / "items.rec")
    with graph.start() as run:
        assert run.wait()[numbers] == list(range(ITEMS))
    restarts = {stage.name: stage.restarts for stage in run.stats().stages}
    assert (restarts["write"], restarts["read"]) == (writing.total, reading.total)
    assert list(Recording(tmp_path / "items.rec")) == [(number, bytes(payload)) for number in range(ITEMS)]


@pytest.mark.parametrize("kills", [8, pytest.param(100, marks=pytest.mark.long)])
def test_recording_of_a_killed_program_has_every_item_read(kills: int, tmp_path: Path) -> None:
    chosen, program = random.Random(kills), script(tmp_path, PROGRAM)
    effects, path = tmp_path / "effects", tmp_path / "items.rec"
    with forked("numpy"):
        for _ in range(kills):
            effects.write_text("")
            target = chosen.randrange(300)
            with start(program, cwd=tmp_path) as process:
                wait_until(lambda target=target: len(effects.read_text().split()) >= target)
                os.kill(process.pid, signal.SIGKILL)
                process.communicate()
            recording = Recording(path)
            assert not recording.complete
            numbers = []
            for number, array in recording:
                assert numpy.array_equal(array, numpy.full(number * 97 % 50_000, number))
                numbers.append(number)
            assert numbers == list(range(len(recording)))
            assert set(map(int, effects.read_text().split())) <= set(numbers)
