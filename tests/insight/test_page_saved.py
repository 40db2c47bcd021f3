"""Test the page saved as a single file: its contents, and what its content security policy allows."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from pathlib import Path
from typing import Any

from page_client import get
from support.worker_latch import Gate

from flowchan import Graph
from flowchan.viz.insight.saved_page import saved_page

MARKUP = "</script><script>alert(1)</script><!--"


def data_in(page: str) -> Any:
    (text,) = re.findall(r'<script type="application/json" id="saved">(.*?)</script>', page, re.DOTALL)
    return json.loads(text)


def named() -> Graph:
    graph = Graph("saved")
    graph.source([1, 2], name="numbers").map(abs, name=MARKUP).sink(abs, name="end")
    return graph


def test_saved_page_contains_graph_history_and_final_snapshot(tmp_path: Path) -> None:
    with named().start(page=True) as run:
        pass
    run.save_page(tmp_path / "report.html")
    data = data_in((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert data["snapshot"]["state"] == "done"
    assert data["snapshot"]["stages"][1]["items_in"] == 2
    assert data["graph"]["stages"][1]["name"] == MARKUP
    assert data["graph"]["svg"].startswith("<svg")
    assert data["history"]["elapsed"]


def test_saved_page_refers_to_no_other_file(tmp_path: Path) -> None:
    with named().start(page=True) as run:
        pass
    run.save_page(str(tmp_path / "report.html"))
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "static/" not in page
    assert not re.findall(r"<(?:script|link|img|iframe)[^>]+(?:src|href)=\"(?!data:)", page)


def test_policy_allows_exactly_the_inline_scripts_and_styles(tmp_path: Path) -> None:
    with named().start(page=True) as run:
        pass
    run.save_page(tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    (policy,) = re.findall(r'<meta http-equiv="Content-Security-Policy" content="([^"]*)">', page)
    allowed = dict(part.strip().split(" ", 1) for part in policy.split(";"))
    for tag in ("script", "style"):
        texts = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts]
        assert digests
        assert allowed[f"{tag}-src"] == " ".join(f"'sha256-{digest}'" for digest in digests)
    assert allowed["default-src"] == "'none'"


def test_end_tag_inside_script_does_not_close_the_script(tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text('<head>\n</head>\n<body>\n<script src="static/a.js"></script></body>')
    (tmp_path / "a.js").write_text('const end = "</script>";')
    page, _ = saved_page({"name": MARKUP}, tmp_path)
    assert page.count("</script>") == 2
    assert data_in(page) == {"name": MARKUP}


def test_page_can_be_saved_while_the_run_is_active() -> None:
    gate, graph = Gate(), Graph("saved")
    graph.source([1]).sink(gate.wait, name="end")
    with graph.start(page=True) as run:
        assert run.page is not None
        status, body = get(run.page, "report.html")
        gate.open()
    assert status == 200
    assert data_in(body.decode())["snapshot"]["state"] == "running"
