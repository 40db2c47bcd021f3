"""Drivers that run on a node of a Ray cluster, each as a program: ``python ray_walks.py NAME FILE``.

They write their results to FILE, because Ray writes to both output streams of a driver.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import psutil
from driver import SECRET, STAYING, Driver, end_of
from pool_walks import deaths, kill_node, not_on_the_head, run_over
from support.waiting import wait_until

import flowchan.hosts
from flowchan.errors import HostError
from flowchan.hosts.providers.provider import Launch
from flowchan.hosts.providers.ray import ray


def print_line(*words: object) -> None:
    with open(sys.argv[2], "a") as file:
        print(*words, file=file)


def spread() -> None:
    with Driver(ray(3)) as driver:
        print_line("listening at", driver.address)
        for number in range(3):
            driver.start(number)
        report = {one["number"]: one for one in (driver.receive() for _ in range(3))}
        print_line("agents on", *sorted(one["peer"] for one in report.values()))
        assert {one["secret"] for one in report.values()} == {SECRET}
        assert {one["rest"] for one in report.values()} == {""}
        for one in report.values():
            assert SECRET not in one["arguments"] + one["environment"]
        assert [driver.started[number].ended() for number in range(3)] == [None] * 3
        driver.order(0, "3")
        print_line(end_of(driver.started[0]))
        driver.order(1, "kill")
        print_line(end_of(driver.started[1]))
        driver.start(1)
        assert driver.receive()["peer"] == report[1]["peer"], "its place is still reserved"
    print_descriptors()


def killed() -> None:
    with Driver(ray(2)) as driver:
        for number in range(2):
            driver.start(number)
        agents = {one["number"]: psutil.Process(one["pid"]) for one in (driver.receive(), driver.receive())}
        driver.started[0].kill()
        assert driver.has_ended(0)
        print_line(end_of(driver.started[0]))
    wait_until(lambda: not any(one.is_running() for one in agents.values()))
    print_descriptors()


def node_killed() -> None:
    """Kill the node of one of two agents; that agent's replacement starts on the third node."""
    with Driver(ray(2)) as driver:
        for number in range(2):
            driver.start(number)
        report = {one["number"]: one for one in (driver.receive(), driver.receive())}
        lost = next(number for number, one in report.items() if one["peer"] != driver.address)
        address = report[lost]["peer"]
        raylet_of(address).kill()
        assert driver.has_ended(lost)
        why = end_of(driver.started[lost])
        assert re.fullmatch(rf"ray-{lost + 1} is lost: .*\bnode\b.* \(from Ray\)", why), why
        wait_until(lambda: not psutil.pid_exists(report[lost]["pid"]))
        driver.start(lost)
        again = driver.receive()
        assert again["number"] == lost
        assert again["peer"] not in (address, report[1 - lost]["peer"])
    print_line(address)


def graph() -> None:
    """Kill a node in the middle of a run; the third node takes over its work."""
    with tempfile.TemporaryDirectory() as folder:
        run = run_over(flowchan.hosts.ray(2), Path(folder), kill_node, not_on_the_head)
    print_line(*deaths(run))
    print_line(sorted(host.agents for host in run.stats().hosts))
    print_descriptors()


def raylet_of(address: str) -> psutil.Process:
    for process in psutil.process_iter():
        if process.name() == "raylet" and f"--node_ip_address={address}" in process.cmdline():
            return process
    raise AssertionError(address)


def no_flowchan() -> None:
    with Driver(ray(1, resources={"CPU": 2})) as driver:
        launch = Launch(("-I", "-S", "-m", "flowchan.hosts.agent"), b"{}\n")
        driver.started[0] = driver.provider.start(0, launch)
        print_line(end_of(driver.started[0]))


def killed_driver() -> None:
    driver = Driver(ray(2), STAYING)
    for number in range(2):
        driver.start(number)
    print_line(*(driver.receive()["pid"] for _ in range(2)))
    os.kill(os.getpid(), signal.SIGKILL)


def no_cluster() -> None:
    try:
        ray(2).listen_at()
    except HostError as error:
        print_line(error)


def print_descriptors() -> None:
    import ray as api
    from ray.util import placement_group_table

    states = {group["state"] for group in placement_group_table().values()}
    wait_until(lambda: api.available_resources().get("CPU") == api.cluster_resources()["CPU"])
    print_line("held:", *sorted(states - {"REMOVED"}))


if __name__ == "__main__":
    globals()[sys.argv[1]]()
