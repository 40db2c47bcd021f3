"""Start the agents of a run, and the listener that they connect to."""

from __future__ import annotations

import os
import resource
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

from flowchan.errors import HostError
from flowchan.hosts.agent_handle import AgentCallbacks, AgentHandle
from flowchan.hosts.agent_threads import AgentThreads
from flowchan.hosts.capacity import report_cores
from flowchan.hosts.driver_listener import DriverListener
from flowchan.hosts.providers.provider import Provider
from flowchan.hosts.worker_ports import HostWorkers
from flowchan.run.worker import logs
from flowchan.transport.listener import AuthenticatedListener
from flowchan.transport.tcp import joined, listen
from flowchan.transport.versions import differs, versions

DESCRIPTORS_PER_AGENT = 6
"""Descriptors of this process per agent: four for two channels, one for the connection, and one for the
provider."""
SPARE_DESCRIPTORS = 32
"""Descriptors reserved for handshakes and other short uses."""


def must_have_descriptors(agents: int) -> None:
    """Check that this process may open enough file descriptors for this many agents.

    Args:
        agents: Number of agents.

    Raises:
        HostError: The limit is too low.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = len(os.listdir("/proc/self/fd")) + DESCRIPTORS_PER_AGENT * agents + SPARE_DESCRIPTORS
    if limit != resource.RLIM_INFINITY and limit < needed:
        raise HostError(
            f"hosts: the limit on descriptors must be at least {needed} for {agents} agents, got {limit}; "
            f"raise it (ulimit -n {needed})"
        )


class AgentStarts:
    """Starts the agents of one run on the hosts of a pool.

    Args:
        provider: Provider of the pool.
        peer_timeout: Seconds without a sign of life after which an agent counts as lost.
        tls: True if the connections are encrypted.
        name: Name of the run, for threads and agents.
    """

    def __init__(self, provider: Provider, peer_timeout: float, tls: bool, name: str) -> None:
        self._provider, self._peer_timeout, self._tls, self._name = provider, peer_timeout, tls, name
        self._epochs: dict[str, int] = {}  # epochs of agents, by host number as text; a missing epoch is 0
        self._hello = {**versions(), "epochs": self._epochs}
        self._secret = secrets.token_bytes(32)
        self._listener: DriverListener | None = None
        self._threads: AgentThreads | None = None
        self._hosts: Sequence[HostWorkers] = ()

    def listen(
        self, run_helper: Callable[[Callable[[], None]], None], hosts: Sequence[HostWorkers]
    ) -> DriverListener:
        """Start listening for agents.

        Args:
            run_helper: Runs the function of a helper thread.
            hosts: Hosts of the pool, by number.

        Returns:
            The listener.
        """
        self._hosts = hosts
        listener = AuthenticatedListener(
            listen(joined((self._provider.listen_at(), 0))), self._secret, self._hello, tls=self._tls
        )
        self._listener = DriverListener(listener, f"{self._name} listener", run_helper, self._let_in)
        self._threads = AgentThreads(self._name, run_helper)
        return self._listener

    def _let_in(self, sock: socket.socket, hello: dict[str, Any]) -> None:
        """Accept an agent's connection.

        This method takes no lock, so that nothing delays the listener's thread.
        """
        number, epoch = hello.get("number"), hello.get("epoch")
        agent = None
        if isinstance(number, int) and 0 <= number < len(self._hosts):
            agent = self._hosts[number].agent
        if agent is not None and agent.epoch != epoch:
            agent = None  # this is the hello of an earlier agent on the host
        if agent is not None and (why := differs(hello)):
            agent.end(why)
        elif agent is not None:
            report_cores(self._provider, agent.host, int(hello.get("cores", 1)))
            agent.meet(sock, float(hello.get("stuck", 0.0)), str(hello.get("outputs", "")))
            return
        sock.close()

    def start(self, host: HostWorkers, callbacks: AgentCallbacks) -> AgentHandle:
        """Start an agent on a host, and record it as the host's current agent."""
        assert self._listener is not None
        assert self._threads is not None
        agent = AgentHandle(
            self._provider, host.number, host.agents, self._peer_timeout, callbacks, self._threads
        )
        host.agent = agent
        # A hello has room for only a few epochs, so epochs that are 0 are left out.
        self._epochs |= {str(host.number): host.agents} if host.agents else {}
        host.agents += 1
        host.starts.append(time.monotonic())
        orders: dict[str, Any] = {
            "secret": self._secret.hex(),
            "address": self._listener.address,
            "graph": self._name,
            "tls": self._tls,
            "levels": logs.levels(),
        }
        agent.begin(self._name, orders)
        return agent

    def close(self) -> None:
        """End the threads that serve the agents, and stop listening."""
        if self._threads is not None:
            self._threads.close()
            self._threads = None
        if self._listener is not None:
            self._listener.close()
            self._listener = None
