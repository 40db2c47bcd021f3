"""What spawned and forkserver children run: functions that such a child can import by name."""

from __future__ import annotations

from typing import Any

from flowchan import Channel


def echo(there: Any, back: Any) -> None:
    """Sends all that comes from one channel into the other, then closes that."""
    for item in there:
        back.put(item)
    back.close()


def answer_by_what_arrives(carrier: Any) -> None:
    """Gets pairs of channels through a channel, and passes one item from the first to the second of each
    pair."""
    for source, reply in carrier:
        reply.put(("answer", source.get()))


def make_and_send(carrier: Any) -> None:
    """Makes a pair of channels here, sends it to whoever reads the carrier, and adds one to what comes
    back."""
    source, reply = Channel(3, across="processes"), Channel(1, across="processes")
    carrier.put((source, reply))
    reply.put(source.get() + 1)


def write_by_port(channel: Any, items: list[Any]) -> None:
    """Puts the items through a counted end, so that its exit closes the channel."""
    with channel.writer() as out:
        out.put_many(items)


def pass_one(source: Any, target: Any) -> None:
    target.put(source.get())


def put_and_take_back(first: Any, second: Any, result: Any) -> None:
    """Puts into one argument and gets from another, which are said to be the same channel."""
    first.put("round")
    result.put(second.get())


def echo_sums(there: Any, back: Any) -> None:
    """Answers with the sum of each array, and keeps them all; at the end with all the sums once more."""
    kept = []
    for item in there:
        kept.append(item)
        back.put(sum_of(item))
    for item in kept:
        back.put(sum_of(item))


def sum_of(item: Any) -> int:
    return int(item if isinstance(item, int) else item.sum())
