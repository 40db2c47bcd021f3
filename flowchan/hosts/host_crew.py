"""The workers of a run on the hosts of one pool, as its driver has them.

The ports of such a worker are in the driver's process like those of any other. They are lent to the link to
its host, as a *line*: the link passes on what they get, and puts what comes back. So leases, order and the
recovery of what a dead worker had in hand stay where they are, in the channels here.

A worker that dies while its agent lives is recovered and replaced there. When an agent dies, or is not heard
of for too long, its life is fenced, what its workers had in hand is given back here, and they are started
anew: by another agent on the same host or, when none can be started there, on another host of their pool.
"""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
import socket
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

from flowchan.channel.channel import most_bytes
from flowchan.declare.values import Stage
from flowchan.errors import Closed, HostError
from flowchan.hosts.agent_handle import AgentHandle, Heard
from flowchan.hosts.agent_messages import (
    AskWaits,
    Close,
    Echo,
    Lacking,
    PeerEnded,
    Recover,
    Release,
    Seated,
    Start,
    Told,
    Waiting,
    refusal,
)
from flowchan.hosts.code import own_modules, pack_stage
from flowchan.hosts.driver_listener import DriverListener
from flowchan.hosts.providers.provider import Provider
from flowchan.hosts.worker_ports import COUNTS, HostWorkers, WorkerPorts, together
from flowchan.run.crew.local_crew import LocalCrew
from flowchan.run.crew.recovery import Death, deaths_in_hand
from flowchan.run.policy import decisions
from flowchan.run.policy.deadlock import Elsewhere
from flowchan.run.policy.decisions import Terminate
from flowchan.run.policy.events import (
    Aborted,
    Began,
    CrossedOff,
    Ended,
    Event,
    Failure,
    Gone,
    GroupLost,
    WorkerId,
)
from flowchan.run.policy.plan import PlannedWorker
from flowchan.run.policy.seeds import Worker
from flowchan.run.policy.stats import HostStats
from flowchan.run.worker import logs
from flowchan.run.worker.worker import join_ports
from flowchan.transport.interrupts import interrupts_allowed
from flowchan.transport.listener import AuthenticatedListener
from flowchan.transport.tcp import joined, listen
from flowchan.transport.versions import differs, versions

LIVES, WITHIN, TRIES = 10, 60.0, 3
"""A host is given up when so many agents have been started there within so many seconds, or so many in a row
that never came."""


class HostCrew:
    """See above. ``home`` is the crew of the whole run, which has all channels and ports."""

    def __init__(
        self,
        home: LocalCrew,
        provider: Provider,
        peer_timeout: float,
        tls: bool,
        workers: Sequence[PlannedWorker],
    ) -> None:
        self._home = home
        self._provider, self._peer_timeout = provider, peer_timeout
        self._tls = tls
        self._workers = {worker.id: worker for worker in workers}
        self._hosts = {name: HostWorkers(name, number) for number, name in enumerate(provider.hosts)}
        self._lines: dict[WorkerId, WorkerPorts] = {}
        self._numbers = 0
        self._deaths: dict[WorkerId, Death] = {}
        self._packed: dict[tuple[str, tuple[str, ...]], tuple[bytes, tuple[str, ...]]] = {}
        self._lock = threading.RLock()
        self._tell: Callable[[Event], None] = lambda _: None
        self._epochs: dict[str, int] = {}  # by number, as text; of who is not there it is 0
        self._hello = {**versions(), "epochs": self._epochs}
        self._secret = secrets.token_bytes(32)
        self._reception: DriverListener | None = None
        # Of gangs: the group's number, rank, size. One of an elastic gang may have none for a while.
        self._groups: dict[WorkerId, tuple[int, int, int]] = {}
        self._closing = False
        self._echo = 0  # the last echo that was asked for
        self._asked: list[AgentHandle] | None = None  # of whom; None: it is not awaited
        self._question = 0  # the last about what workers wait for
        self._questioned: list[AgentHandle] = []
        self._dying: list[AgentHandle] = []  # that are being closed

    # --- starting ---

    def start(self, tell: Callable[[Event], None]) -> None:
        """Starts an agent on every host that gets workers, and these once all have dialled. Raises
        ``HostError``."""
        self._tell = tell
        door = AuthenticatedListener(
            listen(joined((self._provider.listen_at(), 0))), self._secret, self._hello, tls=self._tls
        )
        self._reception = DriverListener(door, f"{self._name} door", self._home.help, self._let_in)
        for stage in {worker.stage.name: worker.stage for worker in self._workers.values()}.values():
            if stage.gang is not None:
                self.regroup([id for id in self._workers if id.stage == stage.name])
        used = [self._hosts[name] for name in dict.fromkeys(worker.host for worker in self._workers.values())]
        with self._lock:
            lives = [self._bring(host) for host in used]
        for worker in self._workers.values():
            self._pack(worker.stage)  # while the agents start
        for life in lives:
            with interrupts_allowed():
                life.is_decided.wait()
            if life.why:
                raise HostError(f"host {life.host!r} can't be used: {life.why}", life.host)
        with self._lock:
            for worker in self._workers.values():
                self._send(worker.id, self._hosts[worker.host])

    @property
    def _name(self) -> str:
        return f"flowchan {self._home.plan.graph.name}"

    def _bring(self, host: HostWorkers) -> AgentHandle:
        """Starts an agent there."""
        assert self._reception is not None
        life = AgentHandle(
            self._provider,
            host.number,
            host.lives,
            self._peer_timeout,
            Heard(self._hear, self._finished, self._refused, self._ends, self._over, self._home.help),
        )
        host.life = life
        self._epochs |= {str(host.number): host.lives} if host.lives else {}  # a hello has room for few
        host.lives += 1
        host.births.append(time.monotonic())
        said = {
            "secret": self._secret.hex(),
            "address": self._reception.address,
            "graph": self._name,
            "tls": self._tls,
            "levels": logs.levels(),
        }
        life.begin(self._name, said)
        return life

    def _let_in(self, sock: socket.socket, hello: dict[str, Any]) -> None:
        """An agent has dialled."""
        with self._lock:
            lives = [host.life for host in self._hosts.values()]
        asked = (hello.get("number"), hello.get("epoch"))
        life = next((life for life in lives if life is not None and (life.number, life.epoch) == asked), None)
        if life is not None and (why := differs(hello)):
            life.end(why)
        elif life is not None:
            life.meet(sock)
            return
        sock.close()

    def _send(self, id: WorkerId, host: HostWorkers) -> None:
        """Starts a worker on a host, on a new line."""
        life = host.life or self._bring(host)
        ports, stage = self._home.ports(id), self._workers[id].stage
        join_ports(ports, stage)
        for reader in ports.inputs.values() if stage.keeps_its_own else ():
            reader._read_alone()
        self._numbers += 1
        life.link.line(self._numbers, list(ports.inputs.values()), list(ports.writers()))
        self._lines[id] = line = WorkerPorts(self._numbers, life, self._begun(id, life))
        self._say_start(id, line)

    def _begun(self, id: WorkerId, life: AgentHandle) -> Worker:
        return dataclasses.replace(self._home.begun(id), host=life.host)

    def _say_start(self, id: WorkerId, line: WorkerPorts) -> None:
        worker = self._workers[id]
        stage, modules = self._pack(worker.stage, self._hosts[line.life.host].lacking)
        line.life.say(
            Start(
                line=line.number, here=line.here, stage=stage, modules=modules,
                predecessors=self._home.death_log.how_they_died(id),
                inputs=dict(worker.inputs), outputs=dict(worker.outputs), errors=worker.errors,
                most=min(self._home.plan.memory, most_bytes()), share=self._home.plan.share,
                gpus=worker.stage.gpus, seat=self._seat(id, line), elastic=self._is_elastic(id),
            )
        )  # fmt: skip

    def _pack(self, stage: Stage, lacking: Collection[str] = ()) -> tuple[bytes, tuple[str, ...]]:
        """The stage with what it uses of the modules that are ``lacking``, and the user's own modules that it
        needs besides."""
        key = stage.name, tuple(sorted(lacking))
        if key not in self._packed:
            packed = pack_stage(stage, key[1])
            self._packed[key] = packed, tuple(name for name in own_modules(packed) if name not in lacking)
        return self._packed[key]

    def _seat(self, id: WorkerId, line: WorkerPorts) -> Any:
        """In the group of its gang, if it is in one."""
        stage, place = self._workers[id].stage, self._groups.get(id)
        if stage.gang is None or place is None:
            return None
        number, rank, size = place
        return stage.gang.group._seat(number, rank, size, stage.name, line.life.host, stage.gang.elastic)

    def _is_elastic(self, id: WorkerId) -> bool:
        gang = self._workers[id].stage.gang
        return gang is not None and gang.elastic

    # --- what is heard ---

    def _hear(self, life: AgentHandle, told: Told) -> None:
        """What an agent tells, or one of its workers."""
        if isinstance(told, Ended | PeerEnded | Lacking):
            with self._lock:
                line = self._lines.get(told.worker)
                if line is None or line.life is not life:
                    return
                if line.ended is not None:
                    if not line.finished:  # it may have died before it closed its ports
                        life.say(Close(told.worker))
                    return
                if isinstance(told, Ended):
                    line.ended = told
                    return
                if isinstance(told, Lacking):
                    self._send_by_value(told, line)
                    return
                line.gone = True
                self._deaths[told.worker] = dataclasses.replace(told.death, host=life.host)
            told = Gone(told.worker)
        elif isinstance(told, Echo):
            life.echoed = told.number
            return
        elif isinstance(told, Waiting):
            life.waiting = told
            return
        elif isinstance(told, logs.Logged):
            logs.log_here(told)
            return
        elif isinstance(told, Began):
            self._home.death_log.began(told.worker)
        elif isinstance(told, Failure):
            told = dataclasses.replace(told, host=life.host)
        elif isinstance(told, GroupLost) and told.failure is not None:
            told = GroupLost(told.worker, dataclasses.replace(told.failure, host=life.host))
        elif isinstance(told, Aborted):  # by our clock
            told = dataclasses.replace(told, host=life.host, at=time.monotonic_ns())
        self._tell(told)

    def _send_by_value(self, told: Lacking, line: WorkerPorts) -> None:
        """These modules are not there, so what the stage uses of them goes along with it."""
        self._hosts[line.life.host].lacking.update(told.modules)
        self._say_start(told.worker, line)

    def _finished(self, life: AgentHandle, number: int) -> None:
        """The link has put all that came from the worker of a line, and ended its ports here."""
        with self._lock:
            for line in self._lines.values():
                line.finished |= line.life is life and line.number == number
        self._ends(life)

    def _refused(self, life: AgentHandle, number: int, port: int) -> None:
        with self._lock:
            found = (id for id, line in self._lines.items() if line.life is life and line.number == number)
            id = next(found, None)
        if id is not None:
            channel = [*self._home.ports(id).inputs.values()][port].channel
            channel.abort(refusal(channel._name, f"to host {life.host!r}"))

    def _ends(self, life: AgentHandle) -> bool:
        """Tells of those that have ended and whose outputs are all here; whether others are to come."""
        with self._lock:
            ending = [(id, line) for id, line in self._lines.items() if line.ended and line.life is life]
            done = [(id, line) for id, line in ending if self._is_done(id)]
            for id, _ in done:
                self._lines.pop(id)
        for _, line in done:
            assert line.ended is not None
            line.life.link.drop(line.number)
            line.life.say(Release(line.ended.worker))
            self._tell(line.ended)
        return len(ending) > len(done)

    def _is_done(self, id: WorkerId) -> bool:
        """Whether nothing more comes from it, or nothing more is wanted."""
        broken = any(port.channel.broken for port in self._home.ports(id).everything())
        return self._lines[id].finished or broken

    def _over(self, life: AgentHandle) -> None:
        """Its agent is no more: what it had is for another."""
        with self._lock:
            host = self._hosts[life.host]
            host.deaths.append(life.why)
            host.stillborn = 0 if life.has_met else host.stillborn + 1
            host.births = [birth for birth in host.births if birth > time.monotonic() - WITHIN]
            if host.stillborn >= TRIES or len(host.births) >= LIVES:
                host.given_up = life.why
            lost = [id for id, line in self._lines.items() if line.life is life and not line.gone]
            for id in lost:
                self._lines[id].gone = True
                how = f"was lost with host {life.host!r}: {life.why}"
                over_item = deaths_in_hand(self._home.ports(id))
                self._deaths[id] = Death(how, None, 0, 0.0, over_item, life.host, counts=False)
            host.life = None
            self._dying = [*filter(AgentHandle.is_closing, self._dying), life]
            if self._lines and not host.given_up and not self._closing:
                self._bring(host)
        with contextlib.suppress(Closed):  # the run is over
            for id in lost:
                self._tell(Gone(id))
        self._count(host, life)
        life.close(time.monotonic() + decisions.GRACE)

    # --- what the supervisor asks for ---

    def release_ports(self, id: WorkerId) -> None:
        self._disband([id], if_meeting=True)
        with self._lock:
            line = self._lines.pop(id, None)
        if line is not None:
            line.life.link.drop(line.number)
            line.life.say(Release(id))

    def terminate(self, id: WorkerId, force: bool) -> None:
        self._disband([id], if_meeting=True)  # its process may not be there yet, and would wait for its mates
        with self._lock:
            line = self._lines.get(id)
        if line is not None:
            line.life.say(Terminate(id, force))

    def kill(self) -> None:
        for life in self._lives():
            life.kill()

    def death(self, id: WorkerId) -> Death:
        with self._lock:
            return self._deaths[id]

    def recover(self, id: WorkerId, blame: bool) -> None:
        if self._is_elastic(id):
            self._disband([id])
            self._groups.pop(id, None)  # its successor waits for one
        with self._lock:
            if id in self._lines:
                self._lines[id].blame = blame
            if not self._lost(id) and id in self._lines:
                self._lines[id].life.say(Recover(id, blame))

    def regroup(self, ids: Sequence[WorkerId]) -> None:
        assert self._reception is not None
        self._disband(ids)
        group = self._reception.expect(len(ids))
        self._groups.update({id: (group, rank, len(ids)) for rank, id in enumerate(ids)})

    def meet(self, ids: Sequence[WorkerId]) -> None:
        self.regroup(ids)
        with self._lock:
            for id in ids:
                if (line := self._lines.get(id)) is not None:
                    line.life.say(Seated(id, self._seat(id, line)))

    def disband(self, stage: str) -> None:
        self._disband([id for id in self._workers if id.stage == stage])

    def _disband(self, ids: Sequence[WorkerId], if_meeting: bool = False) -> None:
        for group in {self._groups[id][0] for id in ids if id in self._groups}:
            assert self._reception is not None
            self._reception.dismiss(group, if_meeting)

    def _lost(self, id: WorkerId) -> bool:
        """Whether the worker's agent is no more. Then it has no line any more, and what it had in hand is
        given back."""
        line = self._lines.get(id)
        if line is None or not line.life.why:
            return False
        del self._lines[id]
        line.life.link.drop(line.number)
        self._home.hand_on(id, line.blame)
        return True

    def start_again(self, id: WorkerId) -> None:
        with self._lock:
            self._lost(id)
            line = self._lines.get(id)
            if line is None:
                self._send(id, self._host_for(id))
            else:
                line.gone, line.blame, line.here = False, True, self._begun(id, line.life)
                self._say_start(id, line)

    def _host_for(self, id: WorkerId) -> HostWorkers:
        """The host on which a worker was planned, or else that of its pool with the fewest workers."""
        worker = self._workers[id]
        hosts = [self._hosts[name] for name in (worker.host, *worker.stage.placement.hosts)]
        usable = [host for host in hosts if not host.given_up]
        if not usable:
            why = "; ".join(dict.fromkeys(f"{host.name}: {host.given_up}" for host in hosts))
            raise HostError(f"there is no host left for worker {id}: {why}")
        if usable[0].name == worker.host:
            return usable[0]
        taken = [line.life.host for line in self._lines.values()]
        return min(usable, key=lambda host: taken.count(host.name))

    def cross_off(self, question: int) -> None:
        for life in self._lives():
            life.hint(CrossedOff(question))

    def all_is_heard(self) -> bool:
        """Asks all agents for an echo; it is true, once, when all have answered."""
        if self._asked is not None:
            heard = all(life.echoed == self._echo or life.why for life in self._asked)
            if heard:
                self._asked = None
            return heard
        self._echo, self._asked = self._echo + 1, self._lives()
        for life in self._asked:
            life.say(Echo(self._echo))
        return False

    def elsewhere(self, alive: frozenset[WorkerId]) -> Elsewhere | None:
        """Asks all agents what their workers wait for, and gives it, once, when all have answered."""
        lives = self._lives()
        if not lives or lives != self._questioned:
            self._question, self._questioned = self._question + 1, lives
            for life in lives:
                life.say(AskWaits(self._question))
        if any(life.waiting.number != self._question for life in lives):
            return None
        self._questioned = []
        with self._lock:
            lines = {id: self._lines.get(id) for id in sorted(alive & self._workers.keys(), key=str)}
        return together(lives, lines)

    def _lives(self) -> list[AgentHandle]:
        with self._lock:
            return [host.life for host in self._hosts.values() if host.life is not None]

    # --- the end ---

    def close(self) -> None:
        with self._lock:
            self._closing = True
            lives = self._lives()
        for life in lives:
            self._count(self._hosts[life.host], life)
            life.leave()
        give_up = time.monotonic() + decisions.GRACE
        for life in lives:
            life.close(give_up)
        while self._dying:
            self._dying.pop().join()
        if self._reception is not None:
            self._reception.close()
            self._reception = None
        with self._lock:
            for host in self._hosts.values():
                host.life = None

    # --- what it looks like ---

    def _count(self, host: HostWorkers, life: AgentHandle) -> None:
        state = life.link.state()
        with self._lock:
            for word in COUNTS:
                host.before[word] += state[word]
            host.round_trip = state["round_trip"] or host.round_trip

    def hosts(self) -> tuple[HostStats, ...]:
        with self._lock:
            return tuple(self._about(host) for host in self._hosts.values() if host.lives)

    def _about(self, host: HostWorkers) -> HostStats:
        state = host.life.link.state() if host.life is not None else {}
        counts = {word: host.before[word] + state.get(word, 0) for word in COUNTS}
        how = "connected" if state.get("connected") else "waiting" if state else host.given_up or "ended"
        return HostStats(
            name=host.name, state=how,
            workers=sum(line.life.host == host.name for line in self._lines.values()),
            agents=host.lives, deaths=tuple(host.deaths), breaks=counts["breaks"], sent=counts["bytes_out"],
            received=counts["bytes_in"], round_trip=state.get("round_trip") or host.round_trip,
        )  # fmt: skip
