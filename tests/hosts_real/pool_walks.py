"""Run graphs over hosts. One worker does damage once, at item ``AT`` or a later item."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from flowchan import Graph, Run

ITEMS, AT = 400, 50


def once(folder: Path, deed: Callable[[], None], here: Callable[[], bool]) -> Callable[[int], int]:
    """Return a function for ``map`` that returns its item.

    The first worker that gets item ``AT`` or a later item, and for which ``here()`` is true, calls ``deed``.
    The others wait until then.
    """

    def work(item: int) -> int:
        mark = folder / "done"
        while item >= AT and not mark.exists():
            if here():
                try:
                    mark.touch(exist_ok=False)
                except FileExistsError:
                    break
                deed()
            threading.Event().wait(0.001)
        return item

    return work


def anywhere() -> bool:
    return True


def nothing() -> None:
    pass


def kill_agent() -> None:
    os.kill(os.getppid(), signal.SIGKILL)
    signal.pause()


def cut_ssh() -> None:
    """Kill the sshd process whose connection started this agent."""
    server = next(process for process in psutil.Process().parents() if process.name() == "sshd")
    server.kill()


def cancel_step() -> None:
    step = f"{os.environ['SLURM_JOB_ID']}.{os.environ['SLURM_STEP_ID']}"
    subprocess.run(("scancel", step), check=True)
    signal.pause()


def raylet() -> psutil.Process:
    """Return the raylet process on this worker's node."""
    return next(process for process in psutil.Process().parents() if process.name() == "raylet")


def not_on_the_head() -> bool:
    """Return whether this worker is not on the head, where Ray's own server and the driver run."""
    return not any(process.name() == "gcs_server" for process in raylet().parent().children())


def kill_node() -> None:
    raylet().kill()
    signal.pause()  # the processes that Ray started on this node end, including the agent and this worker


def run_over(pool: Any, folder: Path, deed: Callable[[], None], here: Callable[[], bool] = anywhere) -> Run:
    """Run a graph to completion, check its results, and return the run."""
    graph = Graph("harmed")
    result = graph.source(range(ITEMS)).map(once(folder, deed, here), on=pool, workers=4).collect()
    run = graph.start()
    assert run.wait()[result] == list(range(ITEMS)), run.report()
    return run


def deaths(run: Run) -> list[str]:
    """Return the deaths of agents, with their hosts."""
    return [f"{host.name}: {death}" for host in run.stats().hosts for death in host.deaths]
