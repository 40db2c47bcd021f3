"""A crawler: follows the links of a site from one page on, and finds those that lead nowhere.

    python examples/crawler.py [PAGES]

The site is the documentation that Python's own pydoc writes of imported modules; this program serves
it. The graph leads back: links become pages to fetch, until nothing is under way.
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
    """The page of each module that this program has imported."""

    def do_GET(self) -> None:
        module = sys.modules.get(self.path[1:].removesuffix(".html"))
        self.send_response(200 if module else 404)
        self.end_headers()
        if module:
            self.wfile.write(pydoc.html.docmodule(module).encode())

    def log_message(self, *_: object) -> None: ...


def fetch(url: str) -> tuple[str, list[str] | None]:
    """The links of a page; None if there is no such page."""
    try:
        with urlopen(url, timeout=10) as answer:
            text = answer.read().decode()
    except HTTPError:
        return url, None
    return url, [f"{url.rpartition('/')[0]}/{name}" for name in re.findall(r'href="([\w.]+\.html)[#"]', text)]


def steer(fetched: In[tuple], wanted: Out[str], pages: Out[tuple], start: str, most: int) -> None:
    """Asks for each page once, and returns when nothing is under way."""
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


def main() -> None:
    most = int(sys.argv[1]) if len(sys.argv) > 1 else 60
    with ThreadingHTTPServer(("127.0.0.1", 0), Documentation) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        graph, site = Graph("crawler"), f"http://127.0.0.1:{server.server_port}"
        again = graph.feedback("fetched")
        wanted, pages = graph.stage(steer, again, start=f"{site}/http.server.html", most=most)
        again.feed(wanted.map(fetch, workers=8))
        pages = pages.collect()
        found = dict(graph.run(progress=True)[pages])
        server.shutdown()

    links = Counter(link for page in found.values() for link in set(page or ()))
    print(f"{len(found):,} pages, {list(found.values()).count(None):,} links lead nowhere")
    for url, number in links.most_common(5):
        print(f"{number:>6,} pages lead to {url.rpartition('/')[2]}")


if __name__ == "__main__":
    main()
