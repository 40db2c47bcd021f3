"""What a run looks like at one moment, as frozen values (R8). :meth:`Run.stats` makes them, the live view,
the report and the tests read them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from flowchan.channel.channel import Holder

RunState = Literal["running", "stopping", "done", "failed", "stopped", "aborted"]


@dataclass(frozen=True, slots=True)
class StageStats:
    """One stage. ``busy``, ``waiting_input`` and ``waiting_output`` are shares (0 to 1) of the whole run's
    length, on the average of its workers; what is missing to 1 is the time before they had begun and after
    they had ended. ``rate`` is items finished per second of the run. ``unwanted`` items were in hand
    when the readers of the stage left (R2). ``hosts`` are those on which its workers may run. ``pids`` are
    those of its worker processes that are alive, in the order of their numbers. ``members_failed`` are those
    of batches that went on without them."""

    name: str
    kind: str
    on: str
    workers: int
    alive: int
    items_in: int
    items_out: int
    failed: int
    retried: int
    restarts: int
    unwanted: int
    in_hand: int
    rate: float
    busy: float
    waiting_input: float
    waiting_output: float
    hosts: tuple[str, ...] = ()
    pids: tuple[int, ...] = ()
    members_failed: int = 0


@dataclass(frozen=True, slots=True)
class LinkStats:
    """One channel: ``inside`` of ``capacity`` items are in it now, ``passed`` went through, ``rate`` of them
    a second. ``waiting_readers`` workers wait for an item, and somebody has for ``readers_waiting_for``
    seconds; the same for writers. ``selecting``: waiters that something else may release,
    ``awaiting`` of them coroutines of this process; ``woken``: signalled, not yet running.
    ``bytes`` are inside of the ``share`` that the channel has of the run's memory; ``short_of_bytes``: a
    writer waits for those and not for a place. ``holders`` are the processes that keep blocks of its
    memory."""

    name: str
    writer: str
    reader: str | None
    medium: str
    inside: int
    capacity: int
    passed: int
    rate: float
    waiting_readers: int = 0
    waiting_writers: int = 0
    readers_waiting_for: float = 0.0
    writers_waiting_for: float = 0.0
    selecting: int = 0
    woken: int = 0
    awaiting: int = 0
    bytes: int = 0
    share: int = 0
    short_of_bytes: bool = False
    holders: tuple[Holder, ...] = ()


@dataclass(frozen=True, slots=True)
class HostStats:
    """Another host on which workers of the run are. ``state`` is "connected", "waiting" for its agent, or why
    there is none. ``agents`` have been started so far; ``deaths`` says how those ended that died, and
    ``breaks`` is how often the connection to one broke and was made again. ``received`` and ``sent`` count
    bytes here, ``round_trip`` is in seconds."""

    name: str
    state: str
    workers: int
    agents: int
    deaths: tuple[str, ...]
    breaks: int
    sent: int
    received: int
    round_trip: float


@dataclass(frozen=True, slots=True)
class RunStats:
    """A whole run: ``elapsed`` seconds since its start (until its end, once it has ended). ``bottleneck`` is
    the name of the stage that holds the others up, ``None`` while nothing can be said. With the same ``seed``
    another run's workers draw the same random numbers (R9). Its channels share ``memory`` bytes.
    ``hosts`` are the others on which it has workers. ``last_error`` tells in a line of the last item that
    failed or worker that died."""

    graph: str
    state: RunState
    elapsed: float
    stages: tuple[StageStats, ...]
    links: tuple[LinkStats, ...]
    bottleneck: str | None
    seed: int = 0
    memory: int = 0
    hosts: tuple[HostStats, ...] = ()
    last_error: str = ""
