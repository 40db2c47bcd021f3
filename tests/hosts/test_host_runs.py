"""Test that a graph gives the same results on several hosts as on one machine."""

from __future__ import annotations

import operator
import re
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hosted import host_of
from support.worker_latch import Gate

from flowchan import Channel, Failed, Graph, In, Out, RunError, StageError, worker
from flowchan.hosts import agent_starts, local
from flowchan.hosts.host_pool import pool_of
from flowchan.hosts.providers.local import Local
from flowchan.hosts.providers.provider import Launch
from flowchan.transport.listener import AuthenticatedListener
from tests.support.waiting import wait_until

pytestmark = pytest.mark.usefixtures("no_agent_stays")


@dataclass(frozen=True)
class Point:
    x: int


def results(graph: Graph, stream: Any) -> Any:
    return graph.run()[stream]


def test_map_keeps_order_and_spreads_workers_evenly_over_hosts() -> None:
    gate = Gate()

    def square(number: int) -> tuple[int, int, int]:
        if number < 4:
            gate.wait()
        return number * number, host_of(), worker().number

    graph = Graph("squares")
    squares = graph.source(range(1000)).map(square, on=local(2), workers=4).collect()
    run = graph.start()
    gate.wait_held(4)  # wait until each worker has one item
    gate.open()
    found = run.wait()[squares]
    assert [square for square, _, _ in found] == [number * number for number in range(1000)]
    hosts: dict[int, set[int]] = {}
    for _, host, number in found:
        hosts.setdefault(host, set()).add(number)
    assert sorted(map(sorted, hosts.values())) == [[1, 3], [2, 4]]


def test_stage_runs_on_the_named_host() -> None:
    pool = local(2)
    graph = Graph("named")
    first = graph.source(range(20)).map(host_of, on=pool["local-1"], workers=2)
    both = first.map(lambda host: (host, host_of()), on=pool["local-1"]).map(
        lambda hosts: (*hosts, host_of()), on=pool["local-2"]
    )
    found = set(results(graph, both.collect()))
    assert len(found) == 1
    ((one, same, other),) = found
    assert one == same != other


def test_items_and_results_may_use_classes_missing_on_hosts() -> None:
    graph = Graph("points")
    points = graph.source([Point(n) for n in range(10)], name="points")
    found = results(graph, points.map(lambda point: Point(-point.x), on=local(2), workers=2).collect())
    assert found == [Point(-n) for n in range(10)]


def test_users_module_is_sent_by_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_only.py").write_text(
        textwrap.dedent("""
            FACTOR = 3

            class Number:
                def __init__(self, value):
                    self.value = value

            def helper(number):
                return FACTOR * number

            def triple(number):
                return Number(helper(number.value))
        """)
    )
    monkeypatch.syspath_prepend(tmp_path)
    import own_only  # type: ignore[import-not-found]

    graph = Graph("mine")
    numbers = graph.source([own_only.Number(n) for n in range(5)])
    found = results(graph, numbers.map(own_only.triple, on=local(2), workers=2).collect())
    assert [number.value for number in found] == [0, 3, 6, 9, 12]
    assert all(type(number) is own_only.Number for number in found)
    del sys.modules["own_only"]


def test_error_names_the_module_that_a_host_lacks() -> None:
    def uses(item: int) -> int:
        import no_such_module_anywhere  # type: ignore[import-not-found]

        return int(no_such_module_anywhere.f(item))

    graph = Graph("missing")
    graph.source([1]).map(uses, on=local(1), name="uses").sink(abs)
    with pytest.raises(RunError) as caught:
        graph.run()
    (error,) = caught.value.exceptions
    assert "no_such_module_anywhere" in str(error)
    assert "local-1" in str(error)


def test_remote_error_contains_the_host_and_remote_traceback() -> None:
    def fail(item: int) -> int:
        if item == 3:
            raise ValueError("not this one")
        return item

    graph = Graph("failing")
    graph.source(range(10)).map(fail, on=local(2), workers=2, name="fail").sink(abs)
    with pytest.raises(RunError) as caught:
        graph.run()
    error = caught.value.exceptions[0]
    assert isinstance(error, StageError)
    assert (error.stage, error.item) == ("fail", "3")
    assert "on host 'local-" in str(error)
    assert isinstance(error.__cause__, ValueError)
    assert 'raise ValueError("not this one")' in "".join(error.__cause__.__notes__)


def test_failed_items_on_hosts_go_to_errors() -> None:
    def half(item: int) -> float:
        return 1 / (item % 2)

    graph = Graph("errors")
    halves = graph.source(range(10)).map(half, on=local(2), workers=2, retries=1, name="half")
    errors, good = halves.errors.collect(), halves.collect()
    found = graph.run()
    assert len(found[good]) == 5
    failed: list[Failed] = found[errors]
    assert sorted(one.item for one in failed) == [0, 2, 4, 6, 8]
    assert all(isinstance(one.error, ZeroDivisionError) and one.attempts == 2 for one in failed)
    assert all(
        re.match(r"in the worker half \d on host 'local-\d':", one.error.__notes__[-1]) for one in failed
    )


def test_operators_run_on_hosts() -> None:
    pool = local(2)

    def twice(numbers: In[int], out: Out[int], log: Out[str]) -> None:
        for number in numbers:
            out.put(number)
            out.put(number)
            log.put(f"{number}")

    graph = Graph("operators")
    numbers = graph.source(lambda: iter(range(20)), on=pool, name="numbers")
    even = numbers.filter(lambda n: n % 2 == 0, on=pool, workers=2)
    some = even.flat_map(lambda n: [n] * (n % 3), on=pool, workers=2)
    doubled, log = graph.stage(twice, some, on=pool, name="twice")
    low, high = doubled.partition(lambda n: int(n > 9), 2, on=pool)
    ends = low.collect(), high.collect(), log.collect()
    found = graph.run()
    expected = [n for n in range(20) if n % 2 == 0 for _ in range(n % 3)]
    assert found[ends[0]] == [n for n in expected for _ in "ab" if n <= 9]
    assert found[ends[1]] == [n for n in expected for _ in "ab" if n > 9]
    assert found[ends[2]] == [f"{n}" for n in expected]


def test_sink_runs_on_hosts(tmp_path: Path) -> None:
    def write(number: int) -> None:
        (tmp_path / f"{number}").touch()

    graph = Graph("sunk")
    graph.source(range(30)).sink(write, on=local(2), workers=3)
    graph.run()
    assert sorted(int(path.name) for path in tmp_path.iterdir()) == list(range(30))


@dataclass(frozen=True)
class Slow(Local):
    """A provider whose agents start only after a worker function has been packed."""

    folder: Path

    def listen_at(self) -> str:
        (self.folder / "starting").touch()
        return super().listen_at()

    def start(self, number: int, launch: Launch) -> Any:
        wait_until((self.folder / "packed").exists)
        return super().start(number, launch)


@dataclass(frozen=True)
class Packed:
    """A function that creates a file when it is packed, while the agents are starting."""

    folder: Path

    def __call__(self, item: int) -> int:
        return item.real

    def __reduce__(self) -> Any:
        if (self.folder / "starting").exists():
            (self.folder / "packed").touch()
        return operator.attrgetter, ("real",)


def test_worker_functions_are_packed_while_their_agents_start(tmp_path: Path) -> None:
    graph = Graph("packed")
    found = graph.source(range(3)).map(Packed(tmp_path), on=pool_of("slow", Slow(1, tmp_path))).collect()
    assert results(graph, found) == [0, 1, 2]


def test_pools_with_equal_providers_share_agents() -> None:
    graph = Graph("shared")
    numbers = graph.source(range(10)).map(host_of, on=local(1))
    found = results(graph, numbers.map(lambda host: (host, host_of()), on=local(1)).collect())
    assert all(one == other for one, other in found)


def test_report_names_the_hosts() -> None:
    graph = Graph("told")
    graph.source(range(10)).map(abs, on=local(2), workers=2, name="far").sink(abs)
    with graph.start() as run:
        run.wait()
    assert [host.name for host in run.stats().hosts] == ["local-1", "local-2"]
    report = run.report()
    assert "local(2)" in report
    assert "local-1" in report
    assert all(host.round_trip > 0 for host in run.stats().hosts)
    assert "received  round trip\n" in report


def test_item_that_the_driver_cannot_send_ends_the_run() -> None:
    graph = Graph("shared")
    items = graph.source([Channel(across="processes")], name="items")
    items.map(abs, on=local(1), name="far").sink(abs)
    with pytest.raises(RunError) as caught:
        graph.run()
    assert "channel 'items' can't be sent to host 'local-1'" in str(caught.value.exceptions[0])


def test_result_that_its_host_cannot_send_ends_the_run() -> None:
    graph = Graph("shared")
    made = graph.source([1]).map(lambda _: Channel(across="processes"), on=local(1), name="made")
    made.sink(abs)
    with pytest.raises(RunError) as caught:
        graph.run()
    assert "channel 'made' can't be sent from host 'local-1'" in str(caught.value.exceptions[0])


def test_greeting_lists_only_hosts_that_had_an_earlier_agent(monkeypatch: Any) -> None:
    """A greeting has room for about a hundred hosts."""
    hellos = []

    def open_listener(listener: Any, secret: bytes, hello: Any, tls: bool) -> AuthenticatedListener:
        hellos.append(hello)
        return AuthenticatedListener(listener, secret, hello, tls=tls)

    monkeypatch.setattr(agent_starts, "AuthenticatedListener", open_listener)
    graph = Graph("greeted")
    found = graph.source(range(4)).map(abs, on=local(2), workers=2).collect()
    assert results(graph, found) == [0, 1, 2, 3]
    assert [hello["epochs"] for hello in hellos] == [{}]
