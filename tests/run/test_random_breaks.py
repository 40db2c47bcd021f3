"""Test R3 and R5 with random graphs that break at a random point: each result is complete or missing."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

from flowchan import Broken, Drained, Graph, In, Out, RunError, Stream, select

VARIANTS = ("raise", "break the input", "break the output")


class Fault(Exception):
    """Exception that a failing stage raises."""


class Harm:
    """Function that raises or breaks a channel at the item with this number; 0 means never."""

    def __init__(self, variant: str = "raise", number: int = 0) -> None:
        self.variant, self.remaining = variant, number

    def __call__(self, item: Any, ports: tuple[In[Any], Out[Any]] | None = None) -> Any:
        self.remaining -= 1
        if self.remaining == 0:
            if ports is None or self.variant == "raise":
                raise Fault
            ports[self.variant == "break the output"].channel.abort(Fault())
        return item


def splitting(harm: Harm, how: str) -> Callable[..., None]:
    """Return a stage that distributes its items among two outputs."""

    def split(items: In[Any], even: Out[Any], odd: Out[Any]) -> None:
        for item in items:
            (odd if harm(item, (items, even)) % 2 else even).put(item)

    def in_a_block(items: In[Any], even: Out[Any], odd: Out[Any]) -> None:
        with items, even, odd:
            split(items, even, odd)

    def in_silence(items: In[Any], even: Out[Any], odd: Out[Any]) -> None:
        try:
            split(items, even, odd)
        except Broken:
            pass

    return {"plain": split, "block": in_a_block, "silence": in_silence}[how]


def steering(harm: Harm) -> Callable[..., None]:
    """Return a stage that sends each item through a loop three times."""

    def steer(fresh: In[Any], again: In[Any], work: Out[Any], done: Out[Any]) -> None:
        under_way = 0
        while True:
            try:
                taken = select([again] if under_way == 8 else [fresh, again] if under_way else [fresh])
            except Drained:
                return
            under_way -= taken.channel is again
            item, rounds = taken.item if taken.channel is again else (taken.item, 3)
            harm(item, (again, work))
            if rounds:
                work.put((item, rounds - 1))
                under_way += 1
            else:
                done.put(item)

    return steer


def grown(seed: int, harmed: bool, seen: dict[str, Any]) -> Graph:
    """Return a random graph that depends only on the seed, and record its results in ``seen``.

    If ``harmed`` is true, one stage fails or breaks a channel.
    """
    chance = random.Random(seed)
    graph = Graph(f"random {seed}")
    streams: list[Stream[Any]] = [
        graph.source(range(chance.choice([30, 200])), capacity=chance.choice([1, 64]))
    ]
    stages = chance.randint(2, 6)
    guilty, variant, at = chance.randrange(stages), chance.choice(VARIANTS), chance.choice([1, 2, 5, 17])
    for number in range(stages):
        harm = Harm(variant, at if harmed and number == guilty else 0)
        one, on = streams.pop(chance.randrange(len(streams))), chance.choice(["thread", "process"])
        streams += added(chance, graph, one, harm, on)
    for number, stream in enumerate(streams):
        name = f"end {number}"

        def see(value: Any, name: str = name) -> None:
            seen[name] = value

        total = stream.reduce(int.__add__, 0) if chance.random() < 0.5 else stream.collect().map(sorted)
        total.sink(see, name=name)
    return graph


def added(chance: random.Random, graph: Any, one: Any, harm: Harm, on: Any) -> Iterator[Stream[Any]]:
    """Add a random stage, and yield its outputs."""
    kind = chance.choice(["map", "batch", "tee", "split", "loop"])
    if kind == "map":
        yield one.map(harm, on=on, workers=chance.choice([1, 2]), ordered=False)
    elif kind == "batch":
        yield one.batch(3).map(lambda items: [harm(item) for item in items], on=on).unbatch()
    elif kind == "tee":
        yield from one.map(harm, on=on).tee(2)
    elif kind == "split":
        yield from graph.stage(splitting(harm, chance.choice(["plain", "block", "silence"])), one, on=on)
    else:
        again = graph.feedback()
        work, done = graph.stage(steering(harm), one, again, on=on)
        again.feed(work.map(list))
        yield done


def test_random_graphs_that_break_show_only_complete_results(long_walk: bool) -> None:
    broken = 0
    for seed in range(200 if long_walk else 12):
        whole: dict[str, Any] = {}
        grown(seed, False, whole).run()
        seen: dict[str, Any] = {}
        try:
            grown(seed, True, seen).run()
        except RunError:
            broken += 1
        else:
            assert seen == whole, seed
        assert seen == {end: whole[end] for end in seen}, seed
    assert broken
