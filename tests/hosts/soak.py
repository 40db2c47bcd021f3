"""Run graphs over hosts under chaos for some minutes, and compare every result exactly.

The chaos kills workers and agents, cuts and resets connections, and silences hosts for shorter or longer than
the ``peer_timeout``. The wires add a delay. Run it with ``python -m tests.hosts.soak --minutes 5 --seed 1``.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import faulthandler
import operator
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import psutil

from benchmarks.slow_connections import cut
from flowchan import Graph, Reduced
from flowchan.hosts.host_pool import Pool
from flowchan.run.policy import decisions
from tests.support.gangs import in_step
from tests.support.local_agents import agents_of
from tests.support.network_proxy import Wire, wired

HANG = 120.0
# maximum number of agents to kill or disconnect per run, because a run abandons hosts whose agents die too
# often
MOST_AGENTS = 8
PEER_TIMEOUT_S = 2.0
DEEDS = {
    "connections cut": 4, "connections reset": 4, "workers killed": 4, "agents killed": 4,
    "short silences": 2, "long silences": 1,
}  # fmt: skip
FATAL = ("agents killed", "long silences")


def slow(item: int) -> int:
    if item % 20 == 0:
        time.sleep(0.004)
    return item


def several(item: int) -> Iterator[tuple[int, int]]:
    for number in range(item % 4):
        yield item, number


class Together(tuple[int, ...]):
    """The items combined by one round of an allreduce."""

    def __add__(self, other: Any) -> Together:
        return Together((*self, *other))


def alone(item: int) -> Together:
    return Together((item,))


def parted(rounds: Reduced) -> list[int]:
    return list(rounds.value)


def agents() -> list[psutil.Process]:
    """Return the agents that have workers."""
    found = []
    for agent in agents_of(psutil.Process()):
        with contextlib.suppress(psutil.Error):
            if agent.children():
                found.append(agent)
    return found


def chaos(chance: random.Random, over: threading.Event, deeds: Counter[str], wires: tuple[Wire, ...]) -> None:
    fatal = 0
    while not over.wait(chance.uniform(0.05, 0.4)):
        with contextlib.suppress(psutil.Error, IndexError):  # the victims may already have ended
            (deed,) = chance.choices(list(DEEDS), list(DEEDS.values()))
            if deed in FATAL:
                fatal += 1
                if fatal > MOST_AGENTS:
                    continue
            if deed == "connections cut":
                cut()
            elif deed == "connections reset":
                chance.choice(wires).reset()
            elif deed == "short silences":
                chance.choice(wires).be_silent(chance.uniform(0.1, 0.7) * PEER_TIMEOUT_S)
            elif deed == "long silences":
                chance.choice(wires).be_silent(chance.uniform(1.2, 2.5) * PEER_TIMEOUT_S)
            elif deed == "workers killed":
                chance.choice(chance.choice(agents()).children()).kill()
            else:
                chance.choice(agents()).kill()
            deeds[deed] += 1


def one_run(seed: int, items: int, deeds: Counter[str]) -> None:
    chance = random.Random(seed)
    wires = tuple(Wire(chance.choice([0, 0.001, 0.02])) for _ in range(2))
    with wired(2, *wires, peer_timeout=PEER_TIMEOUT_S) as pool:
        _one_run(seed, chance, items, deeds, pool, wires)


def _one_run(
    seed: int, chance: random.Random, items: int, deeds: Counter[str], pool: Pool, wires: tuple[Wire, ...]
) -> None:
    ordered = chance.random() < 0.5
    options: dict[str, Any] = {"on": pool, "ordered": ordered, "restarts": 10**6, "max_deaths": 10**6}
    graph = Graph(f"soak {seed}")
    stream = graph.source(range(items)).map(slow, workers=chance.choice([1, 2, 4]), **options)
    expected: list[Any] = list(range(items))
    kind = chance.choice(["", "flat_map", "gang", "allreduce"])
    if kind == "flat_map":
        stream = stream.flat_map(several, workers=chance.choice([1, 3]), **options)
        expected = [output for item in range(items) for output in several(item)]
    elif kind == "gang":
        gang: dict[str, Any] = {"on": pool, "workers": chance.choice([2, 3]), "restarts": 10**6}
        elastic = chance.random() < 0.5
        stream = graph.stage(in_step, stream, restartable=True, elastic=elastic, **gang)
        ordered = False
        # A stage with ports does not accept max_deaths.
        graph._stages[-1] = dataclasses.replace(graph._stages[-1], max_deaths=10**6)
    elif kind == "allreduce":
        rounds = stream.map(alone, workers=3, **options).allreduce(operator.add)
        stream, ordered = rounds.map(parted).unbatch(), False
    most = chance.choice([1, 100, items // 2]) if chance.random() < 0.2 else None
    if most is not None:
        stream = stream.take(most)
    result, over = stream.collect(), threading.Event()
    run = graph.start()
    thread = threading.Thread(target=chaos, args=(chance, over, deeds, wires))
    thread.start()
    try:
        found = run.wait()[result]
    finally:
        over.set()
        thread.join()
    wanted = expected[:most] if ordered else sorted({*expected} & {*found} if most else expected)
    if (found if ordered else sorted(found)) != wanted or len(found) != len(expected[:most]):
        twice = [output for output, count in Counter(found).items() if count > 1]
        missing = sorted(set(wanted) - set(found))
        raise SystemExit(f"seed {seed}: missing {missing[:9]}, twice {twice[:9]}\n{run.report()}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--items", type=int, default=3000)
    arguments = parser.parse_args()
    deeds: Counter[str] = Counter()
    until, runs = time.monotonic() + 60 * arguments.minutes, 0
    # a worker may be killed several times before it starts working
    with patch.object(decisions, "HOPELESS", 10**6):
        while time.monotonic() < until:
            faulthandler.dump_traceback_later(HANG, exit=True)
            print(f"seed {arguments.seed + runs}", end="\r", flush=True)
            one_run(arguments.seed + runs, arguments.items, deeds)
            runs += 1
    print(f"{runs} runs exact; {', '.join(f'{count} {deed}' for deed, count in sorted(deeds.items()))}")


if __name__ == "__main__":
    main()
