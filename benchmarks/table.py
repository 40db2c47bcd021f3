"""Write the stored figures as tables: all into ``benchmarks/README.md``, and six into the project's README.

``make bench`` calls this module. ``python -m benchmarks.table`` writes both pages from the stored figures.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.harness import TIMES

HERE = Path(__file__).parent
LATEST = HERE / "results" / "latest.json"
PAGE = HERE / "README.md"
FRONT = HERE.parent / "README.md"
BEGIN, END = "<!-- benchmarks: begin -->", "<!-- benchmarks: end -->"

FRONT_ROWS = (
    ("items between two processes", "processes, int, 1→1", "multiprocessing.Queue(1024)"),
    ("arrays of 16 MB between two processes", "processes, array of 16 MB, 1→1", "multiprocessing.Queue(8)"),
    ("ordered map on two processes", "map of the identity, 2 processes", "multiprocessing.Pool.imap"),
    ("calls to a worker, pipelined", "compared with Ray: calls, pipelined", "Ray"),
    ("inference, model in two parts", "stream of batches, 2 parts", "torch.distributed.pipelining"),
    ("allreduce of 1 MB, two processes", "allreduce, 1 MB, 2 ranks", "openmpi"),
)
"""The rows of the project's README: the label in the page, and the stored names of the work and of the
peer."""
PEER_NAMES = {"openmpi": "Open MPI"}

INTRODUCTION = """# Benchmarks

Each row compares flowchan with a peer that was measured in the same run.
The ratio is the ratio of the medians, and higher is better: 2 means that flowchan is twice as fast.
The table also has the rows that miss their target.

- `make bench` measures everything and writes this page.
- `.venv/bin/python -m benchmarks --only maps` runs one benchmark.
- [results/latest.json](results/latest.json) has all samples, and the CPU seconds per million items.

The machines are small and shared.
Compare ratios, and do not compare figures from different days.
"""


def write(latest: dict[str, Any]) -> None:
    """Write both pages from the stored figures."""
    PAGE.write_text(page(latest))
    FRONT.write_text(front(latest, FRONT.read_text()))


def page(latest: dict[str, Any]) -> str:
    """Return the page of all benchmarks."""
    return "\n".join([INTRODUCTION, *(_section(name, benchmark) for name, benchmark in latest.items())])


def front(latest: dict[str, Any], text: str) -> str:
    """Return ``text``, the project's README, with the rows replaced."""
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{FRONT.name} has no part between {BEGIN} and {END}")
    return f"{head}{BEGIN}\n{_front(latest)}\n{END}{tail}"


def _section(name: str, benchmark: dict[str, Any]) -> str:
    """Return the section of one benchmark: what the clock includes, the rows, and the machine."""
    keys = ("work", "target", "flowchan", "peer", "ratio")
    rows = [[row[key] for key in keys] + [_reached(row)] for row in benchmark["rows"]]
    versions = ", ".join(f"{package} {version}" for package, version in benchmark["versions"].items())
    return "\n".join(
        [
            f"## {name.replace('_', ' ')}\n",
            f"{benchmark['isolates']}\n",
            *_table(["work", "target", "flowchan", "peer", "ratio", "reached"], rows),
            f"\nMeasured {benchmark['when']} on {_machine(benchmark)}.\nVersions: {versions}.\n",
        ]
    )


def _reached(row: dict[str, Any]) -> str:
    if row["target"].startswith("none"):
        return ""
    return "yes" if row["reached"] else "no"


def _front(latest: dict[str, Any]) -> str:
    everything = [
        (label, peer, row, benchmark)
        for label, work, peer in FRONT_ROWS
        for benchmark in latest.values()
        for row in benchmark["rows"]
        if row["work"] == work and row["target"].endswith(f" {peer}")
    ]
    rows = [
        [label, row["flowchan"], f"{row['peer']} ({PEER_NAMES.get(peer, peer)})", f"{row['ratio']} {TIMES}"]
        for label, peer, row, _ in everything
    ]
    machines = sorted({_short(benchmark) for *_, benchmark in everything})
    lines = _table(["work", "flowchan", "baseline", "times as fast"], rows)
    return "\n".join([*lines, "", f"Measured on {' and on '.join(machines)}."])


def _short(benchmark: dict[str, Any]) -> str:
    return f"{benchmark['cores']} cores of {benchmark['processor'].removesuffix(' Processor')}"


def _machine(benchmark: dict[str, Any]) -> str:
    cores = f"{benchmark['cores']} cores of {benchmark['processor']}"
    return f"{cores}, {benchmark['system']}, {benchmark['python']}"


def _table(titles: list[str], rows: list[list[str]]) -> list[str]:
    lines = [titles, ["---"] * len(titles), *rows]
    return [f"| {' | '.join(cells)} |" for cells in lines]


if __name__ == "__main__":
    write(json.loads(LATEST.read_text()))
