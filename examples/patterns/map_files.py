"""Count the lines in all Python files below a directory, with several workers.

    python examples/patterns/map_files.py [DIRECTORY] [--workers N] [--on thread|process]

The program divides the files equally among the workers in advance. The default directory is the standard
library of the running Python.
"""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path

from flowchan.pipelines import map  # noqa: A004


def count_lines(files: list[Path], workers: int, worker: int) -> tuple[int, int]:
    """Count the lines in every ``workers``-th file, starting with the file at the worker's own number.

    Return the number of files and the number of lines in them.
    """
    mine = files[worker - 1 :: workers]
    return len(mine), sum(file.read_bytes().count(b"\n") for file in mine)


def main() -> None:
    parser = argparse.ArgumentParser(description="Count the lines in all Python files below a directory.")
    parser.add_argument("directory", nargs="?", type=Path, default=Path(sysconfig.get_path("stdlib")))
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--on", choices=["thread", "process"], default="thread")
    args = parser.parse_args()

    files = sorted(args.directory.rglob("*.py"))
    counts = map(args.workers, count_lines, files, args.workers, on=args.on).join()
    for worker, (number, lines) in enumerate(counts, 1):
        print(f"worker {worker}: {lines:,} lines in {number:,} files")
    print(f"total: {sum(lines for _, lines in counts):,} lines in {len(files):,} files")


if __name__ == "__main__":
    main()
