"""Complaints from users of other systems for several machines, and the tests that answer them.

Each complaint names its tests as ``file::name``, and these tests must exist. The tests at the end of this
file cover the remaining complaints.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import psutil
import pytest
from hosted import agents, workers_of
from support.listed_tests import is_listed_test
from support.network_proxy import Wire, wired

from flowchan import Graph, Out, Run, pipelines, worker
from flowchan.hosts import local
from flowchan.hosts.host_pool import pool_of
from flowchan.hosts.providers.local import Local
from flowchan.hosts.providers.provider import Launch

COMPLAINTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "gloo#223, sglang#3226": (
        "the hostname resolves to 127.0.1.1, or there are two interfaces, and the wrong address is taken",
        (
            "transport/test_tcp.py::test_address_comes_from_the_route_not_the_hostname",
            "hosts/test_ssh_values.py::test_driver_listens_on_an_address_that_all_hosts_can_reach",
        ),
    ),
    "ray#22732, ray#33554": (
        "a given address is not honoured by every socket",
        (
            "transport/test_tcp.py::test_listener_uses_exactly_the_given_address",
            "hosts/test_ssh_values.py::test_given_address_is_used",
        ),
    ),
    "pytorch#173909": (
        "asked for loopback, it listens everywhere",
        ("transport/test_tcp.py::test_listener_on_loopback_uses_no_other_address",),
    ),
    "vllm#17197, LightLLM#1413": (
        "a port unpickles what anybody sends",
        (
            "transport/test_authentication.py::test_a_booby_trapped_pickle_is_never_loaded",
            "transport/test_listener.py::test_listener_survives_thousands_of_hostile_connections",
        ),
    ),
    "libzmq#2037": (
        "a slow reader loses items, or fills the memory",
        ("hosts/test_reported_host_problems.py::test_slow_reader_gets_all_items_with_bounded_memory",),
    ),
    "grpc#32435, grpc-go#7542": (
        "a silent cut is noticed after a quarter of an hour",
        (
            "hosts_real/test_network_partition.py::test_graph_continues_when_one_of_three_network_cables_is_cut",
            "hosts/test_host_deaths.py::test_silent_agent_is_fenced_and_replaced",
        ),
    ),
    "dask#3204": (
        "a worker that holds the GIL is taken for dead",
        ("hosts/test_reported_host_problems.py::test_process_that_holds_the_gil_is_not_fenced",),
    ),
    "dask#6391": (
        "reconnections lose or repeat work",
        (
            "hosts/test_host_breaks.py::test_items_arrive_once_and_in_order_despite_broken_connections",
            "hosts/test_host_chaos.py::test_outputs_arrive_once_despite_breaks_and_deaths",
        ),
    ),
    "nats-server#4716, #4112": (
        "a killed reader's items come again late; lost acknowledgements stall the others",
        (
            "hosts/test_host_deaths.py::test_killed_agent_is_replaced_with_its_workers",
            "link/test_broken_connections.py::test_outputs_arrive_once_if_the_connection_breaks_mid_item",
        ),
    ),
    "akka-core#24576, sparkrun#240": (
        "a large message on a slow wire ends the connection; a killed launcher leaves processes",
        (
            "hosts/test_reported_host_problems.py::test_large_item_on_a_slow_connection_does_not_fence_hosts",
            "hosts/test_host_ends.py::test_agents_end_when_the_driver_is_killed",
        ),
    ),
    "distributed#8393": (
        "startup parses an address from the log output, so it hangs if the log level is changed",
        ("hosts/test_reported_host_problems.py::test_agent_starts_despite_printed_output",),
    ),
    "distributed#3420": (
        "close() leaves processes on the hosts",
        (
            "hosts/test_host_ends.py::test_exception_in_the_with_block_ends_all_processes",
            "hosts_real/test_pools.py::test_agent_over_ssh_ends_when_its_program_is_killed",
        ),
    ),
    "distributed#5439, #5597": (
        "the hosts use another environment, and start the wrong number of workers",
        (
            "hosts/test_host_ends.py::test_version_mismatch_is_reported_on_one_line",
            "hosts_real/test_dealing_over_ssh.py::test_workers_over_ssh_run_on_the_hosts_that_were_dealt",
        ),
    ),
    "ipyparallel#211": (
        "killing ssh leaves processes on the host",
        ("hosts_real/test_dealing_over_ssh.py::test_agent_exits_after_its_ssh_and_program_are_killed",),
    ),
    "ipyparallel#62": (
        "the start hangs if ssh fails",
        (
            "hosts_real/test_ssh.py::test_unreachable_host_is_reported_on_one_line",
            "hosts_real/test_dealing_over_ssh.py::test_dealt_names_a_host_that_ssh_cannot_reach",
        ),
    ),
    "ipyparallel#1029": (
        "each worker has two processes",
        ("hosts/test_reported_host_problems.py::test_each_worker_is_one_process_of_its_host_agent",),
    ),
    "mpi4py#18, #15, #172": (
        "starting processes is disabled on a cluster, or uses the first node only",
        (
            "hosts_real/test_slurm.py::test_each_allocated_node_runs_its_agent_and_reports_its_end",
            "hosts_real/test_dealing_over_slurm.py::test_workers_are_dealt_to_all_allocated_nodes",
        ),
    ),
    "mpi4py#223, #226": (
        "the program hangs when it exits",
        (
            "hosts_real/test_slurm.py::test_close_ends_all_job_steps",
            "hosts/test_host_ends.py::test_abort_ends_workers_that_would_run_forever",
        ),
    ),
    "execnet#96": (
        "the user's code does not run in the main thread",
        ("hosts/test_reported_host_problems.py::test_code_on_a_host_runs_in_the_main_thread",),
    ),
}


pytestmark = pytest.mark.usefixtures("no_agent_stays")


@pytest.mark.parametrize("source", COMPLAINTS)
def test_each_host_complaint_lists_existing_tests(source: str) -> None:
    for name in COMPLAINTS[source][1]:
        assert is_listed_test(name), name


def incarnations_of(run: Run) -> list[tuple[int, int, tuple[str, ...]]]:
    """Return, for each host, its number of agents, its number of broken connections, and its deaths."""
    return [(host.agents, host.breaks, host.deaths) for host in run.stats().hosts]


SIZE, ITEMS = 64 << 10, 8000


def blocks() -> Iterator[bytes]:
    for number in range(ITEMS):
        yield number.to_bytes(4, "little") * (SIZE // 4)


def test_slow_reader_gets_all_items_with_bounded_memory() -> None:
    """Capacity and ``max_bytes`` limit the items in transit.

    The agent and its worker together grow by less than half of the size of all items.
    """
    graph = Graph("slow")
    result = graph.source(blocks, on=local(1)).collect()
    before, most, numbers = memory_of(psutil.Process()), 0, []
    with graph.start() as run:
        for block in run.iter(result):
            numbers.append(int.from_bytes(block[:4], "little"))
            assert len(block) == SIZE
            del block
            if len(numbers) % 100 == 1:  # measuring takes longer than processing these items
                processes = [agent, *workers_of(agent)] if (agent := next(iter(agents()), None)) else []
                most = max(most, sum(map(memory_of, (psutil.Process(), *processes))))
    assert numbers == list(range(ITEMS))
    assert most - before < SIZE * ITEMS // 2, f"{most - before:,} bytes"


def memory_of(process: psutil.Process) -> int:
    """Return the memory of a process in bytes, including its share of shared pages."""
    with contextlib.suppress(psutil.NoSuchProcess, FileNotFoundError):
        return int(process.memory_full_info().pss)
    return 0  # the process has ended


def hold_the_gil(seconds: float) -> None:
    """Call a library function that holds the GIL."""
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))


@pytest.mark.parametrize("role", ["worker", "program"])
def test_process_that_holds_the_gil_is_not_fenced(role: str) -> None:
    """The process holds the GIL for three times the ``peer_timeout``."""

    def work(number: int) -> int:
        if number == 5 and role == "worker":
            hold_the_gil(3)
        return number

    def take(number: int) -> None:
        if number == 5 and role == "program":
            hold_the_gil(3)
        found.append(number)

    found: list[int] = []
    graph = Graph("held")
    graph.source(range(10)).map(work, on=local(1, peer_timeout=1)).sink(take)
    with graph.start() as run:
        run.wait()
    assert found == list(range(10))
    assert incarnations_of(run) == [(1, 0, ())]


@pytest.mark.parametrize("function", [len, bytes], ids=["there", "there and back"])
def test_large_item_on_a_slow_connection_does_not_fence_hosts(function: Callable[[Any], Any]) -> None:
    """The item is in transit for several times the ``peer_timeout``."""
    item = bytes(48 << 20)
    with wired(1, Wire(rate=16 << 20), peer_timeout=1) as pool:
        graph = Graph("large")
        result = graph.source([item, item[:7]]).map(function, on=pool).collect()
        with graph.start() as run:
            found = run.wait()[result]
    assert found == [function(item), function(item[:7])]
    assert incarnations_of(run) == [(1, 0, ())]


LOUD = 'print("tcp://0.0.0.0:1 INFO listening\\n" * 1000, flush=True)'
MUTE = "import os; os.dup2(os.open(os.devnull, os.O_WRONLY), 1); os.dup2(1, 2)"


@dataclass(frozen=True)
class Printing(Local):
    """A provider that runs some code in each agent process before the agent starts."""

    code: str = ""

    def start(self, number: int, launch: Launch) -> Any:
        program = f"{self.code}\nfrom flowchan.hosts import agent\nagent.main()"
        return super().start(number, Launch(("-c", program), launch.stdin))


@pytest.mark.parametrize("code", [LOUD, MUTE], ids=["loud", "mute"])
def test_agent_starts_despite_printed_output(code: str) -> None:
    """The agent connects to the program, so its output need not contain an address."""
    graph = Graph("printing")
    result = graph.source(range(9)).map(abs, on=pool_of("test", Printing(1, code)), workers=2).collect()
    assert graph.run()[result] == list(range(9))


def test_each_worker_is_one_process_of_its_host_agent() -> None:
    def identify(barrier: Any, number: int) -> tuple[str, int, int]:
        barrier.wait()  # all calls overlap, so no worker can run two of them
        return worker().host, os.getppid(), os.getpid()

    pool = local(2)
    found = pipelines.map(6, identify, pipelines.Barrier(6, across="hosts"), on=pool).join()
    assert sorted(host for host, _ in {(host, agent) for host, agent, _ in found}) == list(pool.hosts)
    assert len({pid for _, _, pid in found}) == 6


def test_code_on_a_host_runs_in_the_main_thread() -> None:
    def is_main(_: int) -> bool:
        return threading.current_thread() is threading.main_thread()

    def send_is_main(out: Out[bool]) -> None:
        out.put(is_main(0))

    graph = Graph("main")
    mapped = graph.source([1]).map(is_main, on=local(1)).collect()
    sent = graph.stage(send_is_main, on=local(1)).collect()
    results = graph.run()
    assert (results[mapped], results[sent]) == ([True], [True])
