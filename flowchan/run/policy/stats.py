"""Define the statistics of a run at one moment, as frozen values.

:meth:`Run.stats` creates them for the program, the live view and the report.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from flowchan.channel.channel import Holder
from flowchan.public import public
from flowchan.run.policy.scaling import ScalingDecision

RunState = Literal["running", "stopping", "done", "failed", "stopped", "aborted"]
StageState = Literal["starting", "running", "ended"]


CauseKind = Literal[
    "bottleneck", "input", "consumer", "order", "gil", "cores", "memory", "in_flight", "starting"
]


@public
@dataclass(frozen=True, slots=True)
class WorkSeconds:
    """Time spent by a worker, or by all workers of a stage, since the start of the run, in seconds.

    Attributes:
        working: Time from when the worker built its callable until the worker ended, or until now.
        input: Part of ``working`` in which it waited for items.
        place: Part of ``working`` in which it waited for room in an output channel.
        turn: Part of ``working`` in which finished outputs waited for earlier items while the readers had
            nothing to take.
        cpu: CPU time; ``None`` if unknown, as for workers on other hosts.
        ready: Time in which it waited for a core; ``None`` if unknown.

    Example:
        >>> from flowchan import Graph
        >>> graph = Graph()
        >>> graph.source(["a"]).sink(len)
        >>> run = graph.start()
        >>> results = run.wait()
        >>> seconds = run.stats().stages[0].seconds
        >>> 0 <= seconds.work <= seconds.working
        True
    """

    working: float = 0.0
    input: float = 0.0
    place: float = 0.0
    turn: float = 0.0
    cpu: float | None = None
    ready: float | None = None

    @property
    def work(self) -> float:
        """Return the part of ``working``, in seconds, in which the worker did not wait."""
        return max(0.0, self.working - self.input - self.place - self.turn)

    def since(self, earlier: WorkSeconds) -> WorkSeconds:
        """Return the time spent since an earlier measurement.

        Args:
            earlier: Earlier value of the same worker or stage.

        Returns:
            The differences, each at least 0.

        Example:
            >>> from flowchan import WorkSeconds
            >>> WorkSeconds(working=5.0, input=1.0).since(WorkSeconds(working=2.0)).working
            3.0
        """
        return WorkSeconds(
            max(0.0, self.working - earlier.working),
            max(0.0, self.input - earlier.input),
            max(0.0, self.place - earlier.place),
            max(0.0, self.turn - earlier.turn),
            None if self.cpu is None else max(0.0, self.cpu - (earlier.cpu or 0.0)),
            None if self.ready is None else max(0.0, self.ready - (earlier.ready or 0.0)),
        )


@public
@dataclass(frozen=True, slots=True)
class WorkerStats:
    """Statistics of one current worker of a stage.

    The times of dead workers that it replaced appear only in the statistics of the stage.

    Attributes:
        number: Number of the worker in its stage.
        working: True if it has started to work and has not ended.
        seconds: Time that it has spent.

    Example:
        >>> from flowchan import Graph
        >>> graph = Graph()
        >>> items = graph.input()
        >>> items.map(str, workers=2).sink(print)
        >>> with graph.start() as run:
        ...     numbers = [worker.number for worker in run.stats().stages[1].per_worker]
    """

    number: int
    working: bool
    seconds: WorkSeconds


@public
@dataclass(frozen=True, slots=True)
class Cause:
    """Cause that limits the speed of a run.

    Attributes:
        kind: One of

            - "bottleneck": ``stage`` is the slowest stage;
            - "input": the program puts items slowly;
            - "consumer": the program reads results slowly;
            - "order": the workers of ``stage`` wait for earlier items;
            - "gil": threads share one global interpreter lock;
            - "cores": the workers use all cores;
            - "memory": a channel has no bytes left;
            - "in_flight": a loop admits too few items at a time;
            - "starting": no worker of ``stage`` has begun to work yet.
        stage: Name of the stage, if a stage is the cause.
        why: Explanation in words.

    Example:
        >>> from flowchan import Graph
        >>> graph = Graph()
        >>> graph.source(range(3)).sink(str)
        >>> run = graph.start()
        >>> results = run.wait()
        >>> cause = run.stats().cause
        >>> why = None if cause is None else cause.why
    """

    kind: CauseKind
    stage: str | None
    why: str


@public
@dataclass(frozen=True, slots=True)
class StageStats:
    """Statistics of one stage.

    The rate and the shares (0 to 1) cover the window of :class:`RunStats`. Shares are fractions of the total
    time of the working workers. All counts begin at the start of the run.

    Attributes:
        name: Name of the stage.
        kind: Name of the operator.
        on: Placement of the workers, such as "thread" or "process".
        workers: Number of workers that the stage is supposed to have.
        alive: Number of workers that have not ended.
        items_in: Number of items taken from the inputs.
        items_out: Number of items put into the outputs.
        failed: Number of items that failed.
        retried: Number of retries.
        restarts: Number of workers that were replaced.
        unwanted: Number of items taken although the output had no readers.
        discarded: Number of items that were being processed when the run failed or was aborted.
        in_hand: Number of items that workers have taken but not finished.
        rate: Items finished per second.
        busy: Share of the time spent working.
        waiting_input: Share of the time spent waiting for an item.
        waiting_output: Share of the time spent waiting to put, including ``waiting_turn``.
        hosts: Hosts on which workers may run.
        pids: Process IDs of the live workers, in the order of their numbers.
        members_failed: Number of failed batch members whose batches continued without them.
        waiting_turn: Share of the time in which an ordered stage's outputs waited for earlier items.
        cores: CPU seconds per second; ``None`` if unknown.
        working: Number of workers that have begun to work and have not ended.
        seconds: Time spent by all workers.
        per_worker: Statistics of each working worker.
        rate_limit: Maximum number of items that start per second (``rate=``), or ``None``. A worker counts as
            working while it waits to start its item.
        starting: Number of workers that have not built their callables yet.
        worked: Time spent by all workers in the window.

    Example:
        >>> from flowchan import Graph
        >>> graph = Graph()
        >>> numbers = graph.source(["1", "x"]).map(int, retries=2)
        >>> good, failed = numbers.collect(), numbers.errors.collect()
        >>> run = graph.start()
        >>> results = run.wait()
        >>> stage = run.stats().stages[1]
        >>> stage.name, stage.items_in, stage.failed, stage.retried
        ('int', 2, 1, 2)
    """

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
    discarded: int = 0
    rate_limit: float | None = None
    starting: int = 0
    worked: WorkSeconds = WorkSeconds()

    @property
    def state(self) -> StageState:
        """Return "starting" until a worker has built its callable, then "running", and finally "ended".

        After the death of all its workers, a stage is "starting" again. An input has no workers, and
        therefore counts as ended.
        """
        if not self.alive:
            return "ended"
        return "starting" if self.starting >= self.alive else "running"


@public
@dataclass(frozen=True, slots=True)
class EdgeStats:
    """Statistics of one channel of a graph.

    Attributes:
        name: Name of the channel.
        writer: Stage that puts items.
        reader: Stage that takes items, or ``None``.
        transport: Name of the transport.
        inside: Number of items in the channel now.
        capacity: Maximum number of items.
        passed: Number of items taken since the run started.
        rate: Items taken per second in the window of :class:`RunStats`.
        waiting_readers: Number of workers that wait for an item.
        waiting_writers: Number of workers that wait to put.
        readers_waiting_for: Longest current wait of a reader, in seconds.
        writers_waiting_for: Longest current wait of a writer, in seconds.
        selecting: Number of waiters that something other than this channel may also wake.
        woken: Number of waiters that have been woken but are not running yet.
        awaiting: Number of waiters in ``selecting`` that are coroutines in this process.
        bytes: Number of bytes in the channel now.
        share: The channel's share of the run's memory, in bytes.
        short_of_bytes: True if a writer waits for bytes although the channel has room for another item.
        holders: Processes that keep memory blocks of the channel in use.
        put: Number of items put since the run started.
        errors: True if the channel carries the failed items of ``writer``.

    Example:
        >>> from flowchan import Graph
        >>> graph = Graph()
        >>> graph.source(["a", "bb"]).sink(len)
        >>> run = graph.start()
        >>> results = run.wait()
        >>> [(edge.writer, edge.reader, edge.passed) for edge in run.stats().edges]
        [('source', 'len', 2)]
    """

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
    put: int = 0
    errors: bool = False

    @property
    def left(self) -> int:
        """Return the number of items that were put but not taken: items in the channel or discarded."""
        return self.put - self.passed


@public
@dataclass(frozen=True, slots=True)
class HostStats:
    """Statistics of another host that runs workers.

    Attributes:
        name: Name of the host.
        state: "connected", "waiting" (for its agent), or the reason why the agent is missing.
        workers: Number of workers on the host.
        agents: Number of agents started so far.
        deaths: How its agents died.
        breaks: Number of times that the connection to an agent was lost and restored.
        sent: Number of bytes sent to the host.
        received: Number of bytes received from the host.
        round_trip: Round-trip time in seconds; 0 if unknown.

    Example:
        >>> from flowchan import Graph, hosts
        >>> graph = Graph()
        >>> numbers = graph.source(range(3)).map(str, on=hosts.local(1)).collect()
        >>> run = graph.start()
        >>> results = run.wait()
        >>> [(host.name, host.agents) for host in run.stats().hosts]
        [('local-1', 1)]
    """

    name: str
    state: str
    workers: int
    agents: int
    deaths: tuple[str, ...]
    breaks: int
    sent: int
    received: int
    round_trip: float


@public
@dataclass(frozen=True, slots=True)
class RunStats:
    """Statistics of a whole run.

    Attributes:
        graph: Name of the graph.
        state: "running", "stopping", "done", "failed", "stopped" or "aborted".
        elapsed: Seconds from the start of the run to now, or to its end.
        stages: Statistics of each stage.
        edges: Statistics of each channel.
        bottleneck: Name of the stage that limits the run, if any.
        seed: Random seed; in runs with equal seeds, workers draw equal random numbers.
        memory: Number of bytes that all channels together may use.
        hosts: Statistics of the other hosts that run workers.
        last_error: One line about the latest failed item or dead worker.
        window: Length of the window for rates and shares, in seconds.
        cause: Cause that limited the run in the window; ``None`` if unknown.
        warnings: Warnings about stages, for example that the restarts are nearly used up. Each stage keeps
            only the latest warning of each kind.
        decisions: Changes to the number of workers of ``workers="auto"`` stages.

    Example:
        >>> from flowchan import Graph
        >>> graph = Graph()
        >>> graph.source(["a"]).sink(len)
        >>> run = graph.start()
        >>> results = run.wait()
        >>> stats = run.stats()
        >>> stats.state, [stage.items_in for stage in stats.stages]
        ('done', [0, 1])
    """

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
    warnings: tuple[str, ...] = ()
    decisions: tuple[ScalingDecision, ...] = ()
