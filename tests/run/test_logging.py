"""Test that the program's loggers handle records from worker processes, and that the run logs events."""

from __future__ import annotations

import logging
import os
import signal
from pathlib import Path

import pytest
from runs import script, stage_of, start
from support.worker_latch import Gate

from flowchan import Graph


def log_item(number: int) -> int:
    log = logging.getLogger("own.parts")
    log.debug("not asked for")
    log.info("item %d", number, extra={"size": 3, "odd": object()})
    try:
        1 / (number - 1)
    except ZeroDivisionError:
        log.exception("at one")
    return number


def names(caplog: pytest.LogCaptureFixture, logger: str, level: int) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.name == logger and one.levelno == level]


@pytest.mark.usefixtures("_method")
def test_program_gets_the_log_records_from_worker_processes(caplog: pytest.LogCaptureFixture) -> None:
    """Each record arrives once, with its stage and number, under every start method."""
    caplog.set_level(logging.INFO)
    graph = Graph("logged")
    graph.source(range(4)).map(log_item, on="process", workers=2, name="loud").sink(abs)
    graph.run()
    records = [record for record in caplog.records if record.name == "own.parts"]
    assert sorted(names(caplog, "own.parts", logging.INFO)) == [f"item {n}" for n in range(4)]
    for record in records:
        about = vars(record)
        assert (about["stage"], about["host"]) == ("loud", "")
        assert record.processName == f"flowchan logged/loud {about['number']}"
        assert record.funcName == "log_item"
        assert about["number"] in (1, 2)
        assert record.process != os.getpid()
    (failed,) = (record for record in records if record.levelno == logging.ERROR)
    assert failed.exc_text is not None
    assert "ZeroDivisionError" in failed.exc_text


@pytest.mark.usefixtures("_method")
def test_logging_levels_and_handlers_of_the_program_apply(caplog: pytest.LogCaptureFixture) -> None:
    """One logger has a lower level than the root logger, and keeps its records to itself."""
    own, kept = logging.getLogger("own.parts"), Kept()
    before = own.level, own.propagate
    own.setLevel(logging.DEBUG)
    own.propagate = False
    own.addHandler(kept)
    caplog.set_level(logging.ERROR)
    graph = Graph("logged")
    graph.source([0]).map(log_item, on="process").sink(abs)
    try:
        graph.run()
    finally:
        own.removeHandler(kept)
        own.setLevel(before[0])
        own.propagate = before[1]
    assert kept.reported_all == ["not asked for", "item 0"]
    assert not names(caplog, "own.parts", logging.INFO)


class Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.reported_all: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.reported_all.append(record.getMessage())


def test_failing_logging_filter_in_the_program_does_not_end_run(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(record: logging.LogRecord) -> bool:
        raise LookupError("a filter")

    # otherwise logging prints the exception, as for an error in a handler
    monkeypatch.setattr(logging, "raiseExceptions", False)
    monkeypatch.setattr(logging.getLogger("own.parts"), "filters", [refuse])
    monkeypatch.setattr(logging.getLogger("flowchan.run"), "filters", [refuse])
    caplog.set_level(logging.DEBUG)
    graph = Graph("logged")
    result = graph.source(range(4)).map(log_item, on="process").collect()
    assert graph.run()[result] == [0, 1, 2, 3]


def test_deaths_restarts_and_blame_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    def fragile(number: int) -> int:
        if number == 2:
            os._exit(7)
        return number

    caplog.set_level(logging.DEBUG, logger="flowchan.run")
    graph = Graph("fragile")
    numbers = graph.source(range(5)).map(fragile, on="process", name="crack", max_deaths=2)
    numbers.collect()
    numbers.errors.sink(lambda failed: None)
    graph.run()
    about = [record for record in caplog.records if getattr(record, "stage", None) == "crack"]
    assert {vars(record)["number"] for record in about} == {1}
    starts = [one for one in names(caplog, "flowchan.run", logging.DEBUG) if "crack 1 starts as pid" in one]
    assert len(starts) == 3
    first, second = names(caplog, "flowchan.run", logging.WARNING)
    assert first.endswith(
        "exited with code 7 without finishing while it was processing an item; it is replaced"
    )
    assert "while it was processing an item (death 2 over this item); it is replaced" in second
    (blame,) = names(caplog, "flowchan.run", logging.ERROR)
    assert blame.startswith(
        "stage 'crack' gave up on item 2: 2 workers died one after another while processing this item"
    )


def test_run_logs_its_start_and_its_end(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="flowchan.run")
    graph = Graph("quick")
    graph.source(range(4)).sink(abs)
    graph.run(seed=3)
    begins, ends = names(caplog, "flowchan.run", logging.INFO)
    assert begins == "graph 'quick' starts with 2 workers, seed 3"
    assert ends.startswith("graph 'quick' is done after ")


@pytest.mark.usefixtures("short_grace")
def test_worker_that_does_not_end_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    def stuck(number: int) -> int:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        held.wait()
        return number

    held = Gate()
    graph = Graph("stuck")
    graph.source([1]).map(stuck, on="process", name="slow").sink(abs)
    run = graph.start()
    held.wait_held()
    run.abort()
    run.wait()
    reported = names(caplog, "flowchan.run", logging.WARNING)
    assert [text.rpartition(" ")[2] for text in reported] == ["terminated", "killed"]
    assert all(text.startswith("worker slow 1 did not end within ") for text in reported)


def test_program_without_logging_setup_prints_no_records(tmp_path: Path) -> None:
    program = """
        import os
        from flowchan import Graph

        graph = Graph("fragile")
        good = graph.source([1]).map(lambda _: os._exit(7), on="process", max_deaths=2)
        good.collect()
        good.errors.sink(lambda failed: None)
        if __name__ == "__main__":
            graph.run()
    """
    with start(script(tmp_path, program)) as process:
        assert process.communicate() == ("", "")


def test_stats_list_the_pids_of_worker_processes() -> None:
    gate = Gate()
    graph = Graph("pids")
    held = graph.source(range(2)).map(lambda _: gate.wait(os.getpid()), on="process", workers=2, name="held")
    pids = held.map(str, name="threads").collect()
    with graph.start() as run:
        gate.wait_held(2)
        reported = stage_of(run, "held").pids
        assert stage_of(run, "threads").pids == ()
        gate.open()
    assert sorted(map(str, reported)) == sorted(run.wait()[pids])
    assert stage_of(run, "held").pids == ()


@pytest.mark.usefixtures("_method")
def test_ps_shows_the_stage_and_number_of_each_worker() -> None:
    graph = Graph("ps")
    called = graph.source([1]).map(own_name, on="process", name="a_stage_with_a_name").collect()
    assert graph.run()[called] == ["a_stage_with_ 1"]


def own_name(_: int) -> str:
    return Path("/proc/self/comm").read_text().strip()


class Leaves(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        if record.getMessage().startswith("graph 'left' is done"):
            raise SystemExit


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_logging_handler_that_raises_system_exit_does_not_block_threads(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="flowchan.run")
    graph, handler = Graph("left"), Leaves()
    total = graph.source([1, 2]).reduce(int.__add__)
    logging.getLogger("flowchan.run").addHandler(handler)
    try:
        assert graph.run()[total] == 3
    finally:
        logging.getLogger("flowchan.run").removeHandler(handler)
