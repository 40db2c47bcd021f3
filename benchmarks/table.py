"""The stored figures as tables: all of them in ``benchmarks/README.md``, some rows in the project's README.
``make bench`` writes them; ``python -m benchmarks.table`` does it again from what is stored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
LATEST = HERE / "results" / "latest.json"
PAGE = HERE / "README.md"
FRONT = HERE.parent / "README.md"
BEGIN, END = "<!-- benchmarks: begin -->", "<!-- benchmarks: end -->"

FRONT_ROWS = (
    ("threads, int, 1→1", "queue.Queue(1024)"),
    ("processes, int, 1→1", "multiprocessing.Queue(1024)"),
    ("processes, array of 16 MB, 1→1", "multiprocessing.Queue(8)"),
    ("round trip between two processes", "multiprocessing.Queue"),
    ("map of the identity, 2 processes", "multiprocessing.Pool.imap"),
    ("stream of batches, 2 parts", "torch.distributed.pipelining"),
    ("epoch of decoded pictures, 2 processes", "DataLoader"),
    ("link, int, 1→1", "pyzmq"),
    ("beside Ray: calls, pipelined", "Ray"),
    ("allreduce, 1 MB, 2 ranks", "openmpi"),
    ("allreduce, 1 MB, 2 ranks over hosts", "gloo"),
    ("training step, 16 MB, 2 ranks", "gloo"),
)
"""The work and the peer of the rows that the project's README shows."""

INTRODUCTION = """# Benchmarks

Every figure is measured beside its peer in the same run; a row is the ratio of the medians, reached or not.
`make bench` measures all of it and writes this page.
One benchmark alone: `.venv/bin/python -m benchmarks --only maps`.
All samples and the CPU seconds per million items are in [results/latest.json](results/latest.json).
These are figures of small shared machines: compare ratios, and never two runs of different days.
"""


def write(latest: dict[str, Any]) -> None:
    """Writes both pages from the stored figures."""
    PAGE.write_text(page(latest))
    FRONT.write_text(front(latest, FRONT.read_text()))


def page(latest: dict[str, Any]) -> str:
    """The page of all benchmarks."""
    return "\n".join([INTRODUCTION, *(_section(name, benchmark) for name, benchmark in latest.items())])


def front(latest: dict[str, Any], text: str) -> str:
    """The project's README, which is ``text`` now, with its rows."""
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{FRONT.name} has no part between {BEGIN} and {END}")
    return f"{head}{BEGIN}\n{_front(latest)}\n{END}{tail}"


def _section(name: str, benchmark: dict[str, Any]) -> str:
    """One benchmark: what it isolates, its rows, and what it ran on."""
    keys = ("work", "target", "flowchan", "peer", "ratio")
    rows = [[row[key] for key in keys] + ["yes" if row["reached"] else "no"] for row in benchmark["rows"]]
    isolates = benchmark["isolates"]
    versions = ", ".join(f"{package} {version}" for package, version in benchmark["versions"].items())
    return "\n".join(
        [
            f"## {name.replace('_', ' ')}\n",
            f"{isolates[0].upper()}{isolates[1:]}\n",
            *_table(["work", "to reach", "flowchan", "peer", "ratio", "reached"], rows),
            f"\nMeasured {benchmark['when']} on {_machine(benchmark)}, with {versions}.\n",
        ]
    )


def _front(latest: dict[str, Any]) -> str:
    everything = [
        (row, benchmark)
        for work, peer in FRONT_ROWS
        for benchmark in latest.values()
        for row in benchmark["rows"]
        if row["work"] == work and row["target"].endswith(f" {peer}")
    ]
    rows = [
        [row["work"], row["flowchan"], f"{row['peer']} ({_peer(row['target'])})", row["ratio"]]
        for row, _ in everything
    ]
    machines = sorted({_machine(benchmark) for _, benchmark in everything})
    lines = _table(["work", "flowchan", "peer", "ratio"], rows)
    return "\n".join([*lines, "", f"Measured on {'; '.join(machines)}."])


def _peer(target: str) -> str:
    return target.rpartition(" ")[2]


def _machine(benchmark: dict[str, Any]) -> str:
    cores = f"{benchmark['cores']} cores of {benchmark['processor']}"
    return f"{cores}, {benchmark['system']}, {benchmark['python']}"


def _table(titles: list[str], rows: list[list[str]]) -> list[str]:
    lines = [titles, ["---"] * len(titles), *rows]
    return [f"| {' | '.join(cells)} |" for cells in lines]


if __name__ == "__main__":
    write(json.loads(LATEST.read_text()))
