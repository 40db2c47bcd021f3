"""The hosts of a run, the lines of its workers on the links to them, and what those workers wait for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from flowchan.hosts.agent_handle import AgentHandle
from flowchan.run.policy.deadlock import Elsewhere
from flowchan.run.policy.events import Ended, WorkerId
from flowchan.run.policy.seeds import Worker


@dataclass
class WorkerPorts:
    """What belongs to one worker on a link. ``gone``: its process has ended without a word, and it has no
    other yet; ``blame``: what it had in hand may be why. ``ended``: it has said that it has ended; its last
    outputs may still be on their way until the line is ``finished``."""

    number: int
    life: AgentHandle
    here: Worker
    gone: bool = False
    blame: bool = True
    ended: Ended | None = None
    finished: bool = False


COUNTS = ("breaks", "bytes_out", "bytes_in")  # of a link's state


@dataclass
class HostWorkers:
    """One of a pool, as a run has it: the life of its agent now, and what it was like before."""

    name: str
    number: int
    life: AgentHandle | None = None
    lives: int = 0
    births: list[float] = field(default_factory=list)  # of the last lives
    stillborn: int = 0  # the last ones that never came
    deaths: list[str] = field(default_factory=list)
    lacking: set[str] = field(default_factory=set)  # modules that are missing there
    given_up: str = ""  # why
    before: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTS, 0))  # of lives that are over
    round_trip: float = 0.0  # of the last of them


def together(lives: Sequence[AgentHandle], lines: Mapping[WorkerId, WorkerPorts | None]) -> Elsewhere:
    """What agents have told of the workers of these lines."""
    reading: Counter[str] = Counter()
    writing: Counter[str] = Counter()
    states = {life.number: life.link.state() for life in lives}
    counts = [n for life in lives for n in (life.number, life.epoch, states[life.number]["breaks"])]
    moves = not all(state["connected"] for state in states.values())
    for id, line in lines.items():
        waits = line and line.life in lives and line.life.waiting.workers.get(id)
        if line is None or not waits or line.gone or line.ended is not None:
            moves = True  # it is being started, replaced or ended
            continue
        about = states[line.life.number]["lines"].get(line.number, {})
        if not about.get("staged"):  # else it waits for room here, whatever it asks for there
            reading.update(waits.reading)
        writing.update(waits.writing)
        counts += [line.number, *waits.counts]
        moves = moves or waits.moves or not (waits.reading or waits.writing)
    return Elsewhere(reading, writing, tuple(counts), moves)
