"""Soak test: run random graphs, kill their workers at random, and check the output exactly.

    python -m tests.deaths.soak --minutes 10 --seed 1

Seed and number determine each graph. ``--seed S --graph N`` therefore repeats a failed graph, although the
kills come at other times. Items are numbers with a payload. Every stage is a function of its item, so the
correct output is known. A run without progress for ``STALL`` seconds counts as a hang.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import faulthandler
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

from flowchan import Graph, Reduced, Run, RunError, Stream
from flowchan.declare.values import DEFAULT_CAPACITY
from flowchan.run.policy import decisions
from tests.support.gangs import in_step

STALL = 60.0
"""Seconds without progress after which a run counts as hung."""
MOST_KILLS = 3
"""Number of kills without progress after which the next kill waits for progress. Workers that die faster
than they start would never finish."""
ENDLESS = 10**9
"""A limit that the random deaths of a soak never reach."""

Item = tuple[int, bytes]


# --- stage functions, which depend only on the item ---


def payload_of(number: int) -> bytes:
    """Return an empty payload for most numbers.

    Every ninth number has a payload that fills a block in shared memory, and every 50th number has a large
    payload.
    """
    return bytes(number % 251 for _ in range(1)) * (
        20_000 if number % 50 == 3 else 500 if number % 9 == 1 else 0
    )


def numbers(count: int) -> Iterator[Item]:
    for number in range(count):
        yield number, payload_of(number)


def mapped(item: Item) -> Item:
    number = 7 * item[0] + 1
    assert item[1] == payload_of(item[0]), "the payload was damaged on the way"
    return number, payload_of(number)


def several(item: Item) -> Iterator[Item]:
    for place in range(item[0] % 4):
        number = 5 * item[0] + place
        yield number, payload_of(number)


def kept(item: Item) -> bool:
    return item[0] % 3 != 0


def key(item: Item) -> int:
    return item[0]


@dataclass(frozen=True)
class Together:
    """The items combined by one round of an allreduce."""

    items: tuple[Item, ...]


def alone(item: Item) -> Together:
    return Together((item,))


def joined(one: Together, other: Together) -> Together:
    return Together(one.items + other.items)


def parted(rounds: Reduced) -> tuple[Item, ...]:
    items: tuple[Item, ...] = rounds.value.items
    return items


def slow(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Let the function take longer, so that many workers die while processing an item."""

    def work(item: Any) -> Any:
        until = time.perf_counter() + 0.000_5
        while time.perf_counter() < until:
            pass
        return function(item)

    return work


# --- graphs ---


@dataclass
class Case:
    """A random graph with its correct output."""

    graph: Graph
    out: Stream
    expected: list[Item]
    ordered: bool
    text: str
    # how many items to take: the first items of an ordered stream, or any items of an unordered stream
    most: int | None

    def wanted(self, found: list[Item]) -> list[Item]:
        """Return the correct output that is closest to ``found``."""
        if self.most is None or self.ordered:
            return self.expected[: self.most]
        chosen = Counter(found) & Counter(self.expected)
        rest = Counter(self.expected) - chosen
        return [*chosen.elements(), *rest.elements()][: self.most]


def case(seed: int, number: int) -> Case:
    """Build the graph number ``number``."""
    chance = random.Random(f"{seed} {number}")
    graph = Graph(f"soak{number}")
    count = chance.choice([0, 1, 50, 400, 1500])
    words = [f"source({count})"]
    ordered = True

    def capacity() -> int:
        return chance.choice([1, 2, 3, 8, DEFAULT_CAPACITY])

    process = chance.random() < 0.5
    words[0] += " on process" if process else ""
    stream = graph.source(
        numbers,
        count,
        on="process" if process else "thread",
        restartable=process,
        restarts=ENDLESS,
        capacity=capacity(),
    )
    items = list(numbers(count))
    for _ in range(chance.randint(1, 4)):
        kind = chance.choice(["map", "map", "flat_map", "filter", "partition", "allreduce", "gang"])
        workers, keeps = chance.randint(1, 4), chance.random() < 0.6
        on = "process" if chance.random() < 0.8 else "thread"
        options: dict[str, Any] = {
            "on": on, "workers": workers, "capacity": capacity(), "restarts": ENDLESS, "max_deaths": ENDLESS,
        }  # fmt: skip
        busy = slow if chance.random() < 0.3 else lambda function: function
        words.append(f"{kind}(on={on!r}, workers={workers}, capacity={options['capacity']}, ordered={keeps})")
        if kind == "partition":
            branches = stream.partition(busy(key), 2, **options)
            stream = graph.merge(*branches, capacity=capacity())
            ordered = False
            continue
        if kind == "allreduce":
            rounds = stream.map(busy(alone), **options).allreduce(joined, capacity=capacity())
            stream = rounds.map(parted).unbatch(capacity=capacity())
            ordered = False
            continue
        if kind == "gang":
            options = {"on": on, "workers": workers, "capacity": capacity(), "restarts": ENDLESS}
            how = {chance.choice(["restartable", "elastic"]) if on == "process" else "restartable": True}
            words[-1] += f" {how}"
            stream = graph.stage(in_step, stream, **how, **options)
            # A stage with ports does not accept max_deaths.
            graph._stages[-1] = dataclasses.replace(graph._stages[-1], max_deaths=ENDLESS)
            ordered = False
            continue
        ordered = ordered and (keeps or workers == 1)
        if kind == "map":
            stream = stream.map(busy(mapped), ordered=keeps, **options)
            items = [mapped(item) for item in items]
        elif kind == "flat_map":
            stream = stream.flat_map(busy(several), ordered=keeps, **options)
            items = [output for item in items for output in several(item)]
        else:
            stream = stream.filter(busy(kept), ordered=keeps, **options)
            items = [item for item in items if kept(item)]
    most = chance.choice([0, 1, 7, 100]) if chance.random() < 0.3 else None
    if most is not None:
        words.append(f"take({most})")
        stream = stream.take(most)
    return Case(graph, stream.collect(), items, ordered, " → ".join(words), most)


# --- kills and comparison ---


@dataclass
class Totals:
    """The totals of a soak."""

    graphs: int = 0
    kills: int = 0
    items: int = 0
    lost: int = 0
    repeated: int = 0
    disordered: int = 0
    hangs: int = 0
    failures: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return (
            f"{self.graphs} graphs, {self.kills} kills survived, {self.items} items, {self.lost} lost, "
            f"{self.repeated} repeated, {self.disordered} out of order, {self.hangs} hangs, "
            f"{len(self.failures)} failures"
        )


def soak(seconds: float, seed: int, first: int = 0, last: int | None = None) -> Totals:
    """Run graphs in turn until the time is up. The last graph runs to its end."""
    totals = Totals()
    end = time.monotonic() + seconds
    number = first
    # The soak needs deaths in quick succession, so the pauses after them are short. A random kill may hit a
    # worker before it starts working, so the limit on such deaths is lifted.
    with patch.object(decisions, "LONGEST_PAUSE", 0.01), patch.object(decisions, "HOPELESS", ENDLESS):
        while time.monotonic() < end and (last is None or number <= last):
            chance = random.Random(f"{seed} {number} kills")
            one(case(seed, number), chance, totals, f"seed {seed}, graph {number}", end)
            number += 1
    return totals


def one(case: Case, chance: random.Random, totals: Totals, name: str, end: float) -> None:
    """Run one graph, killing its worker processes until ``end``, and add the result to the totals."""

    def fail(what: str) -> None:
        totals.failures.append(f"{name}: {what}\n  {case.text}")
        print(totals.failures[-1], file=sys.stderr, flush=True)

    totals.graphs += 1
    run = case.graph.start()
    run._gathering.begin()
    pause, most = chance.choice([0.005, 0.03, 0.1]), chance.choice([20, 100, 500])
    moved, last_moved, kills = -1, time.monotonic(), 0
    while not run._supervisor.ended.wait(chance.random() * pause):
        now = progress(run)
        if now > moved:
            moved, last_moved, kills = now, time.monotonic(), 0
        if kills < MOST_KILLS and most > 0 and time.monotonic() < end:
            killed = kill_one(run, chance)
            kills, most = kills + killed, most - killed
        if time.monotonic() - last_moved > STALL:
            totals.hangs += 1
            fail(f"the run made no progress for {STALL:g} s\n{run.report()}\n{run.stats()}")
            faulthandler.dump_traceback(all_threads=True)
            break
    hung = not run._supervisor.ended.is_set()
    if hung:
        run.abort()
    totals.kills += sum(stage.restarts for stage in run.stats().stages)
    try:
        results = run.wait()
    except RunError as error:
        fail(f"the run failed: {error!r} {[str(e) for e in error.exceptions]}")
        return
    if hung:
        return
    found = results[case.out]
    totals.items += len(found)
    wanted = case.wanted(found)
    lost, repeated = Counter(wanted) - Counter(found), Counter(found) - Counter(wanted)
    totals.lost += lost.total()
    totals.repeated += repeated.total()
    if lost or repeated:
        fail(
            f"lost {sorted(n for n, _ in lost)[:20]}, repeated "
            f"{sorted(n for n, _ in repeated)[:20]}\n{run.report()}"
        )
    elif case.ordered and found != wanted:
        totals.disordered += 1
        fail("the items arrived out of order")


def kill_one(run: Run, chance: random.Random) -> bool:
    """Kill one of the run's worker processes with SIGKILL. Return False if the run has none."""
    with contextlib.suppress(RuntimeError, ValueError, OSError):  # the supervisor is replacing a worker
        processes = list(run._crew.local.processes.values())
        if processes:
            chance.choice(processes).kill()  # killing a dead process has no effect
            return True
    return False


def progress(run: Run) -> int:
    """Return the number of items put, read and finished, which grows while the run makes progress."""
    stats = [channel.stats() for channel in run._ports.channels.values()]
    return sum(stat.items_in + stat.items_out - stat.leased for stat in stats)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=1.0, help="minutes to run (default: 1)")
    parser.add_argument("--seed", type=int, default=None, help="random seed (default: a new one in each run)")
    parser.add_argument("--graph", type=int, default=None, help="run only the graph with this number")
    arguments = parser.parse_args()
    seed = random.SystemRandom().randrange(10**6) if arguments.seed is None else arguments.seed
    print(f"seed {seed}", flush=True)
    totals = soak(60 * arguments.minutes, seed, arguments.graph or 0, arguments.graph)
    print(totals)
    return 1 if totals.failures else 0


if __name__ == "__main__":
    sys.exit(main())
