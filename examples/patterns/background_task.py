"""Pack Python files into an archive in a background task, while the program counts their lines.

    python examples/patterns/background_task.py [DIRECTORY] [-o ARCHIVE] [--on thread|process]

The default directory is the ``json`` package of the running Python. The program deletes the archive unless
you pass ``-o``.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import zipfile
from pathlib import Path

from flowchan.pipelines import BackgroundTask


def pack(directory: Path, archive: Path) -> int:
    """Write the archive, and return the number of files in it."""
    files = sorted(directory.rglob("*.py"))
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as packed:
        for file in files:
            packed.write(file, file.relative_to(directory))
    return len(files)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Pack the Python files below a directory and count their lines."
    )
    parser.add_argument("directory", nargs="?", type=Path, default=Path(json.__file__).parent)
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--on", choices=["thread", "process"], default="process")
    args = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        archive = args.output or Path(folder, "packed.zip")
        task = BackgroundTask(pack, args.directory, archive, on=args.on)
        lines = sum(file.read_bytes().count(b"\n") for file in args.directory.rglob("*.py"))
        print(f"{lines:,} lines")
        # result() waits for the task, and raises the task's exception if it failed.
        print(f"{task.result():,} files packed into an archive of {archive.stat().st_size:,} bytes")
        task.close()


if __name__ == "__main__":
    main()
