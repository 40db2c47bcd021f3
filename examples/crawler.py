"""Crawl a site and find broken links: ``python examples/crawler.py [PAGES]``.

The program serves the site itself: pydoc's pages about Python modules. It visits at most PAGES pages.
"""

from __future__ import annotations

import pydoc
import re
import sys
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.error import HTTPError
from urllib.request import urlopen

from flowchan import Graph, In, Out


class Documentation(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        module = sys.modules.get(self.path[1:].removesuffix(".html"))
        self.send_response(200 if module else 404)
        self.end_headers()
        if module:
            self.wfile.write(pydoc.html.docmodule(module).encode())

    def log_message(self, *_: object) -> None: ...


def fetch(url: str) -> tuple[str, list[str] | None]:  # returns None as the links if the page does not exist
    try:
        with urlopen(url, timeout=10) as answer:
            text = answer.read().decode()
    except HTTPError:
        return url, None
    return url, [f"{url.rpartition('/')[0]}/{name}" for name in re.findall(r'href="([\w.]+\.html)[#"]', text)]


def steer(fetched: In[tuple], wanted: Out[str], pages: Out[tuple], start: str, most: int) -> None:
    seen, todo, under_way = {start}, [start], 0
    while under_way or todo:
        while todo and under_way < 50:
            wanted.put(todo.pop())
            under_way += 1
        page = fetched.get()
        under_way -= 1
        pages.put(page)
        todo += [url for url in dict.fromkeys(page[1] or ()) if url not in seen][: most - len(seen)]
        seen.update(todo)


def report(pages: list[tuple[str, list[str] | None]]) -> None:
    found = dict(pages)
    links = Counter(link for page in found.values() for link in set(page or ()))
    print(f"{len(found):,} pages, {list(found.values()).count(None):,} links lead nowhere")
    print(*(f"{n:>6,} pages lead to {url.rpartition('/')[2]}" for url, n in links.most_common(5)), sep="\n")


def crawler(start: str = "http://127.0.0.1:8000/http.server.html", most: int = 60) -> Graph:
    graph = Graph("crawler")
    again = graph.feedback("fetched")
    wanted, pages = graph.stage(steer, again, start=start, most=most)
    again.feed(wanted.map(fetch, workers=8))
    pages.collect().sink(report)
    return graph


def main() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Documentation) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        start = f"http://127.0.0.1:{server.server_port}/http.server.html"
        crawler(start, *map(int, sys.argv[1:])).run(progress=True)
        server.shutdown()


if __name__ == "__main__":
    main()
