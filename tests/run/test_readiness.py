"""Test ``run.ready()``, ``run.health()``, and the display of stages that are building their callables."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import signal
from typing import Any

import pytest
from runs import Gate, stage_of
from support.waiting import wait_until

from flowchan import Graph, Interrupted, Run, RunError, hosts, worker
from flowchan.viz.live import notebook, terminal
from flowchan.viz.live.model import bars, bars_line, plain_line


class Model:
    """Callable whose constructor waits at a gate, in the workers for which ``held`` is true."""

    def __init__(self, gate: Gate, held: Any = lambda _: True) -> None:
        if held(worker()):
            gate.wait()

    def __call__(self, number: int) -> int:
        return number


class AsyncModel(Model):
    """Model with an ``async def`` call."""

    async def __call__(self, number: int) -> int:  # type: ignore[override]
        return number


def served(model: Any, **options: Any) -> tuple[Graph, Run]:
    """Start a graph that answers requests with a model."""
    graph = Graph("service")
    graph.input("questions").map(model, name="model", **options).collect(name="end")
    return graph, graph.start()


@pytest.mark.parametrize(("model", "on"), [(Model, "thread"), (Model, "process"), (AsyncModel, "thread")])
def test_run_is_ready_once_all_callables_are_built(model: Any, on: Any) -> None:
    gate = Gate()
    _, run = served(functools.partial(model, gate), on=on, workers=2)
    with run:
        assert not run.ready(timeout=0)
        assert not run.ready(timeout=0.05)
        assert not run.health().ready
        assert run.health().stages == {"model": "starting", "end": "running"}
        gate.open()
        assert run.ready(timeout=60)
        assert run.ready()
        assert run.health().ready
        assert run.health().stages == {"model": "running", "end": "running"}
    assert not run.ready()
    assert run.health().stages == {"model": "ended", "end": "ended"}


def test_every_display_shows_a_stage_that_is_starting() -> None:
    gate = Gate()
    graph, run = served(functools.partial(Model, gate), on="process")
    with run:
        stats, stage = run.stats(), stage_of(run, "model")
        assert (stage.state, stage.starting) == ("starting", 1)
        assert "'model' is starting: no worker has built its callable yet" in run.explain()
        assert "1 process, starting" in run.report()
        assert "| model 0 0/s starting" in plain_line(stats)
        assert "starting: model" in bars_line(bars(graph, stats), stats)
        assert terminal._cells(stage, None)[0] == "1 process, starting"
        assert notebook._does(stage) == "0 at 0/s, starting"
        gate.open()
        run.ready()
        stats, stage = run.stats(), stage_of(run, "model")
        assert (stage.state, stage.starting) == ("running", 0)
        for text in (run.explain(), run.report(), plain_line(stats), bars_line(bars(graph, stats), stats)):
            assert "starting" not in text.replace("the start", "")


def test_reader_that_starts_is_named_as_starting() -> None:
    gate = Gate()
    graph = Graph("blocked")
    graph.source(range(9), capacity=1).sink(functools.partial(Model, gate), name="model")
    run = graph.start()
    wait_until(lambda: "whose reader 'model' is starting" in run.explain(), what=run.explain)
    gate.open()
    run.wait()


def test_stage_with_one_worker_still_starting_is_running() -> None:
    gate = Gate()
    model = functools.partial(Model, gate, held=lambda this: this.number == 2)
    _, run = served(model, workers=2)
    with run:
        wait_until(lambda: stage_of(run, "model").starting == 1, what=run.explain)
        assert stage_of(run, "model").state == "running"
        assert run.health().ready
        assert not run.ready(timeout=0)
        assert "; 1 of its 2 workers are starting" in run.explain()
        assert "2 thread, 1 starting" in run.report()
        assert " 1 starting busy " in plain_line(run.stats())
        gate.open()
        assert run.ready(timeout=60)


def test_replacement_is_not_ready_until_its_callable_is_built() -> None:
    gate = Gate()
    model = functools.partial(Model, gate, held=lambda this: this.incarnation > 0)
    _, run = served(model, on="process")
    with run:
        assert run.ready(timeout=60)
        assert run.health().restarts_left == {"model": 10}
        os.kill(stage_of(run, "model").pids[0], signal.SIGKILL)
        wait_until(lambda: run.health().restarts_left == {"model": 9}, what=run.health)
        assert not run.health().ready
        assert run.health().stages["model"] == "starting"
        gate.open()
        assert run.ready(timeout=60)


def fails() -> None:
    raise ValueError("no weights")


@pytest.mark.parametrize("on", ["thread", "process"])
def test_ready_raises_the_failure_from_a_constructor(on: Any) -> None:
    gate = Gate()
    _, run = served(functools.partial(Model, gate, held=lambda _: fails()), on=on)
    with pytest.raises(RunError) as raised:
        run.ready(timeout=60)
    assert str(raised.value.exceptions[0].__cause__) == "no weights"
    assert run.health().failed
    assert not run.health().ready


def test_stopped_run_is_not_ready() -> None:
    gate = Gate()
    _, run = served(functools.partial(Model, gate))
    run.stop()
    wait_until(lambda: run.state == "stopping")
    assert not run.ready()
    assert not run.health().failed
    gate.open()
    run.wait()


def test_run_on_hosts_becomes_ready() -> None:
    _, run = served(str, on=hosts.local(1))
    with run:
        assert run.ready(timeout=60)


def test_interrupt_during_ready_raises_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "flowchan.run.observed_run.wait_until_ready", lambda *_: signal.raise_signal(signal.SIGINT)
    )
    graph = Graph("interrupted")
    graph.source(range(3)).collect(name="numbers")
    run = graph.start()
    with pytest.raises(Interrupted) as raised:
        run.ready()
    assert raised.value.report.startswith("graph 'interrupted': stopped ")


def test_health_can_be_written_as_json() -> None:
    graph = Graph("plain")
    graph.input().sink(str, name="show", on="process", restarts=10**9)
    with graph.start() as run:
        run.ready()
        health = json.loads(json.dumps(dataclasses.asdict(run.health())))
    assert health == {
        "ready": True, "failed": False, "stages": {"show": "running"}, "restarts_left": {}, "waiting": 0,
    }  # fmt: skip


@pytest.mark.parametrize(("wrong", "error"), [(-1, ValueError), ("1", TypeError)])
def test_ready_refuses_a_wrong_timeout(wrong: Any, error: type[Exception]) -> None:
    _, run = served(str)
    with run, pytest.raises(error, match=r"^ready: timeout must be "):
        run.ready(timeout=wrong)
