"""Test that a program that exits without ``close()`` reports all failures that it has not yet seen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.optional_packages import optional
from support.preloaded_programs import Template

optional("torch")

HERE = Path(__file__).parent
START = f"""
import atexit, os, sys, torch
sys.path[:0] = {[str(HERE), str(HERE.parent)]!r}
from pathlib import Path
import failing_operations
from flowchan import hosts
from flowchan.pipelines import RemoteError, RemoteNodes
from flowchan.pipelines.remote_tensors import failures_at_exit
failures_at_exit.EXIT_WAIT_S = failures_at_exit.LEAST_WAIT_S = 60  # for a machine with much other work
nodes = RemoteNodes(2, on=hosts.local(1) if sys.argv[1] == "hosts" else "process")
x, y = (torch.ones(3, device=node) for node in nodes)
"""
HEADING = "flowchan: the program ends without noticing that {} on its nodes; call nodes.sync() or"


def run(programs: Template, text: str, on: str = "process") -> Any:
    return programs.run("-c", START + text, on, start_new_session=True)


@pytest.mark.any_value
@pytest.mark.parametrize("on", ["process", "hosts"])
def test_program_that_ends_reports_an_unseen_failure_once(torch_programs: Template, on: str) -> None:
    found = run(torch_programs, "x.index_select(0, torch.tensor([7], device=nodes[0]))", on)
    assert found.returncode == 0
    assert found.stderr.startswith(HEADING.format("an operation has failed"))
    assert found.stderr.count("aten::index_select on node 0: IndexError: ") == 1
    assert "Traceback on the node:" in found.stderr


def test_program_that_raises_reports_failures_after_its_traceback(torch_programs: Template) -> None:
    text = "for one in (x, y):\n    torch.ops.failing.fail(one, 'value')\nraise KeyError('original')"
    found = run(torch_programs, text)
    assert found.returncode == 1
    before, heading, after = found.stderr.partition(HEADING.format("2 operations have failed"))
    assert "KeyError: 'original'" in before
    assert heading
    for number in (0, 1):
        assert after.count(f"failing::fail on node {number}: ValueError: a bad value") == 1


def test_program_that_ends_reports_an_unseen_death(torch_programs: Template) -> None:
    text = "torch.ops.failing.fail(x, 'kill')\nwhile nodes._clients[0].death is None:\n    os.sched_yield()"
    found = run(torch_programs, text)
    assert found.returncode == 0
    assert "node 0 (remote:0" in found.stderr
    assert "was killed by SIGKILL" in found.stderr


@pytest.mark.parametrize(
    "text",
    [
        "",
        "try:\n    torch.ops.failing.fail(x, 'value').cpu()\nexcept RemoteError:\n    pass",
        "torch.ops.failing.fail(x, 'value')\ntry:\n    nodes.close()\nexcept RemoteError:\n    pass",
        "torch.ops.failing.fail(x, 'value')\nif os.fork() == 0:\n"
        "    failures_at_exit._report()\n    os._exit(0)\nos.wait()\n"
        "try:\n    nodes.sync()\nexcept RemoteError:\n    pass",
    ],
    ids=["none", "fetched", "closed", "fork"],
)
def test_program_without_unseen_failure_reports_nothing(torch_programs: Template, text: str) -> None:
    found = run(torch_programs, text)
    assert (found.stderr, found.returncode) == ("", 0)


def test_busy_node_does_not_stop_the_report_of_another(torch_programs: Template, tmp_path: Path) -> None:
    """The latch is released only after the report, so a wait without a limit would never end."""
    text = f"""
failures_at_exit.EXIT_WAIT_S = failures_at_exit.LEAST_WAIT_S = 5
latch = failing_operations.Latch(Path({str(tmp_path / "latch")!r}))
atexit.register(latch.release)
failures_at_exit.report_at_exit()  # before the release
torch.ops.failing.fail(latch.occupy(x), "value")
torch.ops.failing.fail(y, "value")
"""
    found = run(torch_programs, text)
    assert found.stderr.count("failing::fail on node 1: ValueError: a bad value") == 1
    assert "on node 0" not in found.stderr


OCCUPIED = """
from flowchan.pipelines.remote_tensors import remote_nodes
from flowchan.run.policy.actions import Terminate
failures_at_exit.EXIT_WAIT_S = failures_at_exit.LEAST_WAIT_S = remote_nodes.GRACE_S = 0.1
def show(told):
    print(*(one.force for one in getattr(told, "actions", ()) if isinstance(one, Terminate)))
nodes._kids._started._run._supervisor.feed.listen(show)
square = torch.ones(1000, 1000, device=nodes[0])
for _ in range(1000):
    square = square @ square
"""


@pytest.mark.parametrize("on", ["process", "hosts"])
@pytest.mark.parametrize("end", ["", "with nodes:\n    raise KeyError"], ids=["exit", "raise"])
def test_busy_node_is_killed_without_a_request_to_end(torch_programs: Template, on: str, end: str) -> None:
    """The program cannot use the results of such commands any more, so it does not wait for them."""
    found = run(torch_programs, OCCUPIED + end, on)
    assert set(found.stdout.split()) == {"True"}
    assert found.stderr.rpartition("\n")[0].endswith("KeyError" if end else "")
    assert found.returncode == bool(end)


def test_exiting_multiprocessing_child_kills_its_busy_node(torch_programs: Template) -> None:
    text = "import multiprocessing\ndef child():\n    global nodes, x\n    nodes = RemoteNodes(1)\n"
    text += "".join(f"    {line}\n" for line in OCCUPIED.splitlines())
    text += "child_process = multiprocessing.get_context('fork').Process(target=child)\n"
    text += "child_process.start()\nchild_process.join()\nnodes.close()\nprint(child_process.exitcode)"
    found = run(torch_programs, text)
    assert (set(found.stdout.split()), found.stderr) == ({"True", "0"}, "")


def test_exiting_program_can_use_its_nodes_in_its_exit_functions(torch_programs: Template) -> None:
    text = "atexit.register(lambda: print((x + 1).tolist()))\nRemoteNodes(1)"
    found = run(torch_programs, text)
    assert (found.stdout, found.stderr) == ("[2.0, 2.0, 2.0]\n", "")


def test_program_without_stderr_reports_nothing(torch_programs: Template) -> None:
    found = run(torch_programs, "torch.ops.failing.fail(x, 'value')\nsys.stderr = None")
    assert (found.stderr, found.returncode) == ("", 0)
