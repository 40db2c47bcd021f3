"""What a run looks like at one moment, as frozen values (R8). :meth:`Run.stats` makes them, the live view,
the report and the tests read them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from flowchan.channel.channel import Holder

RunState = Literal["running", "stopping", "done", "failed", "stopped", "aborted"]


CauseKind = Literal[
    "bottleneck", "input", "consumer", "order", "gil", "cores", "memory", "in_flight", "starting"
]


@dataclass(frozen=True, slots=True)
class WorkSeconds:
    """Counters of one worker, or of all workers of a stage, in seconds since the run began.

    ``working``: since the worker had built what the user declared, until it ended or until now. Parts of it
    are ``input`` (waiting for an item), ``place`` (waiting for a place behind) and ``turn`` (waiting until
    the items before its own are out, while nothing is inside for a reader); the rest is ``work``. ``cpu``:
    CPU time, and ``ready``: time in which the kernel had no core for it; ``None`` where nobody can say, as
    for workers that run on other hosts.
    """

    working: float = 0.0
    input: float = 0.0
    place: float = 0.0
    turn: float = 0.0
    cpu: float | None = None
    ready: float | None = None

    @property
    def work(self) -> float:
        """Seconds in which it did not wait."""
        return max(0.0, self.working - self.input - self.place - self.turn)

    def since(self, earlier: WorkSeconds) -> WorkSeconds:
        """What was added after ``earlier``."""
        return WorkSeconds(
            max(0.0, self.working - earlier.working),
            max(0.0, self.input - earlier.input),
            max(0.0, self.place - earlier.place),
            max(0.0, self.turn - earlier.turn),
            None if self.cpu is None else max(0.0, self.cpu - (earlier.cpu or 0.0)),
            None if self.ready is None else max(0.0, self.ready - (earlier.ready or 0.0)),
        )


@dataclass(frozen=True, slots=True)
class WorkerStats:
    """The worker that has this ``number`` now, in its stage: whether it is ``working`` (has begun and not
    ended), and its counters. Those of workers that it has replaced count in the stage only."""

    number: int
    working: bool
    seconds: WorkSeconds


@dataclass(frozen=True, slots=True)
class Cause:
    """What limits a run, and why. ``kind`` is "bottleneck" (``stage`` is it), "input" (the program
    puts slowly), "consumer" (it reads slowly), "order" (the workers of ``stage`` wait for their turns),
    "gil" (threads share one interpreter lock), "cores", "memory" (a channel is short of bytes), "in_flight"
    (a loop has too few items under way) or "starting" (``stage`` has no worker that works yet)."""

    kind: CauseKind
    stage: str | None
    why: str


@dataclass(frozen=True, slots=True)
class StageStats:
    """One stage. ``busy``, ``waiting_input`` and ``waiting_output`` are shares (0 to 1) of the time in which
    its workers worked, of those that had begun and not ended; ``waiting_turn`` is the part of
    ``waiting_output`` in which an ordered stage waited for items before. ``rate`` is items finished per
    second. All four, and ``cores``, the CPU seconds per second, refer to the window of :class:`RunStats`;
    everything else counts from the start of the run. ``working`` workers have begun and not ended.
    ``unwanted`` items were in hand when the readers of the stage left (R2). ``hosts`` are those on which its
    workers may run. ``pids`` are those of its worker processes that are alive, in the order of their numbers.
    ``members_failed`` are those of batches that went on without them."""

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
    waiting_turn: float = 0.0
    cores: float | None = None
    working: int = 0
    seconds: WorkSeconds = WorkSeconds()
    per_worker: tuple[WorkerStats, ...] = ()


@dataclass(frozen=True, slots=True)
class EdgeStats:
    """One channel: ``inside`` of ``capacity`` items are in it now, ``passed`` went through, ``rate`` of them
    a second of the window. ``waiting_readers`` workers wait for an item, and somebody has for
    ``readers_waiting_for`` seconds; the same for writers. ``selecting``: waiters that something else may
    release, ``awaiting`` of them coroutines of this process; ``woken``: signalled, not yet running.
    ``bytes`` are inside of the ``share`` that the channel has of the run's memory; ``short_of_bytes``: a
    writer waits for those and not for a place. ``holders`` are the processes that keep blocks of its
    memory."""

    name: str
    writer: str
    reader: str | None
    transport: str
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
    """A whole run: ``elapsed`` seconds since its start (until its end, once it has ended). Rates
    and shares are those of its last ``window`` seconds. ``cause`` says what limited it in these, ``None`` if
    nothing can be said; ``bottleneck`` is the name of the stage that holds the others up, if a stage does.
    With the same ``seed`` another run's workers draw the same random numbers (R9). Its channels share
    ``memory`` bytes. ``hosts`` are the others on which it has workers. ``last_error`` tells in a line of the
    last item that failed or worker that died."""

    graph: str
    state: RunState
    elapsed: float
    stages: tuple[StageStats, ...]
    edges: tuple[EdgeStats, ...]
    bottleneck: str | None
    seed: int = 0
    memory: int = 0
    hosts: tuple[HostStats, ...] = ()
    last_error: str = ""
    window: float = 0.0
    cause: Cause | None = None
