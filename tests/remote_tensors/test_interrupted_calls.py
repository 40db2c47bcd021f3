"""Test remote tensors with interrupts, forks and threads: replies reach the right call, and no command is
lost."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from failing_operations import Latch
from support.optional_packages import optional
from support.scripted_interrupt import Interrupt
from support.waiting import wait_blocked, wait_until

from flowchan import Full
from flowchan.pipelines import RemoteError, RemoteNodes
from flowchan.pipelines.remote_tensors import flusher
from flowchan.transport import interrupts

torch = optional("torch")

pytestmark = pytest.mark.usefixtures("one_compute_thread")


class Alarm(Exception):
    """Exception that the test's signal handler raises."""


@pytest.fixture
def nodes() -> Iterator[Any]:
    with RemoteNodes(2) as nodes:
        yield nodes


@pytest.fixture
def latch(tmp_path: Path) -> Iterator[Latch]:
    latch = Latch(tmp_path / "latch")
    yield latch
    latch.release()


@pytest.fixture
def alarms() -> Iterator[None]:
    def ring(*_: object) -> None:
        raise Alarm

    before = signal.signal(signal.SIGALRM, ring)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def waits(nodes: Any) -> int:
    """Return how often this process has waited for the nodes."""
    return sum(client.waits for client in nodes._clients)


# --- signals ---


@pytest.mark.parametrize("call", ["operation", "item", "sync", "copy"])
def test_interrupt_at_each_point_leaves_no_lock_held(
    nodes: Any, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """A lock that stays locked would block the background thread, another thread, or ``close()``."""
    monkeypatch.setattr(flusher, "QUIET_ROUNDS", 1)
    files = (threading.__file__, str(Path(flusher.__file__).parent), interrupts.__file__)
    x, client = torch.ones(3, device=nodes[0]), nodes._clients[0]
    found: list[float] = []
    calls = {
        "operation": lambda: x + 1,
        "item": lambda: x.sum().item(),
        "sync": nodes.sync,
        "copy": lambda: x.to(nodes[1]),
    }
    calls[call]()
    for number in itertools.count(1):
        wait_until(lambda: client.idle)  # the call then wakes the background thread
        interrupt = Interrupt(number, files)
        interrupt.during(calls[call])
        in_threads(lambda _: found.append((x + 1).sum().item()), 1)
        if not interrupt.where:
            break
    assert number > 3
    assert found == [6] * number


@pytest.mark.parametrize("native", [True, False], ids=["native", "python"])
def test_every_interrupt_of_issuing_operations_raises(nodes: Any, native: bool) -> None:
    """Python ignores exceptions that signal handlers raise in a finaliser, so there must be no finaliser."""
    x = torch.ones(2, 3, device=nodes[0])
    x.max(0)  # an exception in the imports of torch's first meta kernel would become a RuntimeError
    rang = raised = 0

    def ring(*_: object) -> None:
        nonlocal rang
        rang += 1
        raise Alarm

    before = signal.signal(signal.SIGALRM, ring)
    times = random.Random(1)
    try:
        while rang < 200:
            expected = rang
            try:
                signal.setitimer(signal.ITIMER_REAL, times.uniform(0.0005, 0.003))
                while rang == expected:
                    x + 1 if native else x.max(0)  # Python code issues an operation with two results
            except Alarm:
                raised += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert raised == rang
    assert (x + 1).tolist() == [[2.0] * 3] * 2


@pytest.mark.parametrize(("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGALRM, Alarm)])
@pytest.mark.parametrize("call", ["item", "sync", "copy", "full channel"])
@pytest.mark.usefixtures("alarms")
def test_interrupted_wait_leaves_program_and_node_usable(
    nodes: Any, latch: Latch, call: str, number: int, error: type[BaseException]
) -> None:
    x = torch.full((3,), 5.0, device=nodes[0])
    y = latch.occupy(x)
    counter = torch.zeros((), device=nodes[0])
    issued = 0
    before = waits(nodes)

    def interrupt() -> None:
        latch.wait()
        if call == "full channel":
            wait_blocked(x._m.client._commands, writers=1)
        else:
            wait_until(lambda: waits(nodes) > before)
        os.kill(os.getpid(), number)

    def issue() -> None:
        nonlocal counter, issued
        while True:
            counter = counter + 1
            issued += 1

    calls = {
        "item": lambda: (y.sum() + 1).item(),
        "sync": nodes.sync,
        "copy": lambda: y.to(nodes[1]).cpu(),
        "full channel": issue,
    }
    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(error):
        calls[call]()
    thread.join()
    latch.release()
    # late replies to the interrupted calls must not answer these calls
    assert (x * 2).sum().item() == 30
    assert y.tolist() == [5, 5, 5]
    assert (torch.ones(2, device=nodes[1]) + 1).tolist() == [2, 2]
    assert counter.item() == issued
    nodes.sync()


@pytest.mark.usefixtures("alarms")
# a signal handler raises in a finaliser
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_alarms_at_random_times_do_not_mix_up_values(nodes: Any, long_walk: bool) -> None:
    """Each operation is issued, or it raises. Each fetched value belongs to its operation."""
    chance = random.Random(1)
    here, there = nodes
    total = torch.zeros((), device=here)
    rang = 0
    for number in range(20_000 if long_walk else 600):
        try:
            signal.setitimer(signal.ITIMER_REAL, chance.uniform(1e-5, 1.5e-3))
            x = torch.full((2,), float(number), device=here)
            found = [(x + 1)[0].item(), x.to(there).sum().item(), (x * 2).tolist()]
            signal.setitimer(signal.ITIMER_REAL, 0)
        except Alarm:
            rang += 1
            continue
        assert found == [number + 1, 2 * number, [2 * number] * 2]
    signal.setitimer(signal.ITIMER_REAL, 0)
    assert rang > 10
    assert total.item() == 0
    nodes.sync()


@pytest.mark.usefixtures("alarms")
# a signal handler raises in a finaliser
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_alarms_while_issuing_neither_lose_nor_repeat_commands(nodes: Any, long_walk: bool) -> None:
    """A command whose call was interrupted runs at most once. All others run once and in order."""
    chance = random.Random(2)
    total = torch.zeros((), dtype=torch.int64, device=nodes[0])
    sure = unsure = 0
    for _ in range(400 if long_walk else 40):
        begun = False
        try:
            signal.setitimer(signal.ITIMER_REAL, chance.uniform(1e-5, 5e-3))
            while True:
                begun = True
                total.add_(1)
                sure += 1
                begun = False
        except Alarm:
            unsure += begun
    signal.setitimer(signal.ITIMER_REAL, 0)
    # if the signal arrives between the return of add_ and the count, the finished command counts in `unsure`
    assert sure <= total.item() <= sure + unsure
    nodes.sync()


def test_interrupt_during_close_still_ends_the_nodes(latch: Latch) -> None:
    import psutil

    nodes = RemoteNodes(1)
    latch.occupy(torch.ones(1, device=nodes[0]))
    nodes_pid = []

    def interrupt() -> None:
        nodes_pid.append(latch.wait())
        wait_until(lambda: waits(nodes) > 0)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        nodes.close()
    thread.join()
    nodes.close()
    assert not psutil.pid_exists(nodes_pid[0])


# --- timeout ---


def test_sync_with_timeout_raises_and_later_succeeds(nodes: Any, latch: Latch) -> None:
    y = latch.occupy(torch.ones(3, device=nodes[1]))
    with pytest.raises(TimeoutError, match="sync"):
        nodes.sync(timeout=0.05)
    latch.wait()
    latch.release()
    nodes.sync(timeout=60)
    assert y.tolist() == [1, 1, 1]


def issue_until_blocked(x: Any) -> threading.Thread:
    """Issue commands in a thread until the command channel of an occupied node is full."""

    def issue() -> None:
        for _ in range(40_000):
            x.add_(1)

    thread = threading.Thread(target=issue)
    thread.start()
    wait_blocked(x._m.client._commands, writers=1)
    return thread


def test_timeout_of_sync_limits_a_wait_for_a_full_channel(nodes: Any, latch: Latch) -> None:
    x = torch.zeros((), dtype=torch.int64, device=nodes[0])
    latch.occupy(x)
    latch.wait()
    thread = issue_until_blocked(x)
    for _ in range(2):
        with pytest.raises(TimeoutError, match="sync: node 0 did not answer in time"):
            nodes.sync(timeout=0.05)
    assert thread.is_alive()
    latch.release()
    thread.join()
    nodes.sync(timeout=60)
    assert x.item() == 40_000


def test_timeout_of_sync_limits_its_own_message(nodes: Any, latch: Latch) -> None:
    x = torch.zeros((), dtype=torch.int64, device=nodes[0])
    x.add_(1)  # the node then knows the command
    latch.occupy(x)
    latch.wait()
    with contextlib.suppress(Full):
        while True:
            x._m.client._commands.put(("unknown client", "drop"), timeout=0)
    x.add_(1)  # stays in the buffer
    with pytest.raises(TimeoutError, match="sync: node 0 did not answer in time"):
        nodes.sync(timeout=0.05)
    latch.release()
    nodes.sync(timeout=60)
    assert x.item() == 2


def test_timeout_of_sync_limits_a_wait_for_another_thread(nodes: Any, latch: Latch) -> None:
    y = latch.occupy(torch.ones(3, device=nodes[0]))
    before, found = waits(nodes), []
    thread = threading.Thread(target=lambda: found.append(y.tolist()))
    thread.start()
    wait_until(lambda: waits(nodes) > before)
    with pytest.raises(TimeoutError, match="sync: node 0 did not answer in time"):
        nodes.sync(timeout=0.05)
    latch.release()
    thread.join()
    assert found == [[1, 1, 1]]
    nodes.sync(timeout=60)


@pytest.mark.parametrize("timeout", [-1, "soon", float("nan")])
def test_sync_refuses_a_wrong_timeout(nodes: Any, timeout: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="timeout must be"):
        nodes.sync(timeout=timeout)


# --- forks ---


def in_fork(function: Any) -> str:
    """Return the type and message of the exception that ``function`` raises in a forked child."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        text = "nothing"
        try:
            function()
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(writing, text.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return text


@pytest.mark.parametrize("use", ["operation", "fetch", "factory", "sync", "upload", "print"])
def test_fork_of_the_program_refuses_the_tensors_of_its_parent(nodes: Any, use: str) -> None:
    x = torch.ones(3, device=nodes[0])
    x + 1  # a command that has not been sent yet
    uses = {
        "operation": lambda: (x + 1).cpu(),
        "fetch": lambda: x.cpu(),
        "factory": lambda: torch.ones(3, device=nodes[0]).cpu(),
        "sync": lambda: nodes.sync(),
        "upload": lambda: torch.ones(3).to(nodes[0]),
        "print": lambda: str(x),
    }
    text = in_fork(uses[use])
    assert text.startswith("RuntimeError: ")
    assert "fork" in text
    assert x.tolist() == [1, 1, 1]


def test_exit_of_a_fork_leaves_nodes_running(nodes: Any) -> None:
    x = torch.ones(3, device=nodes[0])

    def drop_and_close() -> None:
        nonlocal x
        del x
        nodes.close()

    assert in_fork(drop_and_close) == "nothing"
    assert (x + 1).tolist() == [2, 2, 2]
    nodes.sync()


# --- threads ---


def in_threads(function: Any, count: int) -> None:
    """Run ``function(number)`` in several threads at the same time, and raise their exceptions."""
    errors: list[BaseException] = []
    barrier = threading.Barrier(count)

    def run(number: int) -> None:
        try:
            barrier.wait()
            function(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


@pytest.mark.parametrize("shared", [True, False])
def test_threads_use_one_node_or_two_at_the_same_time(nodes: Any, shared: bool) -> None:
    def work(number: int) -> None:
        node = nodes[0] if shared else nodes[number % 2]
        total = torch.zeros(2, device=node)
        for step in range(150):
            total = total + float(number)
            if step % 10 == 0:
                assert total[0].item() == number * (step + 1)
            if step % 25 == 0:
                assert total.to(nodes[1]).sum().item() == 2 * number * (step + 1)
        assert total.tolist() == [number * 150] * 2

    in_threads(work, 4)
    nodes.sync()


def test_failure_of_one_thread_is_not_raised_in_another(nodes: Any) -> None:
    def work(number: int) -> None:
        x = torch.full((2,), float(number), device=nodes[0])
        for _ in range(50):
            if number == 0:
                with pytest.raises(RemoteError, match="a bad value"):
                    torch.ops.failing.fail(x, "value").cpu()
            else:
                assert (x + 1)[0].item() == number + 1

    in_threads(work, 3)
    with contextlib.suppress(RemoteError):
        nodes.sync()


def test_threads_that_add_in_place_do_not_lose_commands(nodes: Any) -> None:
    total = torch.zeros((), dtype=torch.int64, device=nodes[0])

    def work(number: int) -> None:
        for _ in range(500):
            total.add_(1)

    in_threads(work, 4)
    assert total.item() == 2000
