"""Kill servers, clients, agents and connections at random, while clients push numbers that reveal any error.

Push k of a client adds 2**k at that client's place in two tensors, which are on different shards. After n
pushes, the place contains 2**n - 1; a lost or repeated push would change this number. Each push also adds 1
to every element of a third tensor, so these elements equal the version.
"""

from __future__ import annotations

import contextlib
import os
import random
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import psutil
from support.local_agents import agents_of
from support.network_proxy import Wire

from benchmarks.slow_connections import cut
from flowchan.pipelines import ParameterServer, SharedDict

PLACES = 4000
"""Maximum number of clients, including replacements of killed clients."""
MOST_PUSHES = 40
"""Number of pushes after which a client moves to a new place. A place then contains 2**40 - 1, which is
exact."""
MOST_AGENTS = 7
"""Maximum number of agents killed in one run. A run gives up on a host whose agents die too often."""
ELEMENTS = 5000
TIMEOUT_S = 60.0

Tensors = dict[str, Any]


def first_tensors() -> Tensors:
    """Return the tensors of the server before the first push."""
    return {"left": np.zeros(PLACES), "all": np.zeros(ELEMENTS), "right": np.zeros(PLACES)}


def check_version(tensors: Tensors, version: int) -> int:
    """Check that all tensors have version ``version``, and return the total number of pushes."""
    assert (tensors["left"] == tensors["right"]).all(), "the shards have different versions"
    assert (tensors["all"] == version).all(), (version, tensors["all"].min(), tensors["all"].max())
    used = tensors["left"][tensors["left"] > 0]
    pushes = np.log2(used + 1)
    assert (pushes == np.round(pushes)).all(), f"a push was lost or applied twice: {used}"
    assert pushes.sum() == version
    return int(version)


class Pusher:
    """Stage function that pushes once per call and checks every version it reads.

    Args:
        client: Client of the parameter server.
        places: Shared dictionary. Its entry ``used`` is the last assigned place.
    """

    def __init__(self, client: Any, places: SharedDict[str, int]) -> None:
        self.client, self.places = client, places
        self.place, self.pushes, self.pid = -1, MOST_PUSHES, 0

    def __call__(self, item: int) -> tuple[int, int]:
        """Push once, and return the client's place and the number of pushes to that place."""
        if self.pushes == MOST_PUSHES or self.pid != os.getpid():
            self.place, self.pushes, self.pid = self.places.increment("used"), 0, os.getpid()
        delta = np.zeros(PLACES)
        delta[self.place] = 2.0**self.pushes
        handle = self.client.push(
            {"left": delta, "all": np.ones(ELEMENTS), "right": delta}, timeout=TIMEOUT_S
        )
        version = handle.wait(TIMEOUT_S)
        self.pushes += 1
        tensors = self.client.pull(at_least=version, timeout=TIMEOUT_S)
        check_version(tensors, self.client.version)
        assert tensors["left"][self.place] == 2.0**self.pushes - 1
        return self.place, self.pushes


def check_end(server: ParameterServer, done: Sequence[tuple[int, int]]) -> int:
    """Check that the server applied every push in ``done`` exactly once. Return the number of all pushes."""
    client = server.client()
    tensors = client.pull(timeout=TIMEOUT_S)
    client.close()
    for place, pushes in done:
        assert tensors["left"][place] >= 2.0**pushes - 1, "a push was lost"
    return check_version(tensors, client.version)


class Killer(threading.Thread):
    """Thread that kills processes and connections at random, up to a given number.

    Args:
        seed: Seed of the random choices.
        kills: Number of kills after which the thread stops.
        deeds: Functions that kill, by name. Each returns whether it killed anything.
        pause: Maximum pause between two kills, in seconds.
    """

    def __init__(
        self, seed: int, kills: int, deeds: dict[str, Callable[[random.Random], bool]], pause: float
    ) -> None:
        super().__init__(name="killer", daemon=True)
        self.chance, self.kills, self.deeds, self.pause = random.Random(seed), kills, deeds, pause
        self.over = threading.Event()
        self.counts: Counter[str] = Counter()

    def is_active(self) -> bool:
        """Return whether the thread will kill again."""
        return self.counts.total() < self.kills and not self.over.is_set()

    def run(self) -> None:
        """Kill processes until ``kills`` of them were killed or ``over`` is set."""
        while self.is_active() and not self.over.wait(self.chance.uniform(0, self.pause)):
            name = self.chance.choice([*self.deeds])
            with contextlib.suppress(psutil.Error):  # the victim has already exited
                if self.deeds[name](self.chance):
                    self.counts[name] += 1


def workers_named(name: str) -> list[psutil.Process]:
    """Return the descendants of this process whose process name, such as ``push 1``, begins with ``name``."""
    found = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if child.name().startswith(name):
                found.append(child)
    return found


def killing(victims: Callable[[], list[psutil.Process]]) -> Callable[[random.Random], bool]:
    """Return a function that kills a random process of ``victims()``."""

    def kill(chance: random.Random) -> bool:
        found = victims()
        if found:
            chance.choice(found).kill()
        return bool(found)

    return kill


def agents() -> list[psutil.Process]:
    """Return the agents that have worker processes."""
    found = []
    for agent in agents_of(psutil.Process()):
        with contextlib.suppress(psutil.Error):
            if agent.children():
                found.append(agent)
    return found


def workers_on_hosts() -> list[psutil.Process]:
    """Return the worker processes of all agents."""
    found = []
    for agent in agents():
        with contextlib.suppress(psutil.Error):
            found += agent.children()
    return found


def cutting(_: random.Random) -> bool:
    """Cut all connections of this program, and return whether there were any."""
    return cut() > 0


def resetting(wires: Sequence[Wire]) -> Callable[[random.Random], bool]:
    """Return a function that resets the connections of one random agent."""

    def reset(chance: random.Random) -> bool:
        wire = chance.choice(wires)
        wire.reset()
        return wire.connections > 0

    return reset


def limited(deed: Callable[[random.Random], bool], most: int) -> Callable[[random.Random], bool]:
    """Return a function that calls ``deed`` until ``deed`` has killed ``most`` times."""
    left = [most]

    def kill(chance: random.Random) -> bool:
        if left[0] == 0 or not deed(chance):
            return False
        left[0] -= 1
        return True

    return kill
