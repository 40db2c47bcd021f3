"""Run three producers and one consumer on one channel, and account for every item.

    python examples/producer_consumer.py [--across threads|processes] [--seconds S]
    flowchan run examples/producer_consumer.py
    flowchan viz examples/producer_consumer.py -o producer_consumer.svg

The script uses a channel without a graph: it starts threads or processes, and closes the channel to stop
them. The graph at the end of the file does the same with producers that stop after 10,000 items.
"""

from __future__ import annotations

import argparse
import multiprocessing
import threading
import time
from collections import Counter
from collections.abc import Iterator
from itertools import count

from flowchan import Channel, Closed, Graph

PRODUCERS = 3


def produce(producer: int, channel: Channel, accounts: Channel) -> None:
    """Put (producer, serial number) until the channel is closed, then report how many items were put."""
    for serial in count():
        try:
            channel.put((producer, serial))
        except Closed:
            accounts.put(("put", producer, serial))
            return


def consume(channel: Channel, accounts: Channel) -> None:
    """Get items until the channel is drained, check their order, and report how many arrived."""
    got: Counter[int] = Counter()
    for producer, serial in channel:
        if serial != got[producer]:
            raise AssertionError(
                f"producer {producer}: item {serial} arrived, but {got[producer]} was expected"
            )
        got[producer] += 1
    for producer in range(PRODUCERS):
        accounts.put(("got", producer, got[producer]))


def run(across: str, seconds: float) -> dict[tuple[str, int], int]:
    """Return how many items each producer put, and how many of them the consumer got."""
    channel = Channel(64, across=across)
    accounts = Channel(2 * PRODUCERS, across=across)
    start = threading.Thread if across == "threads" else multiprocessing.Process
    parties = [start(target=produce, args=(producer, channel, accounts)) for producer in range(PRODUCERS)]
    parties.append(start(target=consume, args=(channel, accounts)))
    for party in parties:
        party.start()
    try:
        time.sleep(seconds)
    finally:  # also after Ctrl-C: closing the channel ends the producers and the consumer
        channel.close()
    for party in parties:
        party.join()
    accounts.close()
    return {(what, producer): number for what, producer, number in accounts}


def numbered(producer: int) -> Iterator[tuple[int, int]]:
    for serial in range(10_000):
        yield producer, serial


def account(counts: Counter[int], item: tuple[int, int]) -> Counter[int]:
    return counts + Counter([item[0]])


def show(counts: Counter[int]) -> None:
    for producer, number in sorted(counts.items()):
        print(f"producer {producer}: {number:,} items got")


graph = Graph("producer_consumer")
producers = [graph.source(numbered, producer, name=f"producer {producer}") for producer in range(PRODUCERS)]
graph.merge(*producers, name="channel").reduce(account, Counter(), name="consumer").sink(show)


def main() -> None:
    parser = argparse.ArgumentParser(description="Run three producers and one consumer on one channel.")
    parser.add_argument("--across", choices=["threads", "processes"], default="threads")
    parser.add_argument(
        "--seconds", type=float, default=1.0, help="seconds until the channel is closed (default: 1)"
    )
    args = parser.parse_args()

    accounts = run(args.across, args.seconds)
    for producer in range(PRODUCERS):
        put, got = accounts["put", producer], accounts["got", producer]
        print(f"producer {producer}: {put:,} items put, {got:,} got")
        if put != got:
            raise SystemExit(f"{put - got:,} items of producer {producer} are missing")
    print("every item is accounted for")


if __name__ == "__main__":
    main()
