"""Run the replicas example as a user would.

The replicas train together in one graph, and the graph ends cleanly.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path

from support.preloaded_programs import Template

EXAMPLE = Path(__file__).parents[2] / "examples" / "replicas.py"
COMMAND = "from flowchan.cli.commands import main; main()"
BATCHES = 44  # per epoch


def test_replicas_train_together_until_the_data_ends(torch_programs: Template) -> None:
    """Each batch goes to one replica.

    Both replicas take part in each step until one of them has no more batches.
    """
    done = torch_programs.run(EXAMPLE, "--epochs", 6)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    steps = [
        re.fullmatch(r"step (\d+): loss (\d\.\d+), the mean of (\d) replicas", one) for one in lines[:-1]
    ]
    assert all(steps)
    numbers, losses, counts = zip(*(step.groups() for step in steps if step), strict=True)
    assert [int(number) for number in numbers[:5]] == [0, 20, 40, 60, 80]
    assert int(numbers[-1]) + 20 >= 6 * BATCHES / 2
    assert counts[:4] == ("2",) * 4
    assert float(losses[4]) < 1 < float(losses[0])
    found = re.fullmatch(r"(\d+\.\d)% of the digits that were held out", lines[-1])
    assert found
    assert float(found[1]) >= 80


def test_ctrl_c_lets_the_graph_finish_items_in_flight(torch_programs: Template) -> None:
    """After the last item, the example tests the network that it has trained so far."""
    command = ("-c", COMMAND, "run", EXAMPLE, "--", 2, 1000000)
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    with torch_programs.popen(
        *command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as run:
        assert run.stdout is not None
        assert run.stdout.readline().startswith("step 0: ")
        run.send_signal(signal.SIGINT)
        rest, errors = run.communicate(timeout=100)
    assert run.returncode == 130, errors
    assert "of the digits that were held out" in rest
    assert "Traceback" not in errors
