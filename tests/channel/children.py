"""Functions that run in child processes. The start methods spawn and forkserver import them by name."""

from __future__ import annotations

from typing import Any

from flowchan import Channel


def echo(requests: Any, replies: Any) -> None:
    """Copy all items from one channel to another, and then close the second channel."""
    for item in requests:
        replies.put(item)
    replies.close()


def answer_by_what_arrives(carrier: Any) -> None:
    """Receive pairs of channels. For each pair, move one item from the first channel to the second."""
    for source, reply in carrier:
        reply.put(("answer", source.get()))


def make_and_send(carrier: Any) -> None:
    """Create two channels, send them through the carrier, and answer each number n with n + 1."""
    source, reply = Channel(3, across="processes"), Channel(1, across="processes")
    carrier.put((source, reply))
    reply.put(source.get() + 1)


def write_by_port(channel: Any, items: list[Any]) -> None:
    """Put the items through a writer. The end of the writer's block closes the channel."""
    with channel.writer() as out:
        out.put_many(items)


def pass_one(source: Any, target: Any) -> None:
    target.put(source.get())


def put_and_take_back(first: Any, second: Any, result: Any) -> None:
    """Put an item into ``first`` and get it from ``second``; both must refer to the same channel."""
    first.put("round")
    result.put(second.get())


def echo_sums(requests: Any, replies: Any) -> None:
    """Answer each array with its sum, keep all arrays, and send all sums again at the end."""
    kept = []
    for item in requests:
        kept.append(item)
        replies.put(sum_of(item))
    for item in kept:
        replies.put(sum_of(item))


def sum_of(item: Any) -> int:
    return int(item if isinstance(item, int) else item.sum())
