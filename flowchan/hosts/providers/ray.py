"""Run agents on the nodes of a Ray cluster.

Ray selects nodes with free resources and starts one actor on each. The actor only runs an agent. Items are
sent over flowchan's links, not through Ray.

Ray is imported on first use. Ray must not restart the actors, because each new agent needs a new epoch.
"""

from __future__ import annotations

import importlib
import logging
import numbers
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flowchan.errors import HostError
from flowchan.hosts.providers.output import LAST, ProcessOutput
from flowchan.hosts.providers.provider import Launch
from flowchan.hosts.providers.shell import how_it_ended
from flowchan.items.arguments import text, whole
from flowchan.items.text import shown
from flowchan.transport.addresses import address_towards

WARN_AFTER_S = 10.0
"""Seconds until a warning lists the resources that agents wait for.

Longer waits are normal if the cluster has to grow or other jobs have to end.
"""

REMEDY = "install the same environment for Ray's workers"

BOUND = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL: it ends with the actor
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""


@dataclass(frozen=True, slots=True, repr=False)
class Ray:
    """Provider of one agent on each of ``count`` different Ray nodes that have these ``resources`` free."""

    count: int
    resources: tuple[tuple[str, float], ...] = ()
    address: str | None = None

    def __repr__(self) -> str:
        given = [str(self.count)]
        if self.resources:
            given.append(f"resources={dict(self.resources)}")
        if self.address is not None:
            given.append(f"address={self.address!r}")
        return f"ray({', '.join(given)})"

    @property
    def hosts(self) -> tuple[str, ...]:
        return tuple(f"ray-{number + 1}" for number in range(self.count))

    @property
    def bundle(self) -> dict[str, float]:
        """Resources that are reserved on each node."""
        return {"CPU": 1, **dict(self.resources)}

    @property
    def cores(self) -> tuple[int, ...]:
        """Number of cores that each agent reserves, at least one."""
        return (max(1, int(self.bundle["CPU"])),) * self.count

    def listen_at(self, hosts: Sequence[str] | None = None) -> str:
        if self.address is not None:
            return self.address
        nodes = [node["NodeManagerAddress"] for node in _connected().nodes() if node["Alive"]]
        return address_towards("ray", {node: node for node in nodes})

    def start(self, number: int, launch: Launch) -> HeldByRay:
        """Return immediately; Ray starts the agent when a node has the resources."""
        return HeldByRay(_connected(), self, number, launch)


@dataclass
class _Reservation:
    """Placement group for the agents of one run.

    The placement group is removed once no agent holds one of its bundles.
    """

    group: Any
    taken: set[int] = field(default_factory=set)
    warn_at: float = field(default_factory=lambda: time.monotonic() + WARN_AFTER_S)

    def warn_if_late(self, ray: Any, provider: Ray) -> None:
        """Log once the requested resources and the resources of the cluster.

        An infeasible request is not an error, because an autoscaler may enlarge the cluster. No public API of
        Ray reports whether a cluster has an autoscaler.
        """
        with _lock:
            if time.monotonic() < self.warn_at:
                return
            self.warn_at = float("inf")
        table = importlib.import_module("ray.util.placement_group").placement_group_table(self.group)
        nodes = [node for node in ray.nodes() if node["Alive"]]
        capacities = ", ".join(
            f"{node['NodeManagerAddress']} has {_amounts(node['Resources'])}" for node in nodes
        )
        infeasible = table.get("stats", {}).get("scheduling_state") == "INFEASIBLE"
        why = (
            "Ray considers this infeasible, and waits for the cluster to grow"
            if infeasible
            else "Ray waits until other jobs free their resources"
        )
        _log.warning(
            "%r is waiting for resources: it needs %s on each of %d different node(s), and the cluster "
            "has %d node(s) (%s); %s",
            *(provider, _amounts(provider.bundle), provider.count, len(nodes), capacities, why),
        )


_log = logging.getLogger("flowchan.hosts")
_reservations: dict[tuple[str, Ray], list[_Reservation]] = {}
"""Reservations, by the connection to Ray and the provider."""
_lock = threading.Lock()


class HeldByRay:
    """Agent that a Ray actor runs.

    Ray may report an actor as dead because its node is unreachable. The agent may then continue to run until
    its ``peer_timeout`` expires, but its messages are ignored.
    """

    def __init__(self, ray: Any, provider: Ray, number: int, launch: Launch) -> None:
        self._ray = ray
        self._host = provider.hosts[number]
        self._number = number
        self._why: str | None = None
        self._placed = False  # true once Ray has found a node
        self._key = (ray.get_runtime_context().get_job_id(), provider)
        self._reservation: _Reservation | None = self._reserve()
        rest = provider.bundle
        options = {"num_cpus": rest.pop("CPU"), "num_gpus": rest.pop("GPU", 0), "resources": rest}
        strategy = importlib.import_module("ray.util.scheduling_strategies").PlacementGroupSchedulingStrategy(
            placement_group=self._reservation.group, placement_group_bundle_index=number
        )
        actor = ray.remote(_holder()).options(
            max_restarts=0, max_task_retries=0, scheduling_strategy=strategy, **options
        )
        self._actor = actor.remote(self._host)
        self._held = self._actor.hold.remote(BOUND, launch.arguments, launch.stdin)

    def _reserve(self) -> _Reservation:
        provider = self._key[1]
        with _lock:
            ours = _reservations.setdefault(self._key, [])
            found = next((one for one in ours if self._number not in one.taken), None)
            if found is None:
                placement = importlib.import_module("ray.util.placement_group").placement_group
                bundles = [provider.bundle for _ in range(provider.count)]
                found = _Reservation(placement(bundles, strategy="STRICT_SPREAD"))
                ours.append(found)
            found.taken.add(self._number)
        return found

    def ended(self) -> str | None:
        if self._why is None and self._ray.is_initialized() and self._ray.wait([self._held], timeout=0)[0]:
            self._why = self._explain()
            if self._why is not None:
                self.kill()
        return self._why

    def waits(self) -> bool:
        reservation = self._reservation
        if self._placed or reservation is None or not self._ray.is_initialized():
            return False
        self._placed = bool(reservation.group.wait(0))
        if not self._placed:
            reservation.warn_if_late(self._ray, self._key[1])
        return not self._placed

    def _explain(self) -> str | None:
        errors = self._ray.exceptions
        try:
            result = self._ray.get(self._held)
        except errors.ActorUnavailableError:
            # Repeat the call. If the actor is still alive, the new call queues behind the earlier call.
            self._held = self._actor.result.remote()
            return None
        except errors.RayTaskError as error:
            return f"{self._host} could not start the agent: {error.cause}"
        except errors.RayError as error:
            return f"{self._host} is lost: {_gist(str(error))} (from Ray)"
        if result is None:
            return f"{self._host} is lost: the connection to Ray ended before the agent was started"
        python, code, lines = result
        return how_it_ended(
            self._host, python, 128 - code if code < 0 else code, ProcessOutput(tuple(lines)), REMEDY
        )

    def kill(self) -> None:
        """End the actor with its agent, and release its resources."""
        if self._ray.is_initialized():
            self._ray.kill(self._actor)
        self._release()

    def _release(self) -> None:
        with _lock:
            reservation, self._reservation = self._reservation, None
            if reservation is None:
                return
            reservation.taken.discard(self._number)
            if reservation.taken:
                return
            ours = _reservations[self._key]
            ours.remove(reservation)
            if not ours:
                del _reservations[self._key]
        if self._ray.is_initialized():
            importlib.import_module("ray.util.placement_group").remove_placement_group(reservation.group)

    def close(self) -> None:
        if self._why is None:
            self.kill()


def _amounts(resources: Mapping[str, float]) -> str:
    """Format resources, without Ray's internal ones.

    Ray's internal resources are bundles of placement groups, node names, and bytes of memory.
    """
    own = {
        name: amount
        for name, amount in resources.items()
        if ":" not in name and "_group_" not in name and name not in ("memory", "object_store_memory")
    }
    return ", ".join(f"{amount:g} {name}" for name, amount in sorted(own.items())) or "nothing"


def _gist(message: str) -> str:
    """Return only the lines of Ray's long error message that explain the cause."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    relevant = [line for line in lines if "because" in line or "node" in line.lower()]
    return " ".join(relevant or lines[:1])


def _holder() -> type:
    """Define and return the actor's class.

    A class defined in a function is pickled by value. The actor therefore starts even on a node without
    flowchan, and can report that flowchan is missing.
    """
    most = LAST

    class AgentActor:
        def __init__(self, host: str) -> None:
            self._host = host
            self._result: tuple[str, int, list[str]] | None = None

        def __repr__(self) -> str:  # Ray prefixes the actor's output with this text
            return self._host

        def hold(self, bound: str, arguments: tuple[str, ...], stdin: bytes) -> tuple[str, int, list[str]]:
            """Run the agent until it ends.

            The launch is an argument of this method, not of the actor's constructor, because Ray stores
            constructor arguments.
            """
            import collections
            import contextlib
            import os
            import subprocess
            import sys

            agent = subprocess.Popen(
                (sys.executable, "-I", "-S", "-c", bound, str(os.getpid()), *arguments),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
            assert agent.stdin is not None
            assert agent.stdout is not None
            with contextlib.suppress(BrokenPipeError):
                os.write(agent.stdin.fileno(), stdin)
            agent.stdin.close()
            last: collections.deque[str] = collections.deque(maxlen=most)
            for line in agent.stdout:
                last.append(line.decode(errors="replace").rstrip())
                print(last[-1], file=sys.stderr, flush=True)
            self._result = sys.executable, agent.wait(), list(last)
            return self._result

        def result(self) -> tuple[str, int, list[str]] | None:
            return self._result

    return AgentActor


def _connected() -> Any:
    """Return the ``ray`` module, connected to a cluster.

    The connection stays open, because it belongs to the program.
    """
    try:
        ray = importlib.import_module("ray")
    except ImportError as error:
        raise HostError(f"ray: Ray can't be imported here ({error}); pip install 'flowchan[ray]'") from error
    if not ray.is_initialized():
        try:
            ray.init(address="auto")
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise HostError(
                f"ray: no cluster can be reached from here ({str(error).splitlines()[0]}); use 'ray "
                "start --head', set RAY_ADDRESS, or call ray.init() first"
            ) from error
    return ray


def ray(count: int, *, resources: Mapping[str, float] | None = None, address: str | None = None) -> Ray:
    """Make a provider of one agent on each of ``count`` different nodes of a Ray cluster.

    Args:
        count: Number of agents to start, at least 1.
        resources: Resources that each agent reserves on its node, by their names in Ray (default: one
            ``"CPU"``).
        address: Address, without a port, at which the nodes can reach this machine (default: its
            address on the route to them).

    Returns:
        The provider.

    Raises:
        ValueError: ``count`` is less than 1.
    """
    whole("ray", "count", count, 1)
    for name, amount in (resources or {}).items():
        text("ray", "a resource", name)
        if isinstance(amount, bool) or not isinstance(amount, numbers.Real) or not amount >= 0:
            raise ValueError(f"ray: resources[{name!r}] must be a non-negative number, got {shown(amount)}")
    ordered = tuple(sorted((name, float(amount)) for name, amount in (resources or {}).items()))
    return Ray(count, ordered, None if address is None else text("ray", "address", address))
