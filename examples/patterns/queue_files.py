"""Find the imports in all Python files below a directory, with a work queue.

    python examples/patterns/queue_files.py [DIRECTORY] [--workers N] [--on thread|process]

Each worker takes a file from the queue when it has finished the previous one, so a worker with short files
processes more of them. The default directory is the standard library of the running Python.
"""

from __future__ import annotations

import argparse
import ast
import sysconfig
from collections import Counter
from pathlib import Path

from rich.console import Console
from rich.progress import track

from flowchan.pipelines import WorkQueue, map, workqueue  # noqa: A004


def imported(file: Path) -> set[str] | None:
    """Return the top-level packages that a file imports, or ``None`` if the file is not valid Python."""
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):
        return None
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module.partition(".")[0])
    return names


def work(queue: WorkQueue, worker: int) -> int:
    """Process files until the queue is closed, and return how many files this worker has processed."""
    done = 0
    for file in queue:
        queue.put(imported(file))
        done += 1
    return done


def main() -> None:
    parser = argparse.ArgumentParser(description="Count the imports in all Python files below a directory.")
    parser.add_argument("directory", nargs="?", type=Path, default=Path(sysconfig.get_path("stdlib")))
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--on", choices=["thread", "process"], default="process")
    args = parser.parse_args()

    queue = workqueue(across="processes" if args.on == "process" else "threads")
    workers = map(args.workers, work, queue, on=args.on)
    files = [file for file in args.directory.rglob("*.py") if "site-packages" not in file.parts]
    queue.put_many(files)
    queue.close()
    terminal = Console(stderr=True)
    answers = list(track(queue, "files", len(files), console=terminal, disable=not terminal.is_terminal))
    assert sum(workers.join()) == len(answers)

    found = [names for names in answers if names is not None]
    print(f"{len(answers):,} files, {len(answers) - len(found):,} of them not valid for this Python version")
    counts = Counter(name for names in found for name in names)
    for name, count in sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))[:5]:
        print(f"{count:>8,}  {name}")


if __name__ == "__main__":
    main()
