"""Type errors. Each line's comment lists the codes with which mypy and pyright report the error;
``tools/typed.py`` compares them. This file is never run."""

# pyright: standard

from __future__ import annotations

from collections.abc import Iterator

import flowchan
from flowchan import Channel, Failed, Feedback, Graph, In, Input, Out, Stream, select

numbers = Channel[int](4)
names: Channel[str] = Channel(4)
reader: In[int] = numbers.reader()
writer: Out[int] = numbers.writer()

# Public names
flowchan.Chanel()  # wrong: attr-defined, reportAttributeAccessIssue
made: str = flowchan.Channel()  # wrong: assignment, reportAssignmentType

# Channels and ports
numbers.put("x")  # wrong: arg-type, reportArgumentType
numbers.put_nowait(None)  # wrong: arg-type, reportArgumentType
numbers.put_many(["a", "b"])  # wrong: list-item, reportArgumentType
text: str = numbers.get()  # wrong: assignment, reportAssignmentType
texts: list[str] = numbers.get_many(3)  # wrong: assignment, reportAssignmentType
writer.put("x")  # wrong: arg-type, reportArgumentType
writer.put_many([b"x"])  # wrong: list-item, reportArgumentType
name: str = reader.get()  # wrong: assignment, reportAssignmentType
other: In[str] = numbers.reader()  # wrong: assignment, reportAssignmentType
wider: Out[object] = numbers.writer()  # wrong: assignment, reportAssignmentType
mixed: Channel[object] = numbers  # wrong: assignment, reportAssignmentType
unbounded = Channel[int](across="process")  # wrong: arg-type, reportArgumentType
closing = numbers.closed()  # wrong: operator, reportCallIssue
chosen: str = select([numbers]).item  # wrong: assignment, reportAssignmentType
select([numbers, names]).item.upper()  # wrong: attr-defined, reportAttributeAccessIssue
select(puts=[(numbers, "x")])  # wrong: misc, reportArgumentType
select(reader)  # wrong: arg-type, reportArgumentType, reportCallIssue
for number in reader:
    number.upper()  # wrong: attr-defined, reportAttributeAccessIssue


async def waits() -> None:
    await numbers.aput("x")  # wrong: arg-type, reportArgumentType
    await writer.aput(b"x")  # wrong: arg-type, reportArgumentType
    print(await names.aget() + await numbers.aget())  # wrong: operator, reportOperatorIssue
    async for one in reader:
        one.upper()  # wrong: attr-defined, reportAttributeAccessIssue


# Streams


def half(number: int) -> float:
    return number / 2


def letters(word: str) -> Iterator[str]:
    yield from word


async def fetch(number: int) -> bytes:
    return bytes(number)


class Model:
    def __call__(self, number: int) -> str:
        return str(number)


def split(items: In[int], even: Out[int], odd: Out[str]) -> None: ...


graph = Graph("mistakes")
start = graph.source([1, 2])
words = start.map(Model)

start.map(letters)  # wrong: arg-type, reportArgumentType, reportCallIssue
start.map(half).map(letters)  # wrong: arg-type, reportArgumentType, reportCallIssue
start.map(half, worker=2)  # wrong: call-overload, reportCallIssue
start.map(half, workers="2")  # wrong: call-overload, reportArgumentType, reportCallIssue
start.map(half, on="threads")  # wrong: call-overload, reportArgumentType, reportCallIssue
start.map(fetch).map(half)  # wrong: arg-type, reportArgumentType, reportCallIssue
words.map(half)  # wrong: arg-type, reportArgumentType, reportCallIssue
start.flat_map(half)  # wrong: arg-type, reportArgumentType, reportCallIssue
start.filter(letters)  # wrong: arg-type, reportArgumentType, reportCallIssue
start.sink(letters)  # wrong: arg-type, reportArgumentType, reportCallIssue
start.batch("3")  # wrong: arg-type, reportArgumentType
start.batch(3).map(half)  # wrong: arg-type, reportArgumentType, reportCallIssue
start.unbatch()  # wrong: misc, reportAttributeAccessIssue
start.reduce(letters, 0)  # wrong: arg-type, reportArgumentType
start.zip([1, 2])  # wrong: call-overload, reportArgumentType, reportCallIssue
start.zip(words).map(half)  # wrong: arg-type, reportArgumentType, reportCallIssue
graph.source(3)  # wrong: arg-type, reportArgumentType
wrong: Stream[str] = start.filter(bool)  # wrong: assignment, reportAssignmentType
failed: Stream[Failed[str]] = start.map(half).errors  # wrong: assignment, reportAssignmentType
even, odd, more = graph.stage(split, start)  # wrong: misc, reportAssignmentType
graph.stage(split, start)[1].map(half)  # wrong: arg-type, reportArgumentType, reportCallIssue
graph.merge(start, words).map(half)  # wrong: arg-type, reportArgumentType, reportCallIssue
questions: Input[str] = graph.input()
questions.map(half)  # wrong: arg-type, reportArgumentType, reportCallIssue
graph.broadcast(3).set("three")  # wrong: arg-type, reportArgumentType
back: Feedback[str] = graph.feedback()
back.feed(start)  # wrong: arg-type, reportArgumentType
result: list[str] = graph.run()[start.collect()]  # wrong: index, reportAssignmentType
with graph.start() as run:
    run[questions].put(3)  # wrong: arg-type, reportArgumentType
    run[words]  # wrong: index, reportArgumentType
    asking = run.ask(questions, 3)  # wrong: misc, reportArgumentType
    for item in run.iter(words.collect()):
        half(item)  # wrong: arg-type, reportArgumentType
run.iter(start)  # wrong: arg-type, reportArgumentType
