"""Run agents on machines that the system's ``ssh`` can reach.

The user's configuration applies: names, ports, keys, jump hosts and key agents work as in a terminal.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from flowchan.errors import HostError
from flowchan.hosts.providers.child import AgentProcess
from flowchan.hosts.providers.output import ProcessOutput
from flowchan.hosts.providers.provider import Launch
from flowchan.hosts.providers.shell import around, as_text, explainer
from flowchan.items.arguments import text, whole
from flowchan.transport.addresses import address_towards

OPTIONS = (
    "-T",
    "-oBatchMode=yes",  # makes ssh fail instead of asking for a password
    "-oConnectTimeout=15",
    "-oControlMaster=no",  # not shared, so that no other connection ends with this process
    "-oClearAllForwardings=yes",
    "-oRemoteCommand=none",
)
FAILED = 255
REMEDY = "set python= to a Python that has flowchan"


@dataclass(frozen=True, slots=True, repr=False)
class Ssh:
    """One agent on each of ``hosts``, as ``ssh`` accepts them: ``gpu1``, ``user@gpu2``.

    Killing an agent ends the local ``ssh`` process, but not the agent. The agent runs until it has heard
    nothing from the driver for ``peer_timeout`` seconds. The driver learns how an agent ended only while the
    ssh connection lasts.
    """

    hosts: tuple[str, ...]
    python: str = "python3"
    address: str | None = None
    cores: tuple[int, ...] | None = None

    def __repr__(self) -> str:
        given = [repr(host) for host in self.hosts]
        if self.cores is not None:
            given = [repr(dict(zip(self.hosts, self.cores, strict=True)))]
        if self.python != "python3":
            given.append(f"python={self.python!r}")
        if self.address is not None:
            given.append(f"address={self.address!r}")
        return f"ssh({', '.join(given)})"

    def listen_at(self, hosts: Sequence[str] | None = None) -> str:
        hosts = self.hosts if hosts is None else hosts
        return self.address or address_towards("ssh", {host: _machine(host) for host in hosts})

    def start(self, number: int, launch: Launch) -> AgentProcess:
        host = self.hosts[number]
        command = as_text(around(self.python, launch.arguments))
        explain = explainer(host, self.python, REMEDY, partial(_unreached, host))
        return AgentProcess(host, ("ssh", *OPTIONS, "--", host, f"exec {command}"), launch, explain)


def _machine(host: str) -> str:
    """Return a host's network name, according to the user's configuration."""
    try:
        done = subprocess.run(("ssh", "-G", "--", host), capture_output=True, text=True)
    except OSError as error:
        raise HostError(f"{host}: ssh can't be started here: {error.strerror}", host) from error
    for line in done.stdout.splitlines():
        word, _, value = line.partition(" ")
        if word == "hostname":
            return value
    raise HostError(f"{host}: ssh rejects this host: {done.stderr.strip()}", host)


def _unreached(host: str, code: int, output: ProcessOutput) -> str:
    """Explain why nothing ran on the host."""
    last = output.last()
    if code != FAILED:
        how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        return f"{host} could not start the agent: ssh {how} ({last})"
    if "Permission denied" in last:
        return (
            f"{host} does not accept a login without a password ({last}); make 'ssh "
            f"-oBatchMode=yes {host} true' work"
        )
    if "Host key verification failed" in last:
        return f"{host} has an unknown or changed host key ({last}); run 'ssh {host}' once to check it"
    return f"{host} can't be reached: {last.removeprefix('ssh: ')}"


def ssh(*hosts: str | Mapping[str, int], python: str = "python3", address: str | None = None) -> Ssh:
    """Make a provider of one agent on each host, started with the system's ``ssh`` without a password.

    Killing an agent only ends its connection: the agent itself ends when its peer timeout expires.

    Args:
        hosts: Hosts as ``ssh`` accepts them: ``"gpu1"``, ``"user@gpu2"``. A single mapping also sets the
            number of cores of each host. Otherwise, hosts report this number when it is needed.
        python: Python executable on the hosts, with flowchan installed: ``~/venv/bin/python``.
        address: Address, without a port, at which the hosts can reach this machine (default: its
            address on the route to them).

    Returns:
        The provider.

    Raises:
        TypeError: A host is not a string, or a host's core count is not an int.
        ValueError: No host is given, a name is invalid, or a host's core count is less than 1.
    """
    cores: tuple[int, ...] | None = None
    if len(hosts) == 1 and isinstance(hosts[0], Mapping):
        cores = tuple(whole("ssh", f"the cores of {host}", n, 1) for host, n in hosts[0].items())
        hosts = tuple(hosts[0])
    names = _checked(hosts)
    if address is not None:
        text("ssh", "address", address)
    return Ssh(names, text("ssh", "python", python), address, cores)


def _checked(hosts: Sequence[Any]) -> tuple[str, ...]:
    if not hosts:
        raise ValueError(
            'ssh: hosts must contain at least one host, got none; for example ssh("gpu1", "user@gpu2")'
        )
    for host in hosts:
        text("ssh", "a host", host)
        if host.startswith("-") or any(letter.isspace() for letter in host):
            raise ValueError(f"ssh: a host must be a name, an address or user@name, got {host!r}")
    if twice := next((host for host in hosts if hosts.count(host) > 1), None):
        raise ValueError(
            f"ssh: hosts must be different, got {twice!r} twice; pass each host once, because one "
            "agent can start any number of workers"
        )
    return tuple(hosts)
