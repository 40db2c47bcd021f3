"""What every test runs under, tried on small tests of its own: what is left behind is named, and what was
skipped too."""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import pytest
from optional import LOADED
from warm import OurTemplate, SharedTemplate

from flowchan import Channel

HERE = Path(__file__).parent


def run_tests(folder: Path, text: str, *options: str) -> str:
    """What pytest prints of these tests under this folder's conftest.py."""
    (folder / "test_small.py").write_text(text)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "conftest", f"--rootdir={folder}", *options, folder],
        env={**os.environ, "PYTHONPATH": str(HERE)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return done.stdout


LEAVES = """
import mmap, os

def test_descriptor():
    os.open("/dev/null", os.O_RDONLY)

kept = []

def test_mapping():
    fd = os.memfd_create("flowchan test")
    os.ftruncate(fd, 4096)
    kept.append(mmap.mmap(fd, 4096))
    os.close(fd)

def test_nothing():
    pass
"""


def test_what_a_test_leaves_behind_is_named(tmp_path: Path) -> None:
    said = run_tests(tmp_path, LEAVES)
    assert "left behind: descriptor" in said
    assert "(/dev/null)" in said
    assert "mapping" in said
    assert "2 errors" in said
    assert "3 passed" in said


def test_what_a_thread_that_ends_late_held_in_a_cycle_is_not_left_behind() -> None:
    """It ends once the check has collected for the first time."""
    collected = threading.Event()

    def note(phase: str, about: dict[str, int]) -> None:
        if phase == "stop" and about["generation"] == 2:
            collected.set()

    def hold(cycle: list[object]) -> None:
        collected.wait()
        gc.callbacks.remove(note)

    cycle: list[object] = [Channel(across="processes")]
    cycle.append(cycle)
    gc.callbacks.append(note)
    threading.Thread(target=hold, args=(cycle,), daemon=True).start()


def test_what_a_program_of_a_shared_template_leaves_is_seen(pytestconfig: pytest.Config) -> None:
    """It is no descendant of the process that runs the test."""
    children = pytestconfig.pluginmanager.get_plugin(str(HERE / "conftest.py")).children
    shared = SharedTemplate("json")
    template = OurTemplate(shared.name)
    with template.popen("-c", "input()", stdin=subprocess.PIPE) as program:
        assert f"process {program.pid}" in children()
        program.communicate(b"end\n")
    assert f"process {program.pid}" not in children()
    template.close()
    shared.close()


SKIPS = """
import pytest

@pytest.mark.parametrize("number", range(3))
def test_needs_a_tool(number):
    pytest.skip("needs a tool: apt-get install tool")

def test_needs_another():
    pytest.skip("needs another")
"""


def test_the_last_lines_say_what_was_skipped_and_how_often(tmp_path: Path) -> None:
    *_, many, one, _ = run_tests(tmp_path, SKIPS).splitlines()
    assert (many, one) == ("skipped 3: needs a tool: apt-get install tool", "skipped 1: needs another")


def test_files_that_load_large_libraries_are_told_by_their_lines(pytestconfig: pytest.Config) -> None:
    """Else all tests of the first half of ``make test`` are forked at four times the cost."""
    assert pytestconfig.getoption("--large") != "without" or pytestconfig.stash[LOADED] == []


FAILS = """
def test_fails():
    assert False

def test_passes(): ...
"""
LARGE = "'''\n" + "import torch\n" + "'''\ndef test_passes_too(): ..."


def test_the_end_of_the_second_half_says_what_both_came_to(tmp_path: Path) -> None:
    run_tests(tmp_path, FAILS, "--large", "without", "-n1")
    *_, failed, both, closing = run_tests(tmp_path, LARGE, "--large", "with", "-n1").splitlines()
    assert (failed, both) == ("FAILED test_small.py::test_fails", "in both halves:")
    assert re.fullmatch(r"1 failed, 2 passed in \d+\.\d\ds \(0:00:\d\d\)", closing)
    assert run_tests(tmp_path, LARGE, "--large", "with").endswith("has not come to its end\n")


HANGS = """
import signal

def test_hangs():
    signal.pause()
"""


@pytest.mark.parametrize("workers", [0, 1])
def test_a_hang_ends_in_stacks(tmp_path: Path, workers: int) -> None:
    said = run_tests(tmp_path, HANGS, "--timeout=1", f"-n{workers}", "--max-worker-restart=0")
    assert "hang in test_small.py::test_hangs" in said
    assert re.search(r'test_small.py", line \d+ in test_hangs', said)


def test_no_two_test_files_have_one_name() -> None:
    """Their folders are no packages, so pytest could not collect the second."""
    names = Counter(path.name for path in HERE.rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []


def test_the_soak_runs_each_file_that_has_longer_walks() -> None:
    """Those that are marked, and those that look at the option."""
    longer = re.compile(r"pytest\.mark\.long|getoption\(.--long")
    files = [path for path in HERE.rglob("test_*.py") if longer.search(path.read_text())]
    makefile = (HERE.parent / "Makefile").read_text()
    models = re.search(r"^MODELS \?= (.*)", makefile, re.MULTILINE)
    assert models
    soak = makefile.partition("\nsoak:")[2].partition("\n\n")[0].replace("$(MODELS)", models[1])
    assert len(files) > 5
    assert [path for path in files if not any(f" {part}" in soak for part in parts_of(path))] == []


def parts_of(path: Path) -> list[str]:
    """The file and the folders that it is in, from the top of the repository."""
    inner = path.relative_to(HERE.parent)
    return [str(part) for part in (inner, *inner.parents[:-2])]


BEGINS = """
import os, pathlib

here = pathlib.Path(__file__)
with open(here.with_name(os.environ["PYTEST_XDIST_WORKER"]), "a") as order:
    order.write(here.stem[-1])

def test_nothing():
    pass
"""


def test_processes_that_share_the_tests_begin_to_import_them_at_different_ones(tmp_path: Path) -> None:
    """What nobody has compiled yet would be compiled by each of them."""
    for name in "abcd":
        (tmp_path / f"test_{name}.py").write_text(BEGINS)
    assert "4 passed" in run_tests(tmp_path, "", "-n", "2")
    assert [(tmp_path / worker).read_text() for worker in ("gw0", "gw1")] == ["abcd", "cdab"]


MARKS = """
def pytest_configure(config):
    config.addinivalue_line("markers", "ours: known once the folder's conftest.py is")
"""
MARKED = """
import pytest

pytestmark = pytest.mark.ours

def test_nothing():
    pass
"""


def test_a_file_that_needs_its_folders_conftest_is_collected_after_it(tmp_path: Path) -> None:
    """Importing it beforehand fails, which harms nobody."""
    folder = tmp_path / "tests" / "folder"
    folder.mkdir(parents=True)
    (folder / "conftest.py").write_text(MARKS)
    (folder / "test_marked.py").write_text(MARKED)
    assert "1 passed" in run_tests(tmp_path, "", "-n", "2", "--strict-markers")
