"""Test conftest.py with small test files: it reports leftovers and lists skipped tests."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import re
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest
from support.long_files import LONG_FILES
from support.preloaded_programs import OurTemplate, SharedTemplate
from support.waiting import wait_until

from flowchan import Channel

HERE = Path(__file__).parent
RUN_TESTS = HERE.parent / "tools" / "run_tests.py"


def run_tests(folder: Path, text: str, *options: str, plugins: Sequence[str] = ("-p", "conftest")) -> str:
    """Run these tests under this folder's conftest.py, and return pytest's output."""
    (folder / "test_small.py").write_text(text)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *plugins, f"--rootdir={folder}", *options, folder],
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


def test_resources_left_by_a_test_are_reported(tmp_path: Path) -> None:
    said = run_tests(tmp_path, LEAVES)
    assert "left behind: descriptor" in said
    assert "(/dev/null)" in said
    assert "mapping" in said
    assert "2 errors" in said
    assert "3 passed" in said


LASTS = """
import os, pytest

@pytest.fixture(scope="session")
def null():
    null = os.open("/dev/null", os.O_RDONLY)
    yield
    os.close(null)

def test_nothing():
    pass

def test_shared(null):
    pass
"""


def test_resources_of_a_session_fixture_are_not_leftovers(tmp_path: Path) -> None:
    """For session fixtures, some hooks run only if the conftest.py is in the root folder."""
    below = tmp_path / "tests"
    below.mkdir()
    (below / "conftest.py").symlink_to(HERE / "conftest.py")
    (below / "test_below.py").write_text(LASTS)
    said = run_tests(tmp_path, "", plugins=())
    assert "2 passed" in said
    assert "left behind" not in said


def test_cycle_held_by_late_thread_is_not_a_leftover() -> None:
    """The thread ends after the check has run its first garbage collection."""
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


def test_leftovers_of_template_programs_are_reported(pytestconfig: pytest.Config) -> None:
    """The program is not a descendant of the process that runs the test."""
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
import psutil
import pytest

@pytest.mark.parametrize("number", range(3))
def test_needs_a_tool(number):
    pytest.skip("needs a tool: apt-get install tool")

def test_needs_another():
    pytest.skip("needs another")
"""


def test_summary_lists_skipped_tests_with_counts(tmp_path: Path) -> None:
    *_, many, one, _ = run_tests(tmp_path, SKIPS).splitlines()
    assert (many, one) == ("skipped 3: needs a tool: apt-get install tool", "skipped 1: needs another")


RERUNS = """
import pathlib, pytest

def test_always_fails():
    assert False

def test_fails_once():
    here = pathlib.Path(__file__)
    before = here.with_name("before")
    if not before.exists():
        before.touch()
        pytest.fail("for the first time")

def test_passes(): ...
"""


def run_all(folder: Path, *options: str, files: Sequence[str] = ("--files", ".")) -> tuple[int, list[str]]:
    """Run the files in the folder with tools/run_tests.py; return its exit status and the lines it prints."""
    done = subprocess.run(
        [sys.executable, RUN_TESTS, "-p", "conftest", f"--rootdir={folder}", "-q", *options, *files],
        env={**os.environ, "PYTHONPATH": str(HERE)},
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return done.returncode, done.stdout.splitlines()


def test_failed_tests_are_rerun_one_at_a_time(tmp_path: Path) -> None:
    (tmp_path / "test_small.py").write_text(RERUNS)
    status, said = run_all(tmp_path)
    assert status == 1
    at = r"\d+\.\d s at load \d+\.\d"
    assert [re.sub(at, "AT", line) for line in said[-5:-1]] == [
        "failed next to other tests, but passed alone:",
        "  test_small.py::test_fails_once: AT; alone AT",
        "failed next to other tests and alone:",
        "  test_small.py::test_always_fails: AT; alone AT",
    ]
    assert re.fullmatch(r"1 failed, 2 passed in \d+\.\d\ds \(\d:\d\d:\d\d\)", said[-1])
    assert [line.split(maxsplit=1)[1] for line in said if line.startswith("E ")] == [
        "assert False",
        "Failed: for the first time",
        "assert False",
    ]


def test_test_that_passes_when_rerun_does_not_fail_the_run(tmp_path: Path) -> None:
    (tmp_path / "test_small.py").write_text(RERUNS)
    status, said = run_all(tmp_path, "-k", "not always")
    assert status == 0
    assert said[-3] == "failed next to other tests, but passed alone:"
    assert re.fullmatch(r"2 passed in \d+\.\d\ds \(\d:\d\d:\d\d\)", said[-1])


def test_file_that_hides_a_large_import_fails_the_run(tmp_path: Path) -> None:
    """A hidden import would make all tests of the process fork at four times the cost."""
    (tmp_path / "test_small.py").write_text("__import__('PIL')\ndef test_it(): ...\n")
    status, said = run_all(tmp_path)
    assert status == 1
    assert "a file loads PIL, but its imports do not show it" in "\n".join(said)


DIES = """
import os

def test_dies():
    os._exit(3)
"""
HANGS = """
import signal

def test_hangs():
    signal.pause()
"""


def test_crashed_process_fails_the_run(tmp_path: Path) -> None:
    (tmp_path / "test_small.py").write_text(DIES)
    status, said = run_all(tmp_path)
    assert status == 1
    assert said[-2] == "  pytest ended with status 3 before all tests had run"


def test_pytest_that_is_killed_fails_the_run(tmp_path: Path) -> None:
    (tmp_path / "test_small.py").write_text(HANGS)
    status, said = run_all(tmp_path, "--timeout=1")
    assert status == 1
    assert "hang in test_small.py::test_hangs" in "\n".join(said)
    assert said[-2] == "  pytest ended with status 1 before all tests had run"


def test_file_that_cannot_be_collected_fails_the_run(tmp_path: Path) -> None:
    (tmp_path / "test_small.py").write_text("import there_is_no_such_module")
    status, said = run_all(tmp_path)
    assert status == 1
    assert "  test_small.py could not be collected" in said


def test_hanging_test_ends_with_stack_traces(tmp_path: Path) -> None:
    said = run_tests(tmp_path, HANGS, "--timeout=1")
    assert "hang in test_small.py::test_hangs" in said
    assert re.search(r'test_small.py", line \d+ in test_hangs', said)


HANGS_AT_EXIT = """
import threading

def test_it(): ...

def wait_for_ever(): threading.Event().wait()

threading.Thread(target=wait_for_ever).start()
"""


def test_hang_after_the_last_test_ends_with_stack_traces(tmp_path: Path) -> None:
    (tmp_path / "test_small.py").write_text(HANGS_AT_EXIT)
    status, said = run_all(tmp_path, "--timeout=3")
    assert status == 1
    assert re.search(r'test_small.py", line \d+ in wait_for_ever', "\n".join(said))
    assert "  pytest failed, although none of its tests did" in said


WAITS = """
import os, pathlib, signal, subprocess, sys

def test_waits():
    if IGNORES:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    new = pathlib.Path(__file__).with_name("new")
    new.write_text(f"{os.getpid()} {child.pid}")
    new.rename(new.with_name("pids"))
    while True:
        signal.pause()
"""


@pytest.mark.parametrize("ignores", [False, True], ids=["once", "twice"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_ends_all_processes_of_a_run(tmp_path: Path, number: int, ignores: bool) -> None:
    """A second signal also ends a process that ignores the first."""
    (tmp_path / "test_small.py").write_text(WAITS.replace("IGNORES", str(ignores)))
    (tmp_path / "test_random_breaks.py").write_text("def test_in_another_group(): ...")
    pids = tmp_path / "pids"
    with subprocess.Popen(
        [sys.executable, RUN_TESTS, "-p", "conftest", f"--rootdir={tmp_path}", "-q", "--files", "."],
        env={**os.environ, "PYTHONPATH": str(HERE)},
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    ) as run:
        wait_until(pids.exists)
        family = psutil.Process(run.pid).children(recursive=True)
        assert {process.pid for process in family} > {int(pid) for pid in pids.read_text().split()}
        while run.poll() is None:
            run.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                run.wait(5 if ignores else 100)
    assert run.returncode == 128 + number
    wait_until(lambda: not any(process.is_running() for process in family))


COMBINES = """
import psutil
import pytest

@pytest.fixture(params="ab")
def letter(request):
    return request.param

@pytest.mark.each_value
@pytest.mark.parametrize("number", range(5))
def test_combines(letter, number):
    print("ran", letter, number)

@pytest.mark.any_value
@pytest.mark.parametrize("value", range(5))
def test_any(value):
    print("any", value)

@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_method(method): ...

@pytest.mark.parametrize(("how", "only"), [("fork", 1), ("forkserver", 2), ("spawn", 3)])
def test_method_that_is_tested_in_another_way(how, only): ...

@pytest.mark.parametrize(
    "way", ["plain", *(pytest.param(way, marks=pytest.mark.alternative(way)) for way in ("one", "other"))]
)
def test_way(way):
    print("way", way)

@pytest.mark.parametrize("more", [False, pytest.param(True, marks=pytest.mark.long)])
def test_longer(more): ...

def test_looks(long_walk):
    print("long", long_walk)
"""
PAIRS = """
import psutil
import pytest

@pytest.mark.each_pair
@pytest.mark.parametrize("third", range(3))
@pytest.mark.parametrize("second", range(3))
@pytest.mark.parametrize("first", range(3))
def test_combines(first, second, third):
    print("ran", first, second, third)
"""
MANY = """
import psutil
import pytest

@pytest.mark.parametrize("letter", "abcdefgh")
@pytest.mark.parametrize("number", range(3))
def test_many_combinations(letter, number):
    print("ran", letter, number)

@pytest.mark.parametrize("letter", "ab")
@pytest.mark.parametrize("number", range(2))
def test_draws_up_to_the_limit(letter, number):
    print("drew", letter, number)

@pytest.mark.parametrize("number", range(9))
def test_one_parameter(number): ...
"""


def test_small_selections_cover_each_value_and_long_runs_all(tmp_path: Path) -> None:
    few = run_tests(tmp_path, COMBINES, "-s")
    assert "15 passed, 1 skipped, 11 deselected" in few
    assert sorted(re.findall(r"way (\w+)", few)) in (["one", "plain"], ["other", "plain"])
    assert "long False" in few
    assert len(re.findall(r"any \d", few)) == 1
    pairs = set(re.findall(r"ran (\w) (\d)", few))
    assert {letter for letter, _ in pairs} == {*"ab"}
    assert {number for _, number in pairs} == {*"01234"}
    assert "27 passed" in run_tests(tmp_path, COMBINES, "--long")
    rest = run_tests(tmp_path, COMBINES, "--long", "--only-long", "-s")
    assert "13 passed, 14 deselected" in rest
    assert not pairs & set(re.findall(r"ran (\w) (\d)", rest))


def test_small_selections_cover_each_pair_of_values(tmp_path: Path) -> None:
    ran = re.findall(r"ran (\d) (\d) (\d)", run_tests(tmp_path, PAIRS, "-s"))
    assert 9 <= len(ran) <= 15
    for one, other in itertools.combinations(range(3), 2):
        assert len({(combination[one], combination[other]) for combination in ran}) == 9


def test_large_products_are_sampled_and_cover_each_value(tmp_path: Path) -> None:
    few = run_tests(tmp_path, MANY, "-s")
    assert "20 passed, 17 deselected" in few
    ran = re.findall(r"ran (\w) (\d)", few)
    assert len(ran) == 8
    assert {letter for letter, _ in ran} == {*"abcdefgh"}
    assert {number for _, number in ran} == {*"012"}
    assert len(re.findall(r"drew \w \d", few)) == 3
    assert "37 passed" in run_tests(tmp_path, MANY, "--long")


def test_long_files_run_first(tmp_path: Path) -> None:
    for name in ("test_a.py", "test_random_breaks.py"):
        (tmp_path / name).write_text("def test_it(): ...\ndef test_again(): ...\n")
    ran = run_tests(tmp_path, "", "-vv")
    found = re.findall(r"(test_\w+\.py)::\w+ PASSED", ran)
    assert found == ["test_random_breaks.py"] * 2 + ["test_a.py"] * 2


def test_every_long_file_exists() -> None:
    assert {path.name for path in HERE.rglob("test_*.py")} >= LONG_FILES


def test_explicitly_named_combination_runs(tmp_path: Path) -> None:
    (tmp_path / "test_small.py").write_text(COMBINES)
    for method in ("forkserver", "spawn"):
        assert run_all(tmp_path, files=("--files", f"test_small.py::test_method[{method}]"))[0] == 0


PROCESS = """
import os, pathlib

def test_process():
    here = pathlib.Path(__file__)
    here.with_suffix(".pid").write_text(str(os.getpid()))
"""


def test_each_file_runs_once_and_large_ones_apart(tmp_path: Path) -> None:
    """A long file has its own process. Small files share a process, but not with files that load torch."""
    for name in ("a", "b", "large", "random_breaks"):
        (tmp_path / f"test_{name}.py").write_text(PROCESS)
    (tmp_path / "test_large.py").write_text(PROCESS + "if False:\n    import torch\n")
    ignored = tmp_path / "ignored"
    ignored.mkdir()
    (ignored / "test_ignored.py").write_text(PROCESS)
    status, said = run_all(tmp_path, f"--ignore={ignored}")
    assert (status, said[-1].split(" in ")[0]) == (0, "4 passed")
    pids = {file.stem: file.read_text() for file in tmp_path.rglob("*.pid")}
    assert pids.keys() == {"test_a", "test_b", "test_large", "test_random_breaks"}
    assert pids["test_a"] == pids["test_b"]
    assert len(set(pids.values())) == 3


def test_run_that_selects_no_test_fails(tmp_path: Path) -> None:
    (tmp_path / "test_small.py").write_text("def test_it(): ...")
    status, said = run_all(tmp_path, "-k", "misspelt")
    assert status == 1
    assert "  no tests were selected" in said


def test_run_lists_skipped_tests_of_all_processes(tmp_path: Path) -> None:
    for name in ("a", "random_breaks"):
        (tmp_path / f"test_{name}.py").write_text(SKIPS)
    _, said = run_all(tmp_path)
    assert said[-3:-1] == ["skipped 6: needs a tool: apt-get install tool", "skipped 2: needs another"]


def test_names_of_test_files_are_unique() -> None:
    """Their folders are not packages, so pytest could not collect a second file with the same name."""
    names = Counter(path.name for path in HERE.rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []


def test_longer_soak_tests_use_the_long_walk_fixture() -> None:
    """``--only-long`` would leave out tests without this fixture."""
    looks = [path.name for path in HERE.rglob("test_*.py") if "getoption(" + '"--long"' in path.read_text()]
    assert looks == []
