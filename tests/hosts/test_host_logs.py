"""Test that the program's loggers handle log records from remote workers, and that the records name the
worker."""

from __future__ import annotations

import logging

import pytest

from flowchan import Graph, worker
from flowchan.hosts import local

pytestmark = pytest.mark.usefixtures("no_agent_stays")


def work(number: int) -> int:
    log = logging.getLogger("mine.parts")
    log.debug("not asked for")
    me = worker()
    where = f"{me.stage} {me.number} on {me.host}"
    log.info("item %d", number, extra={"size": 3, "odd": object(), "where": where})
    try:
        1 / (number - 1)
    except ZeroDivisionError:
        log.exception("at %s", me.host, extra={"where": where})
    return number


def test_log_records_of_remote_workers_reach_the_program(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    graph = Graph("logged")
    graph.source(range(4)).map(work, on=local(2), workers=2, name="far").sink(abs)
    graph.run()
    records = [record for record in caplog.records if record.name == "mine.parts"]
    infos = [record for record in records if record.levelno == logging.INFO]
    assert sorted(record.getMessage() for record in infos) == [f"item {n}" for n in range(4)]
    assert all(record.funcName == "work" and vars(record)["size"] == 3 for record in infos)
    for record in records:
        # the hosts' speeds decide which host a worker gets, if another test has measured them
        assert vars(record)["host"] in ("local-1", "local-2")
        assert record.processName is not None
        assert record.processName.endswith("logged/" + vars(record)["where"])
    (failed,) = (record for record in records if record.levelno == logging.ERROR)
    assert failed.getMessage() == f"at {vars(failed)['host']}"
    assert failed.exc_text is not None
    assert "ZeroDivisionError" in failed.exc_text
    assert "ZeroDivisionError" in caplog.text


def test_log_levels_come_from_the_program(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    caplog.set_level(logging.ERROR, logger="mine")
    graph = Graph("logged")
    graph.source(range(4)).map(work, on=local(1), name="far").sink(abs)
    graph.run()
    assert [record.levelname for record in caplog.records if record.name == "mine.parts"] == ["ERROR"]
