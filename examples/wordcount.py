"""Count the words in all Python files below a directory, in two processes.

    python examples/wordcount.py [DIRECTORY]
    flowchan run examples/wordcount.py [-- DIRECTORY]
    flowchan viz examples/wordcount.py -o wordcount.svg

The default directory is the standard library of the running Python.
"""

from __future__ import annotations

import argparse
import os
import re
import sysconfig
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from flowchan import Graph

STANDARD_LIBRARY = Path(sysconfig.get_path("stdlib"))


def python_files(directory: Path) -> Iterator[Path]:
    """Yield the Python files below ``directory``, except installed packages."""
    for folder, folders, files in os.walk(directory):
        folders[:] = [name for name in folders if name not in ("site-packages", "__pycache__")]
        yield from (Path(folder, name) for name in files if name.endswith(".py"))


def words(file: Path) -> list[str]:
    """Return the words in a file, ignoring bytes that are not UTF-8.

    Some files in the standard library contain such bytes on purpose.
    """
    return re.findall(r"\w+", file.read_text(encoding="utf-8", errors="replace").lower())


def count_words(files: list[Path]) -> Counter[str]:
    """Count the words in a batch of files, so that only one Counter per batch is sent to the main process."""
    counts: Counter[str] = Counter()
    for file in files:
        counts.update(words(file))
    return counts


def add(total: Counter[str], counts: Counter[str]) -> Counter[str]:
    """Add the counts to the total in place, because copying the large total would be slow."""
    total.update(counts)
    return total


def show(total: Counter[str]) -> None:
    print(f"{total.total():,} words, {len(total):,} different ones; the most frequent:")
    for word, count in total.most_common(10):
        print(f"{count:>12,}  {word}")


def wordcount(directory: str = str(STANDARD_LIBRARY)) -> Graph:
    if not Path(directory).is_dir():
        raise ValueError(f"not a directory: {directory}")
    graph = Graph("wordcount")
    files = graph.source(python_files, Path(directory))
    counts = files.batch(32).map(count_words, workers=2, on="process", ordered=False)
    counts.reduce(add, Counter(), name="total").sink(show)
    return graph


def main() -> None:
    parser = argparse.ArgumentParser(description="Count the words in all Python files below a directory.")
    parser.add_argument("directory", nargs="?", default=str(STANDARD_LIBRARY))
    wordcount(parser.parse_args().directory).run(progress=True)


if __name__ == "__main__":
    main()
