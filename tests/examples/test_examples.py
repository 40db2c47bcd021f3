"""Run each example as a user would, in a separate process.

The tests compare the output with a sequential computation.
"""

from __future__ import annotations

import asyncio
import itertools
import re
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path

import pytest
from support import scripts
from support.preloaded_programs import Template

pytestmark = pytest.mark.usefixtures("forked_programs")

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
FLOWCHAN = Path(sys.executable).parent / "flowchan"
ALL = sorted(path.name for path in EXAMPLES.glob("*.py"))


def run(*command: object) -> str:
    """Return the output of a command, which must succeed without a traceback."""
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=100)
    return checked(done.returncode, done.stdout, done.stderr)


def checked(code: int, out: str, err: str) -> str:
    assert code == 0, err
    assert "Traceback" not in err
    return out


def python(example: str, *args: object) -> str:
    with scripts.start(EXAMPLES / example, *map(str, args)) as program:
        out, err = program.communicate(timeout=100)
    return checked(program.returncode, out, err)


@pytest.fixture(scope="module")
def real_files() -> Path:
    """Return a directory with a moderate number of real files."""
    return Path(asyncio.__file__).parent


@pytest.mark.parametrize("across", ["threads", "processes"])
def test_producer_consumer_accounts_for_every_item(across: str) -> None:
    *producers, last = python("producer_consumer.py", "--across", across, "--seconds", 0.3).splitlines()
    assert last == "every item is accounted for"
    assert len(producers) == 3
    for number, line in enumerate(producers):
        counts = re.fullmatch(rf"producer {number}: ([\d,]+) items put, ([\d,]+) got", line)
        assert counts, line
        assert counts[1] == counts[2]


def test_producer_consumer_graph_receives_all_source_items() -> None:
    output = run(FLOWCHAN, "run", EXAMPLES / "producer_consumer.py")
    for number in range(3):
        assert f"producer {number}: 10,000 items got" in output


def counted_words(directory: Path) -> list[str]:
    """Count words file by file. Return the expected output of wordcount, without the words.

    Words with equal counts may come in any order.
    """
    counts: Counter[str] = Counter()
    for file in directory.rglob("*.py"):
        counts.update(re.findall(r"\w+", file.read_text(encoding="utf-8", errors="replace").lower()))
    head = f"{sum(counts.values()):,} words, {len(counts):,} different ones; the most frequent:"
    return [head, *(f"{count:>12,}" for _, count in counts.most_common(10))]


def test_wordcount_equals_a_sequential_count(real_files: Path) -> None:
    head, *words = python("wordcount.py", real_files).splitlines()
    assert [head, *(line[:12] for line in words)] == counted_words(real_files)
    text = "\n".join(
        file.read_text(encoding="utf-8", errors="replace") for file in real_files.rglob("*.py")
    ).lower()
    for line in words:
        count, word = line.split()
        assert int(count.replace(",", "")) == len(re.findall(rf"\b{word}\b", text))


def test_wordcount_takes_its_directory_from_the_command_line(real_files: Path) -> None:
    assert counted_words(real_files)[0] in run(FLOWCHAN, "run", EXAMPLES / "wordcount.py", "--", real_files)


def test_wordcount_of_an_empty_directory_is_zero(tmp_path: Path) -> None:
    assert python("wordcount.py", tmp_path).startswith("0 words, 0 different ones")


def equal_files(directory: Path) -> set[frozenset[str]]:
    """Compare all files in a directory byte by byte, and return the groups of equal files."""
    groups = defaultdict(set)
    for file in directory.rglob("*"):
        if file.is_file() and not file.is_symlink():
            groups[file.read_bytes()].add(str(file))
    return {frozenset(group) for group in groups.values() if len(group) > 1}


def test_duplicates_match_a_comparison_of_whole_contents(tmp_path: Path, real_files: Path) -> None:
    for number, file in enumerate(sorted(real_files.glob("*.py"))):
        content = file.read_bytes()
        (tmp_path / "a" / "b").mkdir(parents=True, exist_ok=True)
        (tmp_path / file.name).write_bytes(content)
        if number % 3 == 0:
            (tmp_path / "a" / file.name).write_bytes(content)
        if number % 6 == 0:
            (tmp_path / "a" / "b" / f"copy of {number}").write_bytes(content)
        if number % 5 == 0:  # a file of the same size with different content
            (tmp_path / "a" / f"reversed {number}").write_bytes(content[::-1])
    (tmp_path / "link").symlink_to(tmp_path / "a" / "b")
    expected = equal_files(tmp_path)
    assert len(expected) > 5
    (tmp_path / "site-packages").mkdir()  # the example skips installed packages
    (tmp_path / "site-packages" / "again.py").write_bytes(content)

    head, *lines = python("duplicates.py", tmp_path).splitlines()
    found = {frozenset(re.split(r"  (?=/)", line[14:])) for line in lines}
    assert found == expected
    wasted = sum(Path(min(group)).stat().st_size * (len(group) - 1) for group in expected)
    assert head == f"{len(expected):,} groups of equal files, {wasted:,} bytes could be saved"


def test_duplicates_example_finds_equal_files_in_the_standard_library(real_files: Path) -> None:
    expected = equal_files(real_files.parent / "encodings")
    output = run(FLOWCHAN, "run", EXAMPLES / "duplicates.py", "--", real_files.parent / "encodings")
    assert f"{len(expected):,} groups of equal files" in output


def test_duplicates_hosts_finds_duplicates_and_reports_work_per_host(tmp_path: Path) -> None:
    for number in range(20):
        (tmp_path / f"{number:02}").write_text(f"{number % 4}")
    lines = python("duplicates_hosts.py", tmp_path).splitlines()
    assert "4 groups of equal files, 16 bytes could be saved" in lines
    hashed = [line.split() for line in lines if " hashed " in line]
    assert {host for host, *_ in hashed} <= {"local-1", "local-2"}
    assert sum(int(number) for _, _, number, _ in hashed) == 20


KINDS = ("svg", "mmd", "dot")
CHECK_AND_VIZ = """
import sys
from flowchan.cli.commands import main
files = sys.argv[1:]
for file, picture in zip(files[::2], files[1::2]):
    for command in (["check", file], ["viz", file, "-o", picture]):
        try:
            main(command)
        except SystemExit as end:
            assert not end.code, command
"""
"""A program that runs ``flowchan check`` and ``flowchan viz`` on several files."""


@pytest.mark.any_value
@pytest.mark.parametrize("kind", KINDS)
def test_every_example_can_be_checked_and_drawn_without_running(
    torch_programs: Template, kind: str, tmp_path: Path
) -> None:
    """Each example is drawn in one format; tests/viz tests all of them."""
    pictures = {EXAMPLES / one: tmp_path / f"{one}.{kind}" for one in ALL[KINDS.index(kind) :: len(KINDS)]}
    files = itertools.chain.from_iterable(pictures.items())
    done = torch_programs.run("-c", CHECK_AND_VIZ, *files)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 3 * len(pictures)
    for number, (example, picture) in enumerate(pictures.items()):
        checked, threads, drawn = lines[3 * number : 3 * number + 3]
        assert "all clear" in checked
        assert threads.startswith("threads ")
        assert drawn.startswith(f"{picture}: ")
        assert example.name in picture.read_text()  # a stage's label names the file of its function


@pytest.mark.parametrize("example", ["wordcount.py", "duplicates.py"])
def test_missing_directory_is_reported_in_one_line(example: str, tmp_path: Path) -> None:
    command = [FLOWCHAN, "run", EXAMPLES / example, "--", tmp_path / "nowhere"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 2
    assert f"not a directory: {tmp_path / 'nowhere'}" in done.stderr
    assert done.stderr.count("\n") == 1
