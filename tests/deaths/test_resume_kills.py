"""Test R14: a program that is killed at random points and resumed has all effects of every item."""

from __future__ import annotations

import os
import random
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.scripts import forked, script, start
from support.waiting import wait_until

from flowchan.run.policy.lineage import FinishedItems
from flowchan.run.resume_file import HEADER_BYTES

UNDER_WAY = 100
"""Upper bound for the items in the graph: the capacities of its channels, batches, and items in workers."""

PROGRAM = """
    import os, sys, time
    from flowchan import Graph

    effects = os.open("effects", os.O_WRONLY | os.O_APPEND | os.O_CREAT)


    def effect(*what):
        time.sleep(0.003)  # so that items wait in the channels when the program is killed
        os.write(effects, (" ".join(map(str, what)) + "\\n").encode())


    def repeated(number):
        for place in range(number % 3):
            yield number, place


    async def small(number):
        if number % 7 == 0:
            raise ValueError(number)
        return number


    graph = Graph("kills")
    left, right = graph.source(range(int(sys.argv[1])), capacity=2).tee(2, capacity=2)
    pairs = left.flat_map(repeated, on="process", workers=2, capacity=2)
    batches = pairs.batch(3, timeout=0.01, capacity=2).map(sorted, name="sort", on="process", capacity=2)
    batches.unbatch(capacity=2).sink(lambda pair: effect("part", *pair), name="a", on="process", workers=2)
    even, odd = right.filter(lambda number: number % 5, capacity=2).partition(
        lambda number: number % 2, 2, capacity=2
    )
    checked = odd.map(small, workers=2, capacity=2)
    checked.errors.sink(lambda failed: effect("failed", failed.item), name="c")
    graph.merge(even, checked, capacity=2).sink(lambda number: effect("whole", number), name="b")
    graph.run(resume="progress")
"""


def expected(number: int) -> Iterator[str]:
    """Yield the effects of one source item."""
    for place in range(number % 3):
        yield f"part {number} {place}"
    if number % 5:
        yield f"failed {number}" if number % 2 and number % 7 == 0 else f"whole {number}"


def effects(folder: Path) -> Counter[str]:
    path = folder / "effects"
    return Counter(path.read_text().splitlines() if path.exists() else [])


def finished(folder: Path) -> FinishedItems:
    path = folder / "progress"
    return FinishedItems(bits=path.read_bytes()[HEADER_BYTES:] if path.exists() else b"")


def check_record(folder: Path, items: int) -> None:
    """Check that finished items have all their effects, and how many items a later run may repeat."""
    done = finished(folder)  # read this first, because worker processes may outlive the program for a moment
    found = effects(folder)
    begun = 0
    for number in range(items):
        if done.is_finished(number):
            assert all(found[effect] for effect in expected(number)), number
        else:
            begun += any(found[effect] for effect in expected(number))
    assert begun <= UNDER_WAY


def kill_at_random(process: subprocess.Popen[str], folder: Path, chosen: random.Random) -> bool:
    """Kill the program after a random number of further effects. Return whether it was still running."""
    target = sum(effects(folder).values()) + chosen.randrange(60)
    wait_until(lambda: process.poll() is not None or sum(effects(folder).values()) >= target)
    if process.poll() is not None:
        return False
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    return True


@pytest.mark.parametrize("kills", [5, pytest.param(100, marks=pytest.mark.long)])
def test_r14_killed_program_completes_all_effects(kills: int, tmp_path: Path) -> None:
    chosen, items = random.Random(kills), 40 * kills
    program = script(tmp_path, PROGRAM)
    with forked():
        killed = 0
        for _ in range(kills):
            with start(program, str(items), cwd=tmp_path) as process:
                killed += kill_at_random(process, tmp_path, chosen)
            check_record(tmp_path, items)
        with start(program, str(items), cwd=tmp_path) as process:
            _, err = process.communicate()
    assert process.returncode == 0, err
    found = effects(tmp_path)
    assert found.keys() == {effect for number in range(items) for effect in expected(number)}
    repeated = sum(count - 1 for count in found.values())
    assert killed == kills
    assert repeated <= 3 * UNDER_WAY * killed
    done = finished(tmp_path)
    assert all(done.is_finished(number) for number in range(items))
