"""Run every test under a watchdog that turns a hang into stack dumps and a failure, and check for leftovers.

*Watchdog.* pytest-timeout reports that a test hangs. The action on a hang is extended: every child process
first dumps its stacks and is then killed. The log then shows which processes are waiting for each other. If
the interpreter itself cannot run, because native code never releases the GIL, faulthandler's own thread does
the same a little later.

*Leftovers.* After each passed test, no new child process, thread, file descriptor or shared-memory mapping
may remain. The check looks only at the process that runs the tests, so several processes can run tests at the
same time.

*Skipped.* The last lines list the skipped tests, grouped by reason. Each reason names the missing
requirement.

*Large libraries.* A fork costs four times as much once the process has loaded torch, and most tests fork.
``tools/run_tests.py`` therefore runs the files that load such libraries last, in separate processes.

*Outcomes.* A run with ``--outcomes`` writes its outcomes to a file for ``tools/run_tests.py``.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_timeout
from support import combinations, scripts
from support.child_processes import children_of, descendants
from support.long_files import LONG_FILES
from support.optional_packages import LARGE, PIPES, loads_large, optional
from support.outcomes import Outcomes
from support.peers import LaunchedElsewhere
from support.preloaded_programs import TORCH, OurTemplate, Template
from support.waiting import wait_until
from support.watchdog import Watchdog

REAL_HOSTS = Path(__file__).parent / "hosts_real"
ENDING = ("thread ", "process ")
"""Kinds of leftovers that may end a moment after a test; descriptors and mappings have owners."""
PORT_END_S = 5.0
"""Seconds to wait for the rings of a dropped remote channel, which end after the owner's reply."""
PASSED = pytest.StashKey[bool]()
STDERR = pytest.StashKey[int]()
WATCHDOG = pytest.StashKey[Watchdog]()
HELD = pytest.StashKey[set[str] | None]()
"""Resources after the last test, if nothing has acquired any since then."""
MANY = pytest.StashKey[bool]()
"""Whether tests have loaded modules with many objects, which make garbage collections slow."""
SLOW_COLLECTION_S = 0.01
PEER_FILES = pytest.StashKey[set[Path]]()
AGENT_FILES = pytest.StashKey[set[Path]]()
"""Files whose tests have peers in a separate program, and files whose tests have agents."""
_unmapped: list[int] = []
"""Size of the shared and file mappings, in pages, when none of them was a memfd's."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--long",
        action="store_true",
        help="also run the longest random tests, and run the other random tests in full",
    )
    parser.addoption(
        "--only-long", action="store_true", help="with --long: run only the tests that --long changes"
    )
    parser.addoption(
        "--frames", type=int, default=3_000_000, help="with --long: number of frames from each kind of peer"
    )
    parser.addoption(
        "--hosts",
        action="store_true",
        help="also run the tests that need sshd, Slurm, Ray or network namespaces",
    )
    parser.addoption(
        "--large",
        choices=["with", "without"],
        help="run only the test files that load large libraries (with), or only those that do not (without)",
    )
    parser.addoption("--torch-programs", help="address of the template that several pytest processes share")
    parser.addoption("--outcomes", help="file to write the outcome of the run to (see tools/run_tests.py)")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return ignored(collection_path, config) or None


def ignored(collection_path: Path, config: pytest.Config) -> bool:
    if collection_path == REAL_HOSTS and not config.getoption("--hosts"):
        return True
    large = config.getoption("--large")
    if large == "without" and collection_path == PIPES:  # the folder's conftest.py also loads torch
        return True
    is_test = collection_path.match("test_*.py")
    return bool(large and is_test and loads_large(collection_path) != (large == "with"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    long, only = config.getoption("--long"), config.getoption("--only-long")
    extra = combinations.left_out(items)
    runs = {item: long if item in extra else not only or is_longer(item) for item in items}
    config.hook.pytest_deselected(items=[item for item in items if not runs[item]])
    items[:] = sorted(
        (item for item in items if runs[item]), key=lambda item: item.path.name not in LONG_FILES
    )
    config.stash[PEER_FILES] = {item.path for item in items if has_peers(item)}
    config.stash[AGENT_FILES] = {item.path for item in items if has_agents(item)}
    if not long:
        skip = pytest.mark.skip(reason="one of the longest: make soak runs it")
        for item in items:
            if item.get_closest_marker("long"):
                item.add_marker(skip)


def is_longer(item: pytest.Item) -> bool:
    """Return whether the test does more with the option ``--long``."""
    return item.get_closest_marker("long") is not None or "long_walk" in getattr(item, "fixturenames", ())


def pytest_configure(config: pytest.Config) -> None:
    """Let SIGUSR1 dump the stacks of this process and of every forked process, past pytest's capturing."""
    config.addinivalue_line("markers", "long: only with --long, as make soak runs it")
    config.addinivalue_line("markers", "alternative(value): only with one value of a test; all with --long")
    for marker in combinations.MARKERS:
        config.addinivalue_line("markers", f"{marker}: few combinations of parameters; all with --long")
    config.stash[STDERR] = os.dup(sys.__stderr__.fileno() if sys.__stderr__ else 2)
    config.stash[WATCHDOG] = Watchdog(config.stash[STDERR])
    config.pluginmanager.register(SharedFixtures())
    faulthandler.register(signal.SIGUSR1, file=config.stash[STDERR], all_threads=True)
    outcomes = config.getoption("--outcomes")
    if outcomes:
        config.pluginmanager.register(Outcomes(Path(outcomes)))


class SharedFixtures:
    """Let the next test list the resources again, because a fixture shared by several tests may acquire some.

    This is a plugin, because pytest does not call this hook for session fixtures if the conftest.py is below
    the root.
    """

    @pytest.hookimpl(tryfirst=True)
    def pytest_fixture_setup(
        self, fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
    ) -> None:
        if fixturedef.scope != "function":
            request.config.stash[HELD] = None


def pytest_collection_finish(session: pytest.Session) -> None:
    """Make garbage collections cheap: exclude all objects that exist before the first test."""
    loaded = [name for name in LARGE if name in sys.modules]
    if loaded and session.config.getoption("--large") == "without":
        raise pytest.UsageError(
            f"a file loads {', '.join(loaded)}, but its imports do not show it (optional_packages.py)"
        )
    exempt_from_collection()


def exempt_from_collection() -> None:
    """Exclude all objects that exist now, between two tests, from garbage collection."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> bool:
    """Arm the watchdog for one test, instead of pytest-timeout's own timer."""
    watchdog = item.config.stash[WATCHDOG]
    if watchdog.begin(settings.timeout, lambda: end_hang(item, settings)):
        item.config.stash[HELD] = None
    item.cancel_timeout = watchdog.pause  # type: ignore[attr-defined]
    return True


def end_hang(item: pytest.Item, settings: Any) -> None:
    """Dump the stacks of all processes in the test run, kill the children, and exit."""
    stderr = item.config.stash[STDERR]  # pytest captures the usual standard error
    parents = [psutil.Process(), *map(psutil.Process, OurTemplate.pids)]
    children = [child for parent in parents for child in parent.children(recursive=True)]
    for child in children:
        os.write(stderr, f"hang in {item.nodeid}: stacks of child {child}\n".encode())
        if catches(child.pid, signal.SIGUSR1):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.send_signal(signal.SIGUSR1)
            threading.Event().wait(0.5)  # in turn, so that the dumps do not mix
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    os.write(stderr, f"hang in {item.nodeid}: stacks of the tests' own process\n".encode())
    faulthandler.dump_traceback(stderr, all_threads=True)
    pytest_timeout.timeout_timer(item, settings)


def catches(pid: int, signum: int) -> bool:
    """Return whether a process handles the signal. The signal would end any other process."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    caught = next((line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (signum - 1) & 1)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Start the program that forks a test's peers, before the check for leftovers begins."""
    if has_peers(item) and LaunchedElsewhere.running is None:
        LaunchedElsewhere.begin()
        item.config.stash[HELD] = None


def has_peers(item: pytest.Item) -> bool:
    fixtures, module = getattr(item, "fixturenames", ()), getattr(item, "module", None)
    return "spawn_peer" in fixtures or hasattr(module, "HostPeer") or hasattr(module, "PEERS")


def has_agents(item: pytest.Item) -> bool:
    return hasattr(getattr(item, "module", None), "local")


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """End that program and the fork servers before the next file, whose tests may list all processes.

    Each of them stays if the tests in that file also use it.
    """
    if nextitem is None or nextitem.path != item.path:
        stash = item.config.stash
        if nextitem is None or nextitem.path not in stash[PEER_FILES]:
            LaunchedElsewhere.end()
        if seeds_of_agents() and (nextitem is None or nextitem.path not in stash[AGENT_FILES]):
            sys.modules["flowchan.hosts.providers.forked_agents"].end_seeds()
        return_free_memory()


def return_free_memory() -> None:
    """Return free memory from the heaps of the C library to the kernel.

    A fork copies the page tables of this process, so it takes longer the more memory the process keeps.
    """
    gc.collect()
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # only glibc has it
        trim(0)


@pytest.fixture(scope="session")
def long_walk(pytestconfig: pytest.Config) -> bool:
    """Return whether a test should run its long version.

    ``make soak`` runs the tests that use this fixture, and the tests marked ``long``.
    """
    return bool(pytestconfig.getoption("--long"))


@pytest.fixture
def by_fork() -> Iterator[None]:
    """Set the start method to fork, for tests that replace parts of a worker before the fork."""
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method("fork", force=True)
    yield
    multiprocessing.set_start_method(before, force=True)


@pytest.fixture
def impatient() -> Iterator[None]:
    """Shorten the peer timeout to 2 s, for tests that wait until a remote process counts as dead."""
    from flowchan.hosts import serve  # imported here, because only some tests need it

    serve(peer_timeout=2)
    yield
    serve()


@pytest.fixture
def no_agent_stays() -> Iterator[None]:
    """Check that a test's agents have exited when it ends."""
    yield
    from hosted import agents  # imported here, because only some tests need it

    assert not agents()


@pytest.fixture(scope="module")
def torch_programs(pytestconfig: pytest.Config) -> Iterator[Template]:
    """Provide the template that runs a file's programs with torch.

    It starts before the check for leftovers begins.
    """
    shared = pytestconfig.getoption("--torch-programs")
    template = OurTemplate(bytes.fromhex(shared)) if shared else Template(*TORCH)
    yield template
    template.close()


@pytest.fixture(scope="module")
def forked_programs() -> Iterator[None]:
    """Start the programs of scripts.py with flowchan already imported, to save most of their start time.

    Use this in files that do not test how a program starts.
    """
    with scripts.forked():
        yield


@pytest.fixture(scope="module")
def one_compute_thread() -> Iterator[None]:
    """Let torch compute with one thread.

    Additional threads of torch would count as leftovers, and do not survive a fork.
    """
    torch = optional("torch")  # imported here, because only some tests need it
    if not torch:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report = yield
    if call.when == "call":
        item.stash[PASSED] = report.passed
    return report


@pytest.fixture(autouse=True)
def no_leftovers(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a passed test that leaves a child process, thread, descriptor or shared-memory mapping behind."""
    stash = request.config.stash
    if stash.get(MANY, False):
        stash[MANY] = False
        exempt_from_collection()
    before, stash[HELD] = stash.get(HELD, None) or holdings(), None
    yield
    # these resources live until the end of the file
    lasting = {"two_nodes", "watched_run"} & {*request.fixturenames}
    if lasting or not request.node.stash.get(PASSED, False):
        return
    after = holdings()
    if not leftovers(before, after):
        stash[HELD] = after
        return
    began = time.thread_time()
    # pytest.raises keeps the exception, which is part of a reference cycle that holds the test's locals.
    gc.collect()
    stash[MANY] = time.thread_time() - began > SLOW_COLLECTION_S
    with contextlib.suppress(AssertionError):  # the check below reports anything that has not ended
        # The task of a joined thread ends a moment after the join. A channel server checks dropped channels
        # later.
        wait_until(
            lambda: not any(remaining.startswith(ENDING) for remaining in leftovers(before)) and not dropped()
        )
        if has_connection():
            wait_until(lambda: not leftovers(before), PORT_END_S)
    gc.collect()  # a thread that has just ended may have held the last reference to such a cycle
    if remaining := leftovers(before):
        pytest.fail(f"left behind: {', '.join(sorted(map(described, remaining)))}", pytrace=False)


def described(held: str) -> str:
    """Add the state and the command of a leftover process."""
    with contextlib.suppress(psutil.Error):
        if held.startswith("process "):
            process = psutil.Process(int(held.split()[1]))
            command = " ".join(process.cmdline())
            return f"{held} ({process.status()}, child of {process.ppid()}: {command[:200]})"
    return held


def holdings() -> set[str]:
    """Describe what this process holds in human-readable form.

    The listing takes a fraction of a millisecond.
    """
    tasks = {f"thread {task}" for task in os.listdir("/proc/self/task")}
    return tasks | descriptors() | mappings() | children()


def leftovers(before: set[str], after: set[str] | None = None) -> set[str]:
    """Return what this process has acquired since ``before``.

    Two things do not count: the helpers that all processes share, and the threads of Polars' allocator, which
    start at any time and stay.
    """
    acquired = (after or holdings()) - before
    if not acquired:
        return acquired
    helpers = helpers_of_all()
    return {one for one in acquired if not is_an_allocators(one) and not one.startswith(helpers)}


def helpers_of_all() -> tuple[str, ...]:
    """Return the prefixes that describe the shared helpers and their pipes.

    The forkserver is among them, because Python uses it by default from 3.14 on.
    """
    server, tracker = forkserver._forkserver, resource_tracker._resource_tracker  # type: ignore[attr-defined]
    pids, pipes = [server._forkserver_pid, tracker._pid], [server._forkserver_alive_fd, tracker._fd]
    for seed in seeds_of_agents():
        pids.append(seed.pid)
        pipes.append(seed.descriptor())
    return (
        *(f"process {pid}" for pid in pids if pid is not None),
        *(f"descriptor {pipe} " for pipe in pipes if pipe is not None),
    )


def seeds_of_agents() -> list[Any]:
    """Return the fork servers of ``local``, if this process has any."""
    forked = sys.modules.get("flowchan.hosts.providers.forked_agents")
    return forked.seeds() if forked else []


def dropped() -> bool:
    """Return whether a channel server has yet to check a dropped channel."""
    servers = sys.modules.get("flowchan.remote.channel_server")
    return servers is not None and any(server._dropped for server in servers._servers.values())


def has_connection() -> bool:
    """Return whether this process is connected to an owner of remote channels."""
    module = sys.modules.get("flowchan.remote.connection")
    return module is not None and bool(module._connections or module._leaving)


def is_an_allocators(held: str) -> bool:
    if not held.startswith("thread "):
        return False
    try:
        return Path(f"/proc/self/task/{held.split()[1]}/comm").read_text() == "jemalloc_bg_thd\n"
    except OSError:  # the thread has ended
        return False


def descriptors() -> set[str]:
    found = set()
    for number in os.listdir("/proc/self/fd"):
        try:
            found.add(f"descriptor {number} ({os.readlink(f'/proc/self/fd/{number}')})")
        except OSError:  # the descriptor with which the folder is listed
            continue
    return found


def mappings() -> set[str]:
    pages = Path("/proc/self/statm").read_bytes().split()
    size = int(pages[0]) - int(pages[5])  # without the private memory, which nearly every test changes
    if size in _unmapped:
        return set()
    maps = Path("/proc/self/maps").read_bytes()
    if b"memfd:" not in maps:  # usually true, and saves parsing hundreds of lines
        _unmapped[:] = [size]
        return set()
    lines = os.fsdecode(maps).splitlines()
    return {f"mapping {line.split()[0]} ({line.split()[-1]})" for line in lines if "memfd:" in line}


def children() -> set[str]:
    found = descendants().union(*map(children_of, OurTemplate.pids))
    return {f"process {child}" for child in found}


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Let the watchdog limit how long this process takes to exit, because no further test begins."""
    session.config.stash[WATCHDOG].close()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """List the skipped tests in the last lines; ``tools/run_tests.py`` lists those of all processes."""
    if terminalreporter.config.getoption("--outcomes"):
        return
    reasons = Counter(
        report.longrepr[2].removeprefix("Skipped: ") for report in terminalreporter.stats.get("skipped", ())
    )
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"skipped {count}: {reason}")
