"""Convert logs of Python's import times to a Parquet file.

    python examples/logs_to_parquet.py [MODULE …] [-o IMPORTS.parquet] [--workers N]
    flowchan viz examples/logs_to_parquet.py -o imports.svg

For each module, a new `python -X importtime` process writes a log. The example needs pyarrow.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from flowchan import Graph

MODULES = "argparse asyncio calendar csv dataclasses decimal email.message http.server json logging tomllib"
SCHEMA = pa.schema([("program", pa.string()), ("module", pa.string()), ("self_us", pa.int64())])


def log(module: str) -> tuple[str, str]:
    command = [sys.executable, "-X", "importtime", "-c", f"import {module}"]
    return module, subprocess.run(command, capture_output=True, text=True, check=True).stderr


def rows(program_and_log: tuple[str, str]) -> Iterator[dict[str, str | int]]:
    """Yield the rows of a log whose lines look like `import time: 153 | 153 | json.scanner`."""
    program, text = program_and_log
    for line in text.splitlines()[1:]:
        own, _, module = line.removeprefix("import time:").split("|")
        yield {"program": program, "module": module.strip(), "self_us": int(own)}


class Save:
    def __init__(self, path: Path) -> None:
        self.writer = pq.ParquetWriter(path, SCHEMA)

    def __call__(self, table: pa.Table) -> None:
        self.writer.write_table(table)

    def close(self) -> None:
        self.writer.close()


def table(batch: list[dict[str, str | int]]) -> pa.Table:
    return pa.Table.from_pylist(batch, SCHEMA)


def imports(modules: str = MODULES, output: Path = Path("imports.parquet"), workers: int = 2) -> Graph:
    graph = Graph("imports")
    logs = graph.source(modules.split()).map(log, workers=workers)
    logs.flat_map(rows).batch(500).map(table, on="process").sink(partial(Save, output))
    return graph


def main() -> None:
    parser = argparse.ArgumentParser(description="Convert Python's import-time logs to a Parquet file.")
    parser.add_argument("modules", nargs="*", default=MODULES.split())
    parser.add_argument("-o", "--output", type=Path, default=Path("imports.parquet"))
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()

    imports(" ".join(args.modules), args.output, args.workers).run(progress=True)

    found = pq.read_table(args.output)
    print(f"{found.num_rows:,} imports by {len(args.modules)} programs in {args.output}; the slowest, in µs:")
    slowest = found.group_by("module").aggregate([("self_us", "max")]).to_pylist()
    for row in sorted(slowest, key=lambda row: -row["self_us_max"])[:5]:
        print(f"{row['self_us_max']:>10,}  {row['module']}")


if __name__ == "__main__":
    main()
