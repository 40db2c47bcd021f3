"""Find files with the same contents in a directory and its subdirectories.

    python examples/duplicates.py [DIRECTORY]
    flowchan run examples/duplicates.py [-- DIRECTORY]
    flowchan viz examples/duplicates.py -o duplicates.svg

The program first groups the files by size. Two processes then hash the files that have the same size as
another file. The default directory is the standard library of the running Python.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import sysconfig
from collections import defaultdict
from collections.abc import Iterator
from operator import itemgetter
from pathlib import Path
from typing import Any

from flowchan import Graph, In, Out

STANDARD_LIBRARY = Path(sysconfig.get_path("stdlib"))


def sized_files(directory: Path) -> Iterator[tuple[int, Path]]:
    """Yield the size and the path of each regular file below ``directory``, except installed packages.

    A symbolic link to a file does not count as a second copy.
    """
    for file in directory.rglob("*"):
        installed = "site-packages" in file.relative_to(directory).parts
        if not installed and file.is_file() and not file.is_symlink():
            yield file.stat().st_size, file


def group(keyed: In[tuple[Any, Path]], groups: Out[list[Path]]) -> None:
    """Read all (key, file) pairs, then put a list of the files for each key that has at least two files.

    A stage with ports runs this function.
    """
    found = defaultdict(list)
    for key, file in keyed:
        found[key].append(file)
    for files in found.values():
        if len(files) > 1:
            groups.put(files)


def with_digest(file: Path) -> tuple[bytes, Path]:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").digest(), file


def unreadable(failed: Any) -> None:
    print(f"skipped {failed.item}: {failed.error}", file=sys.stderr)


def show(groups: list[list[Path]]) -> None:
    """Print all groups, those that waste the most space first, each with its first three files."""
    wasted = {min(files): min(files).stat().st_size * (len(files) - 1) for files in groups}
    lines = [f"{len(groups):,} groups of equal files, {sum(wasted.values()):,} bytes could be saved\n"]
    for files in sorted(map(sorted, groups), key=lambda files: (-wasted[files[0]], files[0])):
        more = f"  and {len(files) - 3:,} more" if len(files) > 3 else ""
        lines.append(f"{wasted[files[0]]:>12,}  {'  '.join(map(str, files[:3]))}{more}\n")
    print("".join(lines), end="")


def duplicates(directory: str = str(STANDARD_LIBRARY)) -> Graph:
    if not Path(directory).is_dir():
        raise ValueError(f"not a directory: {directory}")
    graph = Graph("duplicates")
    files = graph.source(sized_files, Path(directory), name="files")
    same_size = graph.stage(group, files, name="same size")
    hashed = same_size.unbatch(name="candidates").map(with_digest, workers=2, on="process", ordered=False)
    hashed.errors.sink(unreadable)
    # Equal digests go to the same partition, so each partition can be grouped separately.
    low, high = hashed.partition(itemgetter(0), 2, name="by digest")
    equal = graph.merge(graph.stage(group, low, name="equal 1"), graph.stage(group, high, name="equal 2"))
    equal.collect(name="report").sink(show)
    return graph


def main() -> None:
    parser = argparse.ArgumentParser(description="Find files with the same contents in a folder tree.")
    parser.add_argument("directory", nargs="?", default=str(STANDARD_LIBRARY))
    duplicates(parser.parse_args().directory).run(progress=True)


if __name__ == "__main__":
    main()
