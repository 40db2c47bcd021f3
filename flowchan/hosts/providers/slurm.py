"""Run agents on the nodes of this program's Slurm allocation."""

from __future__ import annotations

import functools
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from flowchan.errors import HostError
from flowchan.hosts.providers.child import AgentProcess
from flowchan.hosts.providers.output import ProcessOutput
from flowchan.hosts.providers.provider import Launch
from flowchan.hosts.providers.shell import around, explainer
from flowchan.items.arguments import text
from flowchan.run.crew.process_exit import signal_name
from flowchan.transport.addresses import address_towards

OPTIONS = (
    # Let the agent share resources with the allocation's other job steps, such as this program's own.
    "--overlap",
    "--nodes=1",
    "--ntasks=1",
    "--ntasks-per-node=1",
    "--kill-on-bad-exit=0",
)
REMEDY = "install the environment of this program at the same path on all nodes"
NODE = re.compile(r"NodeName=(\S+).*? NodeAddr=(\S+)")
GROUP_OF_NODES = re.compile(r"(\d+)(?:\(x(\d+)\))?")  # 8(x3): three nodes with 8 CPUs each
CPUS = rf"{GROUP_OF_NODES.pattern}(?:,{GROUP_OF_NODES.pattern})*"
CANCELLED = re.compile(r"\*\*\* (?:JOB|STEP) .* CANCELLED ")
OVER = re.compile(rf"{CANCELLED.pattern}|: task 0: ")
"""Matches a line in which the node reports to ``srun`` that the step or its only task has ended."""


@dataclass(frozen=True, slots=True, repr=False)
class Slurm:
    """One agent on each node of the current allocation.

    The value does not contain the allocation; each method looks up the allocation again. The nodes of a
    cluster share their files, so agents run this program's Python by its path. Killing an agent ends its job
    step.
    """

    address: str | None = None

    def __repr__(self) -> str:
        return "slurm()" if self.address is None else f"slurm(address={self.address!r})"

    @property
    def hosts(self) -> tuple[str, ...]:
        """Names of the nodes. Raises :class:`flowchan.HostError` outside an allocation."""
        nodes = os.environ.get("SLURM_JOB_NODELIST") or os.environ.get("SLURM_NODELIST")
        if not os.environ.get("SLURM_JOB_ID") or not nodes:
            raise HostError(
                "slurm: this program is not running in a Slurm allocation (SLURM_JOB_ID is not "
                "set); start it with 'sbatch' or within 'salloc'"
            )
        return _names(nodes)

    @property
    def cores(self) -> tuple[int, ...] | None:
        """Number of allocated CPUs on each node; ``None`` if Slurm does not list them."""
        listed = re.fullmatch(CPUS, os.environ.get("SLURM_JOB_CPUS_PER_NODE", ""))
        found = _cpus(listed[0]) if listed else ()
        return found if len(found) == len(self.hosts) else None

    def listen_at(self, hosts: Sequence[str] | None = None) -> str:
        if self.address is not None:
            return self.address
        hosts = self.hosts if hosts is None else hosts
        line = _scontrol("show", "node", "--oneliner", ",".join(hosts))
        found = dict(NODE.findall(line))
        return address_towards("slurm", {host: found.get(host, host) for host in hosts})

    def start(self, number: int, launch: Launch) -> AgentProcess:
        host = self.hosts[number]
        command = ("srun", *OPTIONS, f"--nodelist={host}", *around(sys.executable, launch.arguments))
        explain = explainer(
            host, sys.executable, REMEDY, partial(_unstarted, host), partial(_ended_by_slurm, host)
        )
        return AgentProcess(host, command, launch, explain, kill_by=signal.SIGTERM)


@functools.cache
def _names(nodes: str) -> tuple[str, ...]:
    return tuple(_scontrol("show", "hostnames", nodes).split())


def _cpus(listed: str) -> tuple[int, ...]:
    """Return the number of CPUs of each node, in Slurm's order: ``8(x2),16`` means 8, 8 and 16."""
    groups = GROUP_OF_NODES.findall(listed)
    return tuple(int(cpus) for cpus, nodes in groups for _ in range(int(nodes or 1)))


def _scontrol(*arguments: str) -> str:
    try:
        return subprocess.run(("scontrol", *arguments), capture_output=True, text=True, check=True).stdout
    except OSError as error:
        raise HostError(f"slurm: scontrol can't be started here: {error.strerror}") from error
    except subprocess.CalledProcessError as error:
        raise HostError(f"slurm: 'scontrol {' '.join(arguments)}' failed: {error.stderr.strip()}") from error


def _unstarted(host: str, code: int, output: ProcessOutput) -> str:
    how = f"was killed by {signal_name(-code)}" if code < 0 else f"ended with code {code}"
    return f"{host} could not start the agent: srun {how} ({output.last()})"


def _ended_by_slurm(host: str, output: ProcessOutput, has_ended: bool) -> str | None:
    """Return the message in which Slurm says that it ended the step, and so the agent; None if there is none.

    If the agent had already ended, the message that its task is over does not count, because the agent caused
    that message.
    """
    over = CANCELLED if has_ended else OVER
    line = next((line.strip(" *") for line in output.lines if over.search(line)), None)
    return line and f"Slurm ended the agent {host} ({line})"


def slurm(*, address: str | None = None) -> Slurm:
    """Make a provider of one agent on each node of this program's allocation.

    ``address`` is the address, without a port, at which the nodes can reach this machine. The default is the
    address that the kernel uses on its route to the nodes.
    """
    return Slurm(None if address is None else text("slurm", "address", address))
