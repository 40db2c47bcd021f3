"""Run the benchmarks, print their tables and store the results.

The results are stored in ``benchmarks/results/latest.json``, and the pages that show them are regenerated.
"""

from __future__ import annotations

import argparse
import importlib
import json
from dataclasses import asdict
from typing import Any

from benchmarks import harness, table
from benchmarks.table import LATEST

NAMES = (
    "channels_threads",
    "channels_processes",
    "channels_fresh",
    "arrays",
    "cuda",
    "links",
    "collectives",
    "hosts",
    "scale",
    "round_trip",
    "maps",
    "wordcount",
    "wakeup",
    "imports",
    "dataset",
    "sequential",
    "training",
    "defaults",
    "schedules",
    "autoscale",
    "page",
    "children",
    "parameter_server",
    "remote_parameters",
    "weights",
    "remote_tensors",
)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "--only", choices=NAMES, help="run only this benchmark; keep the stored results of the others"
    )
    parser.add_argument("--quick", action="store_true", help="make a short trial run, and store nothing")
    args = parser.parse_args()
    effort = harness.QUICK if args.quick else harness.FULL
    for name in [args.only] if args.only else NAMES:
        module = importlib.import_module(f"benchmarks.{name}")
        report = module.measure(effort)
        harness.show(name, module.ISOLATES, report)
        # Keep the stored results of a benchmark that can't run on this machine.
        if effort.full and report.results:
            store(name, module.ISOLATES, report)


def store(name: str, isolates: str, report: harness.Report) -> None:
    """Replace the stored results of one benchmark, together with its machine and versions."""
    latest: dict[str, Any] = json.loads(LATEST.read_text()) if LATEST.exists() else {}
    latest[name] = {
        "isolates": isolates,
        **harness.machine(),
        "rows": [asdict(row) for row in report.rows],
        "results": [result.record() for result in report.results],
    }
    ordered = {known: latest[known] for known in NAMES if known in latest}
    LATEST.parent.mkdir(exist_ok=True)
    LATEST.write_text(json.dumps(ordered, indent=1, ensure_ascii=False) + "\n")
    table.write(ordered)


if __name__ == "__main__":
    main()
