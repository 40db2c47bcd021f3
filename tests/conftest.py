"""What every test runs under: a watchdog that turns a hang into stacks and a failure, and a check for
leftovers.

*Watchdog.* pytest-timeout says when a test has hung. Its action is extended: every child process dumps its
stacks first and is killed afterwards, so that a hang between processes can be read from the log. When the
interpreter itself cannot run (native code that never gives the GIL back), faulthandler's own thread does the
same a little later.

*Leftovers.* After each test that passed, no child process, thread, file descriptor or shared-memory mapping
may remain that was not there before it. The check looks at the process that runs the tests, so several of
them can run side by side.

*Skipped.* The last lines name what was skipped, grouped by the reason, which says what would have to be
there.

*Large libraries.* To fork a process costs four times as much once it has loaded torch, and most tests fork.
So ``make test`` runs the files that load such libraries after all others, by other processes.

*Outcomes.* With ``--outcomes`` a run writes what it came to, for ``tools/run_tests.py``.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import multiprocessing
import os
import re
import signal
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_timeout
from support import combinations, scripts
from support.optional_packages import LARGE, LOADED, optional
from support.outcomes import Outcomes
from support.peers import Apart
from support.preloaded_programs import TORCH, OurTemplate, SharedTemplate, Template
from support.waiting import wait_until

GRACE = 20.0  # seconds by which faulthandler's last word comes after pytest-timeout's
REAL_HOSTS = Path(__file__).parent / "hosts_real"
PIPES = Path(__file__).parent / "sequential"
NAMES = "|".join(LARGE)
LOADS = re.compile(
    rf"^\s*(?:import|from) (?:{NAMES})\b|(?:importorskip|optional)\(.(?:{NAMES})\b|one_compute_thread",
    re.MULTILINE,
)
"""Lines by which a file loads a large library into the process that runs it."""
ENDING = ("thread ", "process ")
"""What ends by itself a moment after a test has seen the last of it; descriptors and mappings have owners."""
PASSED = pytest.StashKey[bool]()
STDERR = pytest.StashKey[int]()
SHARED = pytest.StashKey[SharedTemplate]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="the longest walks too, and the others whole")
    parser.addoption("--only-long", action="store_true", help="with --long: only what it changes")
    parser.addoption(
        "--frames", type=int, default=3_000_000, help="so many from a peer of each kind, with --long"
    )
    parser.addoption("--hosts", action="store_true", help="what needs sshd, Slurm, Ray or network namespaces")
    parser.addoption(
        "--large", choices=["with", "without"], help="only files that load large libraries, or not"
    )
    parser.addoption("--outcomes", help="file for what the run came to (see tools/run_tests.py)")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return ignored(collection_path, config) or None


def ignored(collection_path: Path, config: pytest.Config) -> bool:
    if collection_path == REAL_HOSTS and not config.getoption("--hosts"):
        return True
    large = config.getoption("--large")
    if large == "without" and collection_path == PIPES:  # its conftest.py loads torch too
        return True
    is_test = collection_path.match("test_*.py")
    return bool(large and is_test and loads_much(collection_path) != (large == "with"))


def loads_much(file: Path) -> bool:
    return PIPES in file.parents or LOADS.search(file.read_text()) is not None


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Processes that share the tests collect all files in the same order, at the same time. Each imports them
    beforehand, and begins at another one, so that what is not compiled yet is compiled once, not by each."""
    shares = getattr(session.config, "workerinput", None)
    if shares is None:
        return
    files = files_of(session.config)
    first = len(files) * int(shares["workerid"].removeprefix("gw")) // shares["workercount"]
    for file in files[first:] + files[:first]:
        folder = str(file.parent)
        sys.path[:] = [folder, *(other for other in sys.path if other != folder)]
        with contextlib.suppress(Exception, pytest.skip.Exception, pytest.fail.Exception):  # collecting tells
            importlib.import_module(file.stem)


def files_of(config: pytest.Config) -> list[Path]:
    """Those that are collected."""
    given = [config.invocation_params.dir / argument.split("::")[0] for argument in config.args]
    found = {file for one in given for file in ([one] if one.is_file() else one.rglob("test_*.py"))}
    real = set() if config.getoption("--hosts") else {REAL_HOSTS}
    return sorted(file for file in found if file.parent not in real and not ignored(file, config))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    long, only = config.getoption("--long"), config.getoption("--only-long")
    extra = combinations.left_out(items)
    runs = {item: long if item in extra else not only or is_longer(item) for item in items}
    config.hook.pytest_deselected(items=[item for item in items if not runs[item]])
    items[:] = [item for item in items if runs[item]]
    if not long:
        skip = pytest.mark.skip(reason="one of the longest: make soak runs it")
        for item in items:
            if item.get_closest_marker("long"):
                item.add_marker(skip)


def is_longer(item: pytest.Item) -> bool:
    """Whether the option ``--long`` makes a difference to the test."""
    return item.get_closest_marker("long") is not None or "long_walk" in getattr(item, "fixturenames", ())


def pytest_configure(config: pytest.Config) -> None:
    """Makes SIGUSR1 dump the stacks of this process and of every process forked from it, past pytest's
    capturing."""
    config.addinivalue_line("markers", "long: only with --long, as make soak runs it")
    for marker in combinations.MARKERS:
        config.addinivalue_line("markers", f"{marker}: few combinations of parameters; all with --long")
    config.stash[STDERR] = os.dup(sys.__stderr__.fileno() if sys.__stderr__ else 2)
    faulthandler.register(signal.SIGUSR1, file=config.stash[STDERR], all_threads=True)
    outcomes = config.getoption("--outcomes")
    if outcomes and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Outcomes(Path(outcomes)))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Takes all that exists before the first test out of the collector's sight: collecting is then cheap."""
    session.config.stash[LOADED] = [name for name in LARGE if name in sys.modules]
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> bool:
    """Arms the watchdog for one test (in place of pytest-timeout's own timer)."""
    stderr = item.config.stash[STDERR]
    timer = threading.Timer(settings.timeout, end_hang, (item, settings))
    timer.daemon = True
    timer.start()
    faulthandler.dump_traceback_later(settings.timeout + GRACE, exit=True, file=stderr)

    def cancel() -> None:
        faulthandler.cancel_dump_traceback_later()
        timer.cancel()
        timer.join()

    item.cancel_timeout = cancel  # type: ignore[attr-defined]
    return True


def end_hang(item: pytest.Item, settings: Any) -> None:
    """Dumps the stacks of every process of the test run, kills the children, and exits."""
    stderr = item.config.stash[STDERR]  # not what pytest captures, or what a worker of xdist throws away
    parents = [psutil.Process(), *map(psutil.Process, OurTemplate.pids)]
    children = [child for parent in parents for child in parent.children(recursive=True)]
    for child in children:
        os.write(stderr, f"hang in {item.nodeid}: stacks of child {child}\n".encode())
        if catches(child.pid, signal.SIGUSR1):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.send_signal(signal.SIGUSR1)
            threading.Event().wait(0.5)  # one after the other, so that the dumps do not mix
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    os.write(stderr, f"hang in {item.nodeid}: stacks of the tests' own process\n".encode())
    faulthandler.dump_traceback(stderr, all_threads=True)
    pytest_timeout.timeout_timer(item, settings)


def catches(pid: int, signum: int) -> bool:
    """Whether a process has a handler for the signal; without one the signal would just end it."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    caught = next((line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (signum - 1) & 1)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """The program apart whose children are a test's peers is there before the test looks at what there is."""
    fixtures, module = getattr(item, "fixturenames", ()), getattr(item, "module", None)
    if "spawn_peer" in fixtures or hasattr(module, "HostPeer") or hasattr(module, "PEERS"):
        Apart.begin()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """And goes when the tests of another file follow, which may look at all processes that there are."""
    if nextitem is None or nextitem.path != item.path:
        Apart.end()
        if seeds_of_agents():
            sys.modules["flowchan.hosts.providers.forked_agents"].end_seeds()


@pytest.fixture(scope="session")
def long_walk(pytestconfig: pytest.Config) -> bool:
    """Whether a test should do more. ``make soak`` runs the tests that use it, and those marked ``long``."""
    return bool(pytestconfig.getoption("--long"))


@pytest.fixture
def by_fork() -> Iterator[None]:
    """For who replaces what workers are forked with, whatever this Python's default is."""
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method("fork", force=True)
    yield
    multiprocessing.set_start_method(before, force=True)


@pytest.fixture
def impatient() -> Iterator[None]:
    """Of channels across hosts: who is not heard of for two seconds is given up."""
    from flowchan.hosts import serve  # not every test needs it

    serve(peer_timeout=2)
    yield
    serve()


@pytest.fixture
def no_agent_stays() -> Iterator[None]:
    """Of runs over hosts: when a test is over, so are the agents that it has started."""
    yield
    from hosted import agents  # not every test needs it

    assert not agents()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config) -> None:
    """Processes that share the tests share a template, too."""
    config.stash[SHARED] = SharedTemplate(*TORCH)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    node.workerinput["torch programs"] = node.config.stash[SHARED].name


@pytest.fixture(scope="module")
def torch_programs(pytestconfig: pytest.Config) -> Iterator[Template]:
    """Where the programs of a file that need torch are run. It is there before a test looks at what there
    is."""
    shared = getattr(pytestconfig, "workerinput", {}).get("torch programs")
    template = OurTemplate(shared) if shared else Template(*TORCH)
    yield template
    template.close()


@pytest.fixture(scope="module")
def forked_programs() -> Iterator[None]:
    """The programs that a file starts by scripts.py begin with flowchan imported, which is most of what they
    cost. For files that are not about how a program begins."""
    with scripts.forked():
        yield


@pytest.fixture(scope="module")
def one_compute_thread() -> Iterator[None]:
    """torch computes with one thread, and starts none: its threads would be left over, and do not survive a
    fork."""
    torch = optional("torch")  # not every test needs it
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
    """Fails a passed test that leaves a child process, thread, descriptor or shared-memory mapping behind."""
    before = holdings()
    yield
    if not request.node.stash.get(PASSED, False) or not leftovers(before):
        return
    gc.collect()  # an exception kept by pytest.raises forms a cycle that holds the test's locals
    with contextlib.suppress(AssertionError):  # then what has not ended is what is left
        # a joined thread's task ends a moment after its join; a home looks at dropped channels when it can
        wait_until(lambda: not any(left.startswith(ENDING) for left in leftovers(before)) and not dropped())
    gc.collect()  # a thread that ended only now may have held the last reference to such a cycle
    if left := leftovers(before):
        pytest.fail(f"left behind: {', '.join(sorted(left))}", pytrace=False)


def holdings() -> set[str]:
    """What this process holds just now, as readable words. A fraction of a millisecond."""
    tasks = {f"thread {task}" for task in os.listdir("/proc/self/task")}
    return tasks | descriptors() | mappings() | children()


def leftovers(before: set[str]) -> set[str]:
    """What this process holds now and did not hold then; without the threads of Polars' allocator, which it
    starts whenever it likes, and keeps, and without the helpers that are started once for all processes."""
    helpers = helpers_of_all()
    return {one for one in holdings() - before if not is_an_allocators(one) and not one.startswith(helpers)}


def helpers_of_all() -> tuple[str, ...]:
    """How the words for them and for their pipes begin. From 3.14 on the forkserver is used by default."""
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
    """What forks the agents of ``local``, if this process has used it."""
    forked = sys.modules.get("flowchan.hosts.providers.forked_agents")
    return forked.seeds() if forked else []


def dropped() -> bool:
    """Whether a home still has to look at a channel that was dropped."""
    homes = sys.modules.get("flowchan.remote.channel_server")
    return homes is not None and any(home._dropped for home in homes._homes.values())


def is_an_allocators(held: str) -> bool:
    if not held.startswith("thread "):
        return False
    try:
        return Path(f"/proc/self/task/{held.split()[1]}/comm").read_text() == "jemalloc_bg_thd\n"
    except OSError:  # it has ended
        return False


def descriptors() -> set[str]:
    found = set()
    for number in os.listdir("/proc/self/fd"):
        try:
            found.add(f"descriptor {number} ({os.readlink(f'/proc/self/fd/{number}')})")
        except OSError:  # the descriptor of the listing itself
            continue
    return found


def mappings() -> set[str]:
    maps = Path("/proc/self/maps").read_bytes()
    if b"memfd:" not in maps:  # as before and after most tests: hundreds of lines are not looked at
        return set()
    lines = os.fsdecode(maps).splitlines()
    return {f"mapping {line.split()[0]} ({line.split()[-1]})" for line in lines if "memfd:" in line}


def children() -> set[str]:
    return our_children() | {f"process {child}" for pid in OurTemplate.pids for child in children_of(pid)}


def our_children() -> set[str]:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # no child at all: the usual case, told by one system call
        return set()
    if not os.path.exists(f"/proc/self/task/{os.getpid()}/children"):  # a kernel that keeps no such lists
        return {f"process {child.pid}" for child in psutil.Process().children(recursive=True)}
    # A list may miss one while another ends, so it is read twice. Quicker than a look at all processes.
    return {f"process {child}" for _ in range(2) for child in children_of(os.getpid())}


def children_of(parent: int) -> Iterator[int]:
    """And theirs."""
    with contextlib.suppress(OSError):  # it has ended
        for task in os.listdir(f"/proc/{parent}/task"):
            for child in map(int, Path(f"/proc/{parent}/task/{task}/children").read_text().split()):
                yield child
                yield from children_of(child)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Where there is no torch, there may be nothing to run in the second half."""
    if session.config.getoption("--large") == "with" and exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
        session.exitstatus = pytest.ExitCode.OK


def pytest_unconfigure(config: pytest.Config) -> None:
    if shared := config.stash.get(SHARED, None):
        shared.close()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Says in the last lines what was skipped."""
    reasons = Counter(
        report.longrepr[2].removeprefix("Skipped: ") for report in terminalreporter.stats.get("skipped", ())
    )
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"skipped {count}: {reason}")
