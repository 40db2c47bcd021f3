"""Create hosts with limited network bandwidth, as network namespaces on this machine. Needs root."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from flowchan.hosts.providers.child import AgentProcess
from flowchan.hosts.providers.provider import Launch

HEAD = "10.76.0.1"
"""Address of the namespace in which the driver runs."""


@dataclass(frozen=True)
class Namespaces:
    """Provider that starts one agent in each network namespace of ``hosts``.

    The program listens on ``address``.
    """

    hosts: tuple[str, ...]
    address: str = HEAD
    cores: None = None

    def listen_at(self, hosts: Sequence[str] | None = None) -> str:
        return self.address

    def start(self, number: int, launch: Launch) -> AgentProcess:
        host = self.hosts[number]
        command = ("ip", "netns", "exec", host, sys.executable, *launch.arguments)
        return AgentProcess(host, command, launch, lambda code, output: f"{host} ended with code {code}")


@contextmanager
def limited_hosts(count: int, rate: str) -> Iterator[tuple[str, ...]]:
    """Create one namespace for the driver, and ``count`` others. A bridge connects all of them.

    Args:
        count: Number of hosts, without the driver's.
        rate: Bandwidth limit of each connection in each direction, in the notation of ``tc``, such as
            ``200mbit``.

    Yields:
        The names of the namespaces. The first namespace is the driver's.
    """
    names = tuple(f"flowchan-bench-{os.getpid()}-{number}" for number in range(count + 1))
    try:
        for name in names:
            _ip(f"netns add {name}")
            _ip(f"-n {name} link set lo up")
        head = names[0]
        _ip(f"-n {head} link add bridge type bridge")
        _ip(f"-n {head} link set bridge up")
        for number, name in enumerate(names):
            ours = "wire" if number else "own"
            _ip(f"link add {ours} netns {name} type veth peer name cable{number} netns {head}")
            _ip(f"-n {head} link set cable{number} master bridge up")
            _ip(f"-n {name} addr add 10.76.0.{number + 1}/24 dev {ours}")
            _ip(f"-n {name} link set {ours} up")
            for space, device in ((name, ours), (head, f"cable{number}")):
                shaping = f"qdisc add dev {device} root tbf rate {rate} burst 128kb latency 200ms"
                subprocess.run(("ip", "netns", "exec", space, "tc", *shaping.split()), check=True)
        yield names
    finally:
        for name in names:
            subprocess.run(("ip", "netns", "del", name), stderr=subprocess.DEVNULL)


def _ip(command: str) -> None:
    subprocess.run(("ip", *command.split()), check=True)
