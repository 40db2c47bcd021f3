"""Test that commands and pictures show the hosts of stages."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from flowchan import Graph
from flowchan.cli.commands import main
from flowchan.hosts import local
from flowchan.viz import to_dot, to_mermaid

FILE = """
from flowchan import Graph, worker

def where(item):
    return worker().host[:-1]

graph = Graph("numbers")
graph.source(range(100)).map(where, on="hosts", workers=2, name="far").collect().sink(
    lambda hosts: print(sorted(set(hosts)))
)
"""


def command(folder: Path, word: str, *options: str) -> Result:
    (folder / "case.py").write_text(FILE)
    return CliRunner().invoke(main, [word, str(folder / "case.py"), *options])


def drawn(pool: object) -> Graph:
    graph = Graph("drawn")
    graph.source(range(3)).map(abs, on=pool, workers=4).sink(abs)  # type: ignore[arg-type]
    return graph


@pytest.mark.parametrize("draw", [to_dot, to_mermaid])
def test_picture_names_the_hosts_of_a_stage(draw: object) -> None:
    assert "2 hosts: local-1, local-2" in draw(drawn(local(2)))  # type: ignore[operator]
    assert "host local-1" in draw(drawn(local(2)["local-1"]))  # type: ignore[operator]
    assert "hosts not given yet" in draw(drawn("hosts"))  # type: ignore[operator]


@pytest.mark.parametrize("draw", [to_dot, to_mermaid])
def test_many_hosts_are_drawn_as_one_box_with_a_count(draw: object) -> None:
    assert "64 hosts: local-1 … local-64" in draw(drawn(local(64)))  # type: ignore[operator]


def test_command_line_hosts_are_used_for_stages(tmp_path: Path) -> None:
    result = command(tmp_path, "run", "--hosts", "local:2")
    assert result.exit_code == 0, result.output
    assert "['local-']" in result.output
    assert "local(2)" in result.output


def test_command_without_hosts_option_explains_the_option(tmp_path: Path) -> None:
    for word in ("run", "check"):
        result = command(tmp_path, word)
        assert result.exit_code == 2
        assert "flowchan run FILE --hosts local:2" in result.output


def test_unknown_hosts_are_refused_with_the_allowed_forms(tmp_path: Path) -> None:
    result = command(tmp_path, "run", "--hosts", "mars:2")
    assert result.exit_code == 2
    assert "local:2, ssh:gpu1,user@gpu2, slurm or ray:4" in result.output


def test_command_reports_an_unusable_host_on_one_line(tmp_path: Path) -> None:
    result = command(tmp_path, "run", "--hosts", "ssh:no-such-host.invalid")
    assert result.exit_code == 2
    (line,) = result.output.splitlines()
    assert "no-such-host.invalid" in line


def test_explain_names_the_hosts_of_a_stage() -> None:
    from support.worker_latch import Gate

    gate = Gate()
    graph = Graph("explained")
    graph.source(range(3)).map(gate.wait, on=local(2), workers=2, name="far").sink(abs)
    run = graph.start()
    gate.wait_held(2)
    assert "'far' ×2 on local-1, local-2 works on" in run.explain()
    gate.open()
    run.wait()
