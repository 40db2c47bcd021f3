"""Serve a model over HTTP: requests arrive one at a time and pass through the model in batches.

    python examples/web_service.py [REQUESTS]
    flowchan viz examples/web_service.py -o service.svg

The model classifies scikit-learn's digits. The program is also the client. The example needs scikit-learn.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from asyncio import StreamReader, StreamWriter
from concurrent.futures import ThreadPoolExecutor
from urllib.request import urlopen

from rich.progress import track
from sklearn.datasets import load_digits
from sklearn.svm import SVC

from flowchan import Graph, Stream

DIGITS = load_digits()
SEEN = 1000  # number of digits used for training


class Model:
    def __init__(self) -> None:
        self.model = SVC().fit(DIGITS.data[:SEEN], DIGITS.target[:SEEN])

    def __call__(self, batch: list[list[float]]) -> list[tuple[int, int]]:
        return [(int(digit), len(batch)) for digit in self.model.predict(batch)]


def asked(graph: Graph) -> Stream[list[float]]:
    """Declare the input for requests and the stages that answer them."""
    questions = graph.input("questions")
    questions.batch(64, timeout=0.002).map(Model, on="process").unbatch().collect()
    return questions


def service() -> Graph:
    return asked(Graph("service")).graph


async def main(count: int = 2000) -> None:
    graph = Graph("service")
    questions = asked(graph)

    async def handle(reader: StreamReader, writer: StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(re.search(rb"content-length: *(\d+)", head, re.IGNORECASE)[1])
        answer = await run.ask(questions, json.loads(await reader.readexactly(length)), timeout=30)
        writer.write(b"HTTP/1.0 200 OK\r\n\r\n" + json.dumps(answer).encode())
        writer.close()
        await writer.wait_closed()

    def request(number: int) -> tuple[bool, int]:
        place = SEEN + number % (len(DIGITS.data) - SEEN)
        with urlopen(address, json.dumps(DIGITS.data[place].tolist()).encode(), timeout=30) as answer:
            digit, together = json.load(answer)
        return digit == DIGITS.target[place], together

    def all_requests() -> list[tuple[bool, int]]:
        with ThreadPoolExecutor(16) as clients:
            return list(track(clients.map(request, range(count)), "requests", count, transient=True))

    with graph.start() as run:
        async with await asyncio.start_server(handle, "127.0.0.1", 0) as server:
            address = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            told = await asyncio.to_thread(all_requests)
    right, batches = sum(right for right, _ in told), sum(1 / together for _, together in told)
    print(f"{count:,} requests, {100 * right / count:.1f} % right, {count / batches:.1f} together on average")


if __name__ == "__main__":
    asyncio.run(main(*map(int, sys.argv[1:])))
