"""Provide sample statistics in which every field has a value."""

from __future__ import annotations

from dataclasses import replace

from flowchan.channel.channel import Holder
from flowchan.run.policy.scaling import ScalingDecision
from flowchan.run.policy.stats import (
    Cause,
    EdgeStats,
    HostStats,
    RunStats,
    StageStats,
    WorkerStats,
    WorkSeconds,
)

SECONDS = WorkSeconds(working=10.0, input=2.0, place=1.5, turn=0.5, cpu=4.0, ready=0.25)

STAGE = StageStats(
    name="work",
    kind="map",
    on="process",
    workers=3,
    alive=2,
    items_in=100,
    items_out=90,
    failed=4,
    retried=5,
    restarts=1,
    unwanted=2,
    in_hand=3,
    rate=10.0,
    busy=0.6,
    waiting_input=0.2,
    waiting_output=0.2,
    hosts=("a", "b"),
    pids=(11, 12),
    members_failed=1,
    waiting_turn=0.05,
    cores=0.4,
    working=1,
    seconds=SECONDS,
    per_worker=(WorkerStats(1, True, SECONDS), WorkerStats(2, False, replace(SECONDS, cpu=None))),
    discarded=1,
    rate_limit=20.0,
    starting=1,
    worked=WorkSeconds(working=5.0),
)
EDGE = EdgeStats(
    name="numbers",
    writer="numbers",
    reader="work",
    transport="processes",
    inside=7,
    capacity=64,
    passed=100,
    rate=10.0,
    waiting_readers=1,
    waiting_writers=2,
    readers_waiting_for=0.5,
    writers_waiting_for=0.25,
    selecting=1,
    woken=1,
    awaiting=1,
    bytes=4096,
    share=1 << 20,
    short_of_bytes=True,
    holders=(Holder(11, 2, 2048),),
    put=107,
    errors=True,
)
HOST = HostStats("a", "connected", 2, 1, ("killed",), 3, 1000, 2000, 0.001)

STATS = RunStats(
    graph="sample",
    state="running",
    elapsed=10.0,
    stages=(STAGE,),
    edges=(EDGE, replace(EDGE, name="out", reader=None)),
    bottleneck="work",
    seed=7,
    memory=1 << 30,
    hosts=(HOST,),
    last_error="worker work 1: ValueError",
    window=5.0,
    cause=Cause("bottleneck", "work", "its workers are busy"),
    warnings=("stage 'work' has one restart left",),
    decisions=(ScalingDecision(3.0, "work", 1, 3, "busy 98 % of the time", "kept"),),
)
