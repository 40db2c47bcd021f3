"""A model behind a web service: requests come one by one, and go through the model in batches.

    python examples/web_service.py [REQUESTS]

The model tells which of scikit-learn's handwritten digits a request shows. The program asks its own
service, with some clients at a time, and says how it went.
"""

from __future__ import annotations

import itertools
import json
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.request import urlopen

from rich.progress import track
from sklearn.datasets import load_digits
from sklearn.svm import SVC

from flowchan import Graph

DIGITS = load_digits()
SEEN = 1000  # the model learns so many of them
CLIENTS = 16


class Server(ThreadingHTTPServer):
    request_queue_size = CLIENTS  # they come all at once


class Model:
    """Is made once, in the process of its worker."""

    def __init__(self) -> None:
        self.model = SVC().fit(DIGITS.data[:SEEN], DIGITS.target[:SEEN])

    def __call__(self, batch: list[tuple[int, list[float]]]) -> list[tuple[int, int, int]]:
        digits = self.model.predict([pixels for _, pixels in batch])
        return [(number, int(digits[place]), len(batch)) for place, (number, _) in enumerate(batch)]


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 2000
    graph, numbers, waiting = Graph("service"), itertools.count(), dict[int, Future]()
    questions = graph.input("questions")
    answers = questions.batch(64, timeout=0.002).map(Model, on="process").unbatch()
    answers.sink(lambda answer: waiting.pop(answer[0]).set_result(answer[1:]), name="answers")

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            pixels = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            number, answer = next(numbers), Future()
            waiting[number] = answer
            run[questions].put((number, pixels))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(answer.result()).encode())

        def log_message(self, *_: object) -> None: ...

    def request(place: int) -> tuple[bool, int]:
        place = SEEN + place % (len(DIGITS.data) - SEEN)
        with urlopen(address, json.dumps(DIGITS.data[place].tolist()).encode(), timeout=30) as answer:
            digit, together = json.load(answer)
        return digit == DIGITS.target[place], together

    with graph.start() as run, Server(("127.0.0.1", 0), Handler) as server:
        address = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with ThreadPoolExecutor(CLIENTS) as clients:
            told = list(track(clients.map(request, range(count)), "requests", count, transient=True))
        server.shutdown()
    right, batches = sum(right for right, _ in told), sum(1 / together for _, together in told)
    print(f"{count:,} requests, {100 * right / count:.1f} % right, {count / batches:.1f} together on average")


if __name__ == "__main__":
    main()
