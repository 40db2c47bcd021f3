"""Runs over hosts that are harmed from within, once: by a worker that gets item ``AT`` or a later one."""

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
    """A function for a map that gives what it gets. The first worker that gets item ``AT`` or a later one
    where ``here`` is true does the deed; the others do not go on before that."""

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
    """Ends the connection that has brought the agent here."""
    server = next(process for process in psutil.Process().parents() if process.name() == "sshd")
    server.kill()


def cancel_step() -> None:
    step = f"{os.environ['SLURM_JOB_ID']}.{os.environ['SLURM_STEP_ID']}"
    subprocess.run(("scancel", step), check=True)
    signal.pause()


def raylet() -> psutil.Process:
    """The node of Ray that this worker is on."""
    return next(process for process in psutil.Process().parents() if process.name() == "raylet")


def not_on_the_head() -> bool:
    """The head has Ray's own server, and the driver."""
    return not any(process.name() == "gcs_server" for process in raylet().parent().children())


def kill_node() -> None:
    raylet().kill()
    signal.pause()  # what Ray has started there ends by itself, and the agent and this worker with it


def run_over(pool: Any, folder: Path, deed: Callable[[], None], here: Callable[[], bool] = anywhere) -> Run:
    """A run that has ended, and whose results were exact."""
    graph = Graph("harmed")
    result = graph.source(range(ITEMS)).map(once(folder, deed, here), on=pool, workers=4).collect()
    run = graph.start()
    assert run.wait()[result] == list(range(ITEMS)), run.report()
    return run


def deaths(run: Run) -> list[str]:
    """How agents have died, by host."""
    return [f"{host.name}: {death}" for host in run.stats().hosts for death in host.deaths]
