"""Let a real Prometheus scrape a run, and evaluate the queries of the Grafana dashboard and of the docs."""

from __future__ import annotations

import json
import math
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.parse import urlencode, urlsplit
from urllib.request import urlopen

import pytest
from support.waiting import wait_until

ROOT = Path(__file__).parents[2]
BOARD = json.loads((ROOT / "examples" / "grafana" / "flowchan.json").read_text())
TARGETS = [(panel["title"], target) for panel in BOARD["panels"] for target in panel["targets"]]
SHARES = ("Bottleneck", "Utilisation", "Channel fill")
CONFIG = """
global: {{scrape_interval: 200ms}}
scrape_configs:
  - job_name: flowchan
    static_configs: [{{targets: ["{target}"]}}]
"""

pytestmark = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="Prometheus is not installed: apt install prometheus"
)


@pytest.fixture(scope="module")
def watched_run() -> Iterator[str]:
    """Start the program ``watched_run.py``, and return the URL of its metrics."""
    program = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("watched_run.py"))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,  # the run logs every death
    )
    with program:
        assert program.stdout is not None
        yield program.stdout.readline().decode().strip()
        assert program.stdin is not None
        program.stdin.close()  # ends the run
    assert program.returncode == 0


class Prometheus:
    """A Prometheus server that scrapes one run."""

    def __init__(self, folder: Path, url: str) -> None:
        config = folder / "prometheus.yml"
        config.write_text(CONFIG.format(target=urlsplit(url).netloc))
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._address = f"127.0.0.1:{free.getsockname()[1]}"
        options = [f"--config.file={config}", f"--storage.tsdb.path={folder}/data", "--log.level=error"]
        self._process = subprocess.Popen(["prometheus", *options, f"--web.listen-address={self._address}"])

    def get(self, path: str, **parameters: str) -> Any:
        url = f"http://{self._address}/api/v1/{path}?{urlencode(parameters)}"
        try:
            with urlopen(url, timeout=60) as reply:
                return json.load(reply)["data"]
        except URLError:
            assert self._process.poll() is None, "Prometheus has exited"
            raise

    def query(self, query: str) -> list[tuple[dict[str, str], float]]:
        """Evaluate a query now, and return the labels and the value of each series."""
        query = query.replace("$graph", "watched").replace("$__rate_interval", "2s")
        return [(one["metric"], float(one["value"][1])) for one in self.get("query", query=query)["result"]]

    def scrapes(self) -> float:
        try:
            return sum(value for _, value in self.query("count_over_time(flowchan_run_elapsed_seconds[5m])"))
        except URLError:
            return 0  # it is starting

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()


@pytest.fixture(scope="module")
def prometheus(watched_run: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    server = Prometheus(tmp_path_factory.mktemp("prometheus"), watched_run)
    try:
        wait_until(lambda: server.scrapes() >= 5)
        yield server
    finally:
        server.close()


@pytest.mark.parametrize(("title", "target"), TARGETS, ids=[f"{t}: {x['legendFormat']}" for t, x in TARGETS])
def test_dashboard_query_returns_series_of_run(
    prometheus: Prometheus, title: str, target: dict[str, Any]
) -> None:
    found: list[tuple[dict[str, str], float]] = []

    def has_series() -> bool:
        found[:] = prometheus.query(target["expr"])
        # a stage whose workers have not started has no utilisation
        return bool(found) and not any(math.isnan(value) for _, value in found)

    wait_until(has_series, what=lambda: (target["expr"], found))
    for labels, value in found:
        assert value >= 0
        assert {*re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])} <= labels.keys()
        if title in SHARES:
            assert value <= 1


def test_dashboard_variable_lists_graphs(prometheus: Prometheus) -> None:
    (query,) = (one["query"]["query"] for one in BOARD["templating"]["list"] if one["type"] == "query")
    metric, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", query).groups()
    assert prometheus.get(f"label/{label}/values", **{"match[]": metric}) == ["watched"]


def test_utilisation_query_in_docs_returns_every_stage(prometheus: Prometheus) -> None:
    text = (ROOT / "docs" / "howto" / "metrics.md").read_text()
    (query,) = re.findall(r"```text\n(.*?)```", text, re.DOTALL)
    found: dict[str, float] = {}

    def has_every_stage() -> bool:
        found.update(
            {labels["stage"]: value for labels, value in prometheus.query(query.replace("1m", "2s"))}
        )
        return len(found) == 5 and not any(map(math.isnan, found.values()))

    wait_until(has_every_stage, what=lambda: found)
    assert found.keys() == {"numbers", "parse", "failed", "there", "end"}
    assert all(0 <= value <= 1 for value in found.values())


def test_promtool_accepts_the_metrics(watched_run: str) -> None:
    with urlopen(watched_run, timeout=60) as reply:
        found = subprocess.run(["promtool", "check", "metrics"], input=reply.read(), capture_output=True)
    assert (found.returncode, found.stderr.decode()) == (0, "")
