"""A minimal driver and agent: the agent reads its launch line, dials, describes itself, and ends on
request."""

from __future__ import annotations

import json
import socket
from typing import Any

import psutil
from support.waiting import wait_until

from flowchan.hosts.providers.provider import Launch, Provider, StartedAgent

SECRET = "27e1b0ff-nobody-else-sees-this"

AGENT = """
import json, os, socket, sys
told = json.loads(sys.stdin.readline())
host, _, port = told["address"].rpartition(":")
with socket.create_connection((host, int(port)), 30) as sock:
    def read(name):
        with open(f"/proc/{name}", "rb") as file:
            return file.read().decode(errors="replace")
    me = {
        "number": told["number"], "secret": told["secret"], "pid": os.getpid(), "python": sys.executable,
        "arguments": read("self/cmdline") + read(f"{os.getppid()}/cmdline"),
        "environment": read("self/environ") + read(f"{os.getppid()}/environ"),
        "rest": sys.stdin.read(), "hostname": socket.gethostname(), "peer": sock.getsockname()[0],
    }
    print(f"agent {told['number']} is up", flush=True)
    sock.sendall(json.dumps(me).encode() + b"\\n")
    sock.settimeout(None)
    order = sock.makefile().readline().strip()  # and at the driver's end nothing
if order == "kill":
    os.kill(os.getpid(), 9)
print("a last word without an end of line", end="")
sys.exit(int(order or 0))
"""
STAYING = AGENT.replace("sock.makefile().readline().strip()", "__import__('signal').pause()")
"""Program of an agent that does not notice its driver's end."""
assert STAYING != AGENT


def end_of(one: StartedAgent) -> str:
    """Wait for an agent to end, and return the reason."""
    wait_until(lambda: one.ended() is not None)
    return one.ended() or ""


def assert_agents_run_and_report_their_ends(driver: Driver, python: str) -> dict[int, dict[str, Any]]:
    """Start agents on two hosts, let one exit, kill the other, and return their descriptions of
    themselves."""
    for number in (0, 1):
        driver.start(number)
    report = {one["number"]: one for one in (driver.receive(), driver.receive())}
    assert sorted(report) == [0, 1]
    assert {one["python"] for one in report.values()} == {python}
    assert {one["secret"] for one in report.values()} == {SECRET}
    assert {one["rest"] for one in report.values()} == {""}
    assert [driver.started[number].ended() for number in (0, 1)] == [None, None]
    first, second = driver.provider.hosts
    driver.order(0, "3")
    assert end_of(driver.started[0]) == f"the agent {first} exited with code 3 without finishing"
    driver.order(1, "kill")
    assert end_of(driver.started[1]) == f"the agent {second} was killed by SIGKILL"
    return report


def assert_the_secret_is_hidden(driver: Driver) -> None:
    """Check the command lines and environments of an agent and its parent, and all command lines on this
    machine."""
    driver.start(0)
    report = driver.receive()
    assert SECRET not in report["arguments"] + report["environment"]
    for process in psutil.process_iter():
        try:
            assert SECRET not in " ".join(process.cmdline())
        except psutil.Error:
            continue


class Driver:
    """Driver that listens at the provider's address, starts agents, and receives their descriptions."""

    def __init__(self, provider: Provider, agent: str = AGENT) -> None:
        self.provider = provider
        self._agent = agent
        self.address = provider.listen_at()
        self._listener = socket.create_server((self.address, 0))
        self._listener.settimeout(60)
        self.started: dict[int, StartedAgent] = {}
        self._lines: dict[int, socket.socket] = {}

    def launch(self, number: int) -> Launch:
        report = {
            "address": f"{self.address}:{self._listener.getsockname()[1]}",
            "number": number,
            "secret": SECRET,
        }
        return Launch(("-c", self._agent), json.dumps(report).encode() + b"\n")

    def start(self, number: int) -> StartedAgent:
        self.started[number] = self.provider.start(number, self.launch(number))
        return self.started[number]

    def receive(self) -> dict[str, Any]:
        """Wait for the next agent, and return its description of itself."""
        line, _ = self._listener.accept()
        line.settimeout(60)
        report = json.loads(line.makefile().readline())
        self._lines[report["number"]] = line
        return dict(report)

    def order(self, number: int, order: str) -> None:
        self._lines[number].sendall(f"{order}\n".encode())

    def has_ended(self, number: int) -> bool:
        """Wait until the agent has closed its connection, and return True; return False if it sends data."""
        try:
            return self._lines[number].recv(1) == b""
        except ConnectionResetError:
            return True

    def close(self) -> None:
        for line in self._lines.values():
            line.close()
        self._listener.close()
        for one in self.started.values():
            one.close()

    def __enter__(self) -> Driver:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
