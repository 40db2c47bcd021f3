"""Measure round trips of an int between two processes, and the CPU time of a blocked process.

Both sides are active during the round trips; the blocked process waits for 10 s.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks.harness import (
    Effort,
    Report,
    Row,
    at_most,
    echo,
    in_figures,
    in_words,
    round_trips,
    timed_trips,
)
from benchmarks.peers import CONTEXT, Ends, fast_fifo, multiprocessing_queue, os_pipe, processes_channel

ISOLATES = (
    "Two channels connect two processes. The parent puts and gets; a forked child gets each item and puts it "
    "back. The clock runs from the first put to the last get, after one warm-up trip. The blocked side reads "
    "its own CPU clock before and after a get that waits for its item. A blocked get wakes up ten times a "
    "second, because the process that would wake it may have been killed. A process that only sleeps, for "
    "0.1 s at a time, shows the least CPU time that such wake-ups can take."
)

MAKERS = {
    "flowchan": processes_channel,
    "multiprocessing.Queue": multiprocessing_queue,
    "faster-fifo": fast_fifo,
    "os pipe": os_pipe,
}
# CPU times below this value cannot be measured. Reading the clock and waking up once would account for too
# large a part of them.
NOT_MEASURABLE = 1e-3


def measure(effort: Effort) -> Report:
    report = Report()
    cases = [round_trips(name, partial(_trips, make), effort) for name, make in MAKERS.items()]
    mine, queue, *_ = report.interleave("round trip between two processes", cases, effort.rounds)
    report.rows.append(at_most(1 / 20, mine, queue))
    report.rows.append(_blocked(10 if effort.full else 1))
    return report


def _trips(make: Callable[[], Ends], count: int) -> float:
    there, back = make(), make()
    child = CONTEXT.Process(target=echo, args=(back.put, there.get, count))
    child.start()
    took = timed_trips(there.put, back.get, count)
    child.join()
    return took


def _blocked(seconds: float) -> Row:
    """Measure the CPU time of children that are blocked in a get for ``seconds`` seconds.

    All children wait at the same time.
    """
    used: dict[str, float] = {}
    names = ("flowchan", "multiprocessing.Queue")
    waits = [threading.Thread(target=_wait_blocked, args=(name, seconds, used)) for name in names]
    waits.append(threading.Thread(target=_wait_sleeping, args=(seconds, used)))
    for wait in waits:
        wait.start()
    for wait in waits:
        wait.join()
    mine, peer = used["flowchan"], used["multiprocessing.Queue"]
    return Row(
        f"CPU of a side blocked for {seconds:g} s",
        f"< {in_words(NOT_MEASURABLE, 's')}, not measurable",
        in_words(mine, "s"),
        f"{in_words(peer, 's')} (multiprocessing.Queue), {in_words(used['sleeps'], 's')} (sleeps of 0.1 s)",
        in_figures(peer / mine),
        mine < NOT_MEASURABLE,
    )


def _wait_blocked(name: str, seconds: float, used: dict[str, float]) -> None:
    there, back = MAKERS[name](), os_pipe()
    child = CONTEXT.Process(target=_get_late, args=(there, back))
    child.start()
    back.get()
    time.sleep(seconds)
    there.put(0)
    used[name] = back.get()
    child.join()


def _wait_sleeping(seconds: float, used: dict[str, float]) -> None:
    back = os_pipe()
    child = CONTEXT.Process(target=_sleep_often, args=(round(seconds * 10), back))
    child.start()
    used["sleeps"] = back.get()
    child.join()


def _sleep_often(times: int, back: Ends) -> None:
    before = time.process_time()
    for _ in range(times):
        time.sleep(0.1)
    spent: Any = time.process_time() - before
    back.put(spent)


def _get_late(there: Ends, back: Ends) -> None:
    back.put("ready")
    before = time.process_time()
    there.get()
    spent: Any = time.process_time() - before
    back.put(spent)
