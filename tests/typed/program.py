"""A program that uses every kind of typed object.

``make lint`` checks it with mypy and pyright, and a test runs it. ``assert_type`` states the expected types.
"""

from __future__ import annotations

import asyncio
import functools
import operator
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any, assert_type

from flowchan import (
    Broadcast,
    Channel,
    Failed,
    Feedback,
    Graph,
    In,
    Input,
    KeyedState,
    Out,
    Reduced,
    RunError,
    StageError,
    Stream,
    Window,
    auto,
    select,
)
from flowchan.collective import Group


@dataclass(frozen=True)
class Page:
    number: int
    text: str


def pages(count: int) -> Iterator[Page]:
    for number in range(count):
        yield Page(number, f"page {number} has words and page numbers")


async def ticks(count: int) -> AsyncIterator[float]:
    for number in range(count):
        yield number / 2


def words(page: Page) -> list[str]:
    return page.text.split()


async def length(word: str) -> int:
    await asyncio.sleep(0)
    return len(word)


def count(so_far: Counter[str], word: str) -> Counter[str]:
    so_far[word] += 1
    return so_far


class Shortener:
    """Class that is instantiated once per worker."""

    def __init__(self, longest: int = 4) -> None:
        self.longest = longest

    def __call__(self, word: str) -> bytes:
        return word[: self.longest].encode()


def split(numbers: In[int], small: Out[int], large: Out[str], limit: int = 3) -> None:
    for number in numbers:
        if number < limit:
            small.put(number)
        else:
            large.put(str(number))


def sorted_out(numbers: In[int], a: Out[int], b: Out[str], c: Out[bytes], most: int = 9) -> None:
    for number in numbers:
        a.put(min(number, most))
    b.put("b")
    c.put(b"c")


def seven(a: Out[int], b: Out[int], c: Out[int], d: Out[int], e: Out[int], f: Out[int], g: Out[int]) -> None:
    for port in (a, b, c, d, e, f, g):
        port.put(1)


def sums(numbers: In[int], group: Group, out: Out[float]) -> None:
    out.put(sum(numbers) / group.size)


async def steer(fresh: In[int], again: In[int], work: Out[int], done: Out[int]) -> None:
    async for number in fresh:
        await work.aput(number)
        await done.aput(await again.aget())


def channels() -> tuple[int, list[str]]:
    numbers: Channel[int] = Channel(8)
    names = Channel[str](capacity=None)
    numbers.put(1)
    numbers.put_many(range(2, 5))
    assert_type(numbers.get(), int)
    assert_type(numbers.get_many(2), list[int])
    with names.writer() as writer:
        writer.put_many(["a", "b"])
    taken = select([numbers], timeout=1)
    assert_type(taken.item, int)
    done = select([Channel[str]()], puts=[(numbers, taken.item)])
    assert_type(done.item, int | str)
    reader = names.reader()
    assert_type(reader.get(), str)
    assert_type(numbers.stats().items_in, int)
    return taken.item, [name.upper() for name in reader]


async def awaited() -> list[int]:
    numbers = Channel[int]()
    await numbers.aput(3)
    assert_type(await numbers.aget(), int)
    await numbers.aput(4)
    numbers.close()
    return [number + 1 async for number in numbers]


def lengths(graph: Graph) -> tuple[Stream[dict[str, int]], Stream[list[tuple[int, bytes]]]]:
    """Return the lengths of the words in pages, and the first letters of the words."""
    all_words = graph.source(pages, 3).flat_map(words, name="words", workers=auto(most=2))
    counted, measured, shortened = all_words.buffer(8).tee(3)
    frequencies = counted.reduce(count, Counter[str]()).map(lambda found: dict(found))
    sizes = measured.map(length, workers=4)
    begins = shortened.map(functools.partial(Shortener, 3), workers="auto")
    pairs = sizes.zip(begins)
    assert_type(pairs, Stream[tuple[int, bytes]])
    return frequencies, pairs.filter(lambda pair: pair[0] > 3).collect()


def failures(graph: Graph) -> tuple[Stream[list[float]], Stream[list[int]]]:
    """Return reciprocals, and the numbers that have no reciprocal."""

    def reciprocal(number: int) -> float:
        return 1 / number

    def failed(failure: Failed[int]) -> int:
        return failure.item

    reciprocals = graph.source([1, 0, 2]).map(reciprocal, retries=1)
    assert_type(reciprocals.errors, Stream[Failed[int]])
    return reciprocals.collect(), reciprocals.errors.map(failed).collect()


def blamed() -> list[str]:
    """Return the names of the stages that have failed in a run."""
    graph = Graph("blamed")
    graph.source([0]).map(lambda number: 1 // number, name="invert").sink(id)
    try:
        graph.run()
    except RunError as error:
        assert_type(error.exceptions, tuple[StageError, ...])
        return [one.stage for one in error.exceptions]
    return []


def stages(graph: Graph) -> tuple[Stream[list[str]], Stream[float]]:
    small, large = graph.stage(split, graph.source(range(6)))
    assert_type(large, Stream[str])
    a, b, rest = graph.stage(sorted_out, graph.source(range(6)))
    assert_type(rest, Stream[bytes])
    of_seven = graph.stage(seven)
    for stream in (a, b, rest, *of_seven):
        stream.sink(id)
    means = graph.stage(sums, small, workers=2)
    total = means.reduce(operator.add)
    step = graph.broadcast(10)
    assert_type(step, Broadcast[int])
    assert_type(step.get(), int)
    assert_type(step.read(), tuple[int, int])
    assert_type(step.set(11), int)
    again: Feedback[int] = graph.feedback("again")
    work, done = graph.stage(steer, graph.source([1, 2]), again)
    again.feed(work.map(lambda number: number * step.get()))
    both = graph.merge(large, done.map(str), graph.source(ticks, 2).map(str))
    return both.collect(), total


def keyed(graph: Graph) -> tuple[Stream[list[tuple[str, int]]], Stream[list[int]]]:
    """Return each word with its position among words with the same first letter, and the group sizes."""

    def first(word: str) -> str:
        return word[0]

    def counted(word: str, seen: KeyedState[int]) -> tuple[str, int]:
        seen.value += 1
        assert_type(seen.value, int)
        return word, seen.value

    words = graph.source(["one", "two", "three"])
    counts: Stream[tuple[str, int]] = words.map(counted, key=first, state=int)
    groups: Stream[Window[str]] = graph.source(["one", "two", "three"]).group_by(first)
    latest: Stream[Window[str]] = graph.source(["one", "two", "three"]).window(2, every=1)
    latest.sink(id)
    return counts.collect(), groups.map(lambda group: len(group.items)).collect()


def main() -> dict[str, Any]:
    graph = Graph("typed")
    frequencies, pairs = lengths(graph)
    good, bad = failures(graph)
    texts, total = stages(graph)
    so_far, group_sizes = keyed(graph)
    reduced = graph.source([1, 2]).allreduce("max")
    assert_type(reduced, Stream[Reduced[int]])
    assert_type(Graph("unread").source([1]).allreduce(to_workers=True), Stream[tuple[int, Reduced[Any]]])
    largest = reduced.map(lambda one: one.value).collect()
    lower, upper = graph.source("abc").partition(str.isupper, 2)
    both = graph.merge(lower, upper).batch(2)
    assert_type(both, Stream[list[str]])
    letters = both.unbatch().take(2).collect()
    questions: Input[str] = graph.input("questions")
    answers = questions.map(len, on="thread").collect()
    frequency = frequencies.collect()
    with graph.start() as run:
        run[questions].put("how long?")
        run[questions].close()
        for answer in run.iter(answers):
            assert_type(answer, int)
    results = run.wait()
    assert_type(results[pairs], list[tuple[int, bytes]])
    assert_type(results[total], float)
    assert_type(results[frequency], list[dict[str, int]])
    return {
        "channels": channels(),
        "awaited": asyncio.run(awaited()),
        "words": results[frequency][0]["page"],
        "pairs": results[pairs][0],
        "good": results[good],
        "bad": results[bad],
        "blamed": blamed(),
        "texts": sorted(results[texts]),
        "total": results[total],
        "largest": results[largest],
        "letters": results[letters],
        "so far": results[so_far],
        "group sizes": sorted(results[group_sizes]),
    }


if __name__ == "__main__":
    print(main())
