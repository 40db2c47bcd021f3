"""Measure how long ``import flowchan`` takes in a fresh interpreter, and which modules it loads."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

from benchmarks.harness import Case, Effort, Report, Row, in_words

ISOLATES = (
    "The clock covers only the import statement, in a new interpreter. The peer is `import "
    "multiprocessing.pool, asyncio`."
)

HEAVY = ("torch", "numpy", "networkx", "graphviz", "rich")
SCRIPT = """
import sys, time
began = time.perf_counter()
import {modules}
print(time.perf_counter() - began, *[name for name in {heavy} if name in sys.modules])
"""


def measure(effort: Effort) -> Report:
    report = Report()
    cases = [
        _fresh("flowchan", "flowchan"),
        _fresh("the standard library's", "multiprocessing.pool, asyncio"),
    ]
    mine, _ = report.interleave("import flowchan", cases, effort.rounds)
    loaded = _import("flowchan")[1:]
    report.rows.append(
        Row(
            "import flowchan",
            f"loads none of {', '.join(HEAVY)}",
            f"loads {', '.join(loaded) or 'none'}; {in_words(mine.figure(), 's')}",
            "",
            "",
            not loaded,
        )
    )
    return report


def _fresh(name: str, modules: str) -> Case:
    def work() -> tuple[Sequence[float], int]:
        return [float(_import(modules)[0])], 1

    return Case(name, "s", work)


def _import(modules: str) -> list[str]:
    script = SCRIPT.format(modules=modules, heavy=HEAVY)
    return subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True
    ).stdout.split()
