"""Write the stored results as tables to ``benchmarks/README.md``, and some rows to the project's README.

``make bench`` calls this module; ``python -m benchmarks.table`` only writes both pages from the stored
results.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.harness import TIMES, in_words

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
"""Rows in the project's README: the label on the page, and the stored names of the workload and the peer."""
PEER_NAMES = {
    "multiprocessing.Queue(1024)": "multiprocessing.Queue",
    "multiprocessing.Queue(8)": "multiprocessing.Queue",
    "openmpi": "Open MPI",
}
SECONDS = {"s": 1.0, "ms": 1e-3, "µs": 1e-6, "ns": 1e-9}
TITLES = {
    "channels_threads": "Channels between threads",
    "channels_processes": "Channels between processes",
    "channels_fresh": "Channels between new processes",
    "arrays": "Arrays and tensors between processes",
    "links": "Links between hosts",
    "collectives": "Collective operations",
    "hosts": "Graphs on hosts",
    "round_trip": "Round trips",
    "maps": "Maps",
    "wordcount": "Word count",
    "wakeup": "Wake-ups",
    "imports": "Time to import",
    "dataset": "Data for a training loop",
    "sequential": "Sequential: inference",
    "training": "Sequential: training",
    "defaults": "Sequential: defaults",
    "schedules": "Sequential: schedules",
    "autoscale": "Automatic number of workers",
    "page": "The live page",
    "children": "Children",
    "parameter_server": "Parameter server",
    "remote_parameters": "Parameter server: clients on hosts",
    "weights": "Weights for inference workers",
    "remote_tensors": "Remote tensors",
}
"""Heading of each benchmark."""

INTRODUCTION = """# Benchmarks

Each row compares flowchan with a peer that was measured in the same run.
The ratio is the ratio of the medians, and higher is better: 2 means that flowchan is twice as fast.
The tables also contain the rows that miss their target.

- `make bench` measures everything and writes this page.
- `.venv/bin/python -m benchmarks --only maps` runs one benchmark.
- [results/latest.json](results/latest.json) contains all samples, and the CPU seconds per million items.

The machines are small and shared.
Compare ratios; do not compare absolute figures from different days.
"""


def write(latest: dict[str, Any]) -> None:
    """Write both pages, based on the stored results."""
    PAGE.write_text(page(latest))
    FRONT.write_text(front(latest, FRONT.read_text()))


def page(latest: dict[str, Any]) -> str:
    """Return the page with all benchmarks."""
    sections = [_section(name, benchmark) for name, benchmark in latest.items()]
    return "\n".join([INTRODUCTION, _overview(latest), *sections, _versions(latest)])


def front(latest: dict[str, Any], text: str) -> str:
    """Return ``text``, the project's README, with its rows replaced."""
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{FRONT.name} must contain the lines {BEGIN} and {END}")
    return f"{head}{BEGIN}\n{_front(latest)}\n{END}{tail}"


def _overview(latest: dict[str, Any]) -> str:
    """Return a table of the benchmarks, with the number of targets that each benchmark met."""
    rows = []
    for name, benchmark in latest.items():
        answers = [answer for answer in map(_reached, benchmark["rows"]) if answer]
        anchor = TITLES[name].lower().replace(":", "").replace(" ", "-")
        reached = f"{answers.count('yes')} of {len(answers)}" if answers else ""
        rows.append([f"[{TITLES[name]}](#{anchor})", f"`{name}`", reached])
    return "\n".join([*_table(["benchmark", "`--only`", "targets reached"], rows), ""])


def _section(name: str, benchmark: dict[str, Any]) -> str:
    """Return the section of one benchmark: the rows, how they were measured, and the machine."""
    keys = ("work", "target", "flowchan", "peer", "ratio")
    rows = [[row[key] for key in keys] + [_reached(row)] for row in benchmark["rows"]]
    rules = benchmark["isolates"].rstrip(".").split(". ")
    return "\n".join(
        [
            f"## {TITLES[name]}\n",
            *_table(["work", "target", "flowchan", "peer", "ratio", "reached"], rows),
            "\nMethod:\n",
            *(f"- {rule}." for rule in rules),
            f"\nMeasured {benchmark['when']} on {_machine(benchmark)}.\n",
        ]
    )


def _versions(latest: dict[str, Any]) -> str:
    """Return the section that lists the measured versions of all packages."""
    found: dict[str, list[str]] = {}
    for benchmark in latest.values():
        for package, version in benchmark["versions"].items():
            versions = found.setdefault(package, [])
            if version not in versions:
                versions.append(version)
    rows = [[package, ", ".join(versions)] for package, versions in found.items()]
    return "\n".join(["## Versions\n", *_table(["package", "version"], rows), ""])


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
        [
            label,
            _rate(row["flowchan"]),
            f"{PEER_NAMES.get(peer, peer)}: {_rate(row['peer'])}",
            f"**{row['ratio']} {TIMES}**",
        ]
        for label, peer, row, _ in everything
    ]
    machines = sorted({_short(benchmark) for *_, benchmark in everything})
    lines = _table(["work", "flowchan", "compared with", "times as fast"], rows)
    return "\n".join([*lines, "", f"Measured on {' and on '.join(machines)}."])


def _rate(figure: str) -> str:
    """Return a result for which higher is better: convert a time per call into calls per second."""
    number, _, unit = figure.partition(" ")
    return in_words(1 / (float(number) * SECONDS[unit]), "calls/s") if unit in SECONDS else figure


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
