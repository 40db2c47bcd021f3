"""Run the examples of the patterns as a user would.

The tests compare the output with a sequential computation.
"""

from __future__ import annotations

import ast
import asyncio
import zipfile
from collections import Counter
from pathlib import Path

import pytest
from support import scripts

pytestmark = pytest.mark.usefixtures("forked_programs")

EXAMPLES = Path(__file__).parents[2] / "examples" / "patterns"
REAL_FILES = Path(asyncio.__file__).parent
everywhere = pytest.mark.parametrize("on", ["thread", "process"])


def python(example: str, *args: object) -> list[str]:
    """Return the lines of an example's output. The example must succeed with an empty standard error."""
    code, out, err = ended(example, *args)
    assert (code, err) == (0, "")
    return out.splitlines()


def ended(example: str, *args: object) -> tuple[int, str, str]:
    """Run an example, and return its exit code, standard output and standard error."""
    with scripts.start(EXAMPLES / example, *map(str, args)) as program:
        out, err = program.communicate(timeout=100)
    return program.returncode, out, err


def lines_of(files: list[Path]) -> int:
    return sum(file.read_bytes().count(b"\n") for file in files)


@everywhere
def test_map_over_files_counts_every_line_once(on: str) -> None:
    files = sorted(REAL_FILES.rglob("*.py"))
    shares = [files[0::3], files[1::3], files[2::3]]
    assert python("map_files.py", REAL_FILES, "--workers", 3, "--on", on) == [
        *(
            f"worker {worker}: {lines_of(share):,} lines in {len(share):,} files"
            for worker, share in enumerate(shares, 1)
        ),
        f"total: {lines_of(files):,} lines in {len(files):,} files",
    ]


def test_map_over_files_reads_the_standard_library_by_default() -> None:
    assert python("map_files.py")[-1].startswith("total: ")


@everywhere
def test_work_queue_over_files_finds_all_import_lines(on: str, tmp_path: Path) -> None:
    sources = [*REAL_FILES.glob("*.py"), *REAL_FILES.parent.joinpath("json").glob("*.py")]
    for number, file in enumerate(sources):
        (tmp_path / f"{number}.py").write_bytes(file.read_bytes())
    (tmp_path / "no.py").write_text("this is no Python\n")
    found: Counter[str] = Counter()
    for file in sources:
        names = set()
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                names.update(alias.name.split(".")[0] for alias in node.names)
            if isinstance(node, ast.ImportFrom) and not node.level:
                names.add(str(node.module).split(".")[0])
        found.update(names)
    head, *rest = python("queue_files.py", tmp_path, "--on", on, "--workers", 3)
    assert head == f"{len(sources) + 1:,} files, 1 of them not valid for this Python version"
    assert [line.split()[::-1] for line in rest] == [
        [name, f"{count:,}"]
        for name, count in sorted(found.items(), key=lambda pair: (-pair[1], pair[0]))[:5]
    ]


@everywhere
def test_background_task_packs_every_file(on: str, tmp_path: Path) -> None:
    archive = tmp_path / "packed.zip"
    files = sorted(REAL_FILES.rglob("*.py"))
    assert python("background_task.py", REAL_FILES, "-o", archive, "--on", on) == [
        f"{lines_of(files):,} lines",
        f"{len(files):,} files packed into an archive of {archive.stat().st_size:,} bytes",
    ]
    with zipfile.ZipFile(archive) as packed:
        assert {name: packed.read(name) for name in packed.namelist()} == {
            str(file.relative_to(REAL_FILES)): file.read_bytes() for file in files
        }


def test_failed_background_task_raises_in_the_program(tmp_path: Path) -> None:
    code, _, err = ended("background_task.py", "-o", tmp_path / "nowhere" / "packed.zip")
    assert code == 1
    assert "FileNotFoundError" in err
