"""Test that the report shows the work of a run, and that no item was lost."""

from __future__ import annotations

import dataclasses
import io
from typing import Any

import pytest
from support.waiting import wait_until
from support.worker_latch import Gate

from flowchan import Graph
from flowchan.run.observe.report import account_text, cause_text, render
from flowchan.run.policy.stats import Cause, EdgeStats, RunState, RunStats, StageStats
from flowchan.viz.live.lines import PLAIN_EVERY
from flowchan.viz.live.model import Bar, bars_line, plain_line
from flowchan.viz.live.terminal import LiveView


def stage(name: str, kind: str = "map", **values: Any) -> StageStats:
    empty = StageStats(name, kind, "thread", 1, 1, 0, 0, 0, 0, 0, 0, 0, 0.0, 0.0, 1.0, 0.0)
    return dataclasses.replace(empty, **values)


def stats(*stages: StageStats, state: RunState = "done", bottleneck: str | None = None) -> RunStats:
    edge = EdgeStats("files", "files", "counts", "processes", 12, 64, 1204, 340.0, put=1216)
    return RunStats("wordcount", state, 3.214, stages, (edge,), bottleneck, 41)


FILES = stage("files", "source", items_out=1204, rate=340.0)
COUNTS = stage(
    "counts", on="process", workers=2, items_in=1204, items_out=1200, failed=4, busy=0.97, rate=338.2
)
TOTAL = stage("total", "reduce", items_in=1200, items_out=1)


def row(report: str, first: str) -> str:
    return next(line for line in report.splitlines() if line.startswith(first))


def test_report_begins_with_graph_outcome_time_seed_and_bottleneck() -> None:
    head, bottleneck = render(stats(FILES, COUNTS, bottleneck="counts")).splitlines()[:2]
    assert head == "graph 'wordcount': done after 3.21 s, seed 41"
    assert bottleneck.startswith("bottleneck: counts (busy 97 % of the time, 2 workers")


def test_report_has_a_row_for_each_stage() -> None:
    report = render(stats(FILES, COUNTS, TOTAL))
    assert row(report, "counts ").split()[1:9] == ["map", "2", "process", "1,204", "1,200", "4", "0", "0"]
    assert "counts  1,204 = 1,200 out + 4 failed" in report.splitlines()


def test_report_has_a_row_for_each_channel() -> None:
    lines = render(stats(FILES, COUNTS)).splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("channel"))
    assert lines[start + 2].split() == [
        "files", "files", "counts", "processes", "12/64", "1,216", "1,204", "12", "340/s",
    ]  # fmt: skip


def test_columns_of_the_report_are_aligned() -> None:
    lines = render(stats(FILES, COUNTS, TOTAL)).splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("stage "))
    ends = [line.index(" %") for line in lines[start + 2 : start + 5]]
    assert len(set(ends)) == 1


def test_narrow_report_omits_redundant_columns_and_shortens_names() -> None:
    long = dataclasses.replace(COUNTS, name="counts_the_words_of_each_of_the_files_that_came_in")
    edge = EdgeStats(long.name, long.name, long.name, "processes", 12, 64, 1204, 340.0, put=1216)
    of_long = dataclasses.replace(stats(FILES, long, TOTAL), edges=(edge,), memory=10**9, seed=10**14)
    report = render(of_long, 80)
    assert max(map(len, report.splitlines())) <= 80
    for kept in ("1,204 = 1,200 out + 4 failed", "338/s", "97 %", "2 process", "12/64", "up to 1.0 GB"):
        assert kept in report
    assert render(stats(FILES, COUNTS, TOTAL), 200) == render(stats(FILES, COUNTS, TOTAL))


def test_item_balance_shows_items_in_out_and_failed() -> None:
    assert account_text(COUNTS, "done") == "1,204 = 1,200 out + 4 failed"


def test_item_balance_has_one_line_per_stage_and_no_sum() -> None:
    """A sum over all stages would be meaningless."""
    assert render(stats(FILES, COUNTS, TOTAL)).splitlines()[-3:] == [
        "files   1,204 out",
        "counts  1,204 = 1,200 out + 4 failed",
        "total   1,200 in, 1 out",
    ]


def test_item_balance_includes_items_being_processed() -> None:
    assert (
        account_text(stage("counts", items_in=10, items_out=7, in_hand=3), "running")
        == "10 = 7 out + 3 in hand"
    )


def test_report_marks_items_missing_after_a_clean_end() -> None:
    lost = stage("counts", items_in=10, items_out=7)
    assert "counts  10 ≠ 7 out: 3 MISSING" in render(stats(lost)).splitlines()
    assert account_text(stage("counts", items_in=7, items_out=10), "done") == "7 ≠ 10 out: 3 TOO MANY"


def test_items_missing_after_an_abort_count_as_discarded() -> None:
    lost = stage("counts", items_in=10, items_out=7)
    assert account_text(lost, "running") == "10 ≠ 7 out: 3 moving"
    assert account_text(dataclasses.replace(lost, discarded=3), "aborted") == "10 = 7 out + 3 discarded"
    assert account_text(dataclasses.replace(lost, discarded=2), "aborted") == (
        "10 ≠ 7 out + 2 discarded: 1 MISSING"
    )


def test_item_balance_of_a_filter_includes_dropped_items() -> None:
    report = render(stats(stage("odd", "filter", items_in=10, items_out=6, failed=1)))
    assert "odd    10 = 6 out + 3 dropped + 1 failed" in report.splitlines()


def test_report_of_active_run_states_its_window() -> None:
    recent = dataclasses.replace(stats(FILES, state="running"), elapsed=60.0, window=5.2)
    assert "\nrates, shares and bottleneck of the last 5 s\n" in render(recent)
    assert "last" not in render(dataclasses.replace(recent, window=60.0))


def test_report_covers_the_last_seconds_until_the_run_ends() -> None:
    gate = Gate()
    graph = Graph("reported")
    graph.source([1]).sink(lambda _: gate.wait())
    with graph.start() as run:
        wait_until(lambda: "of the last 1 s" in run.report(window=0.6), what=run.report)
        assert "of the last" not in run.report(window=None)
        gate.open()
        run.wait()
    assert "of the last" not in run.report(window=0.6)


@pytest.mark.parametrize(
    ("cause", "words"),
    [
        (Cause("bottleneck", "counts", ""), "bottleneck: counts (busy 97 %)"),
        (Cause("input", "files", ""), "waits for the input (files)"),
        (Cause("order", "counts", ""), "waits for the order (counts)"),
        (Cause("gil", None, ""), "waits for the interpreter lock"),
        (None, ""),
    ],
)
def test_every_view_names_the_cause(cause: Cause | None, words: str) -> None:
    slow = cause.stage if cause is not None and cause.kind == "bottleneck" else None
    now = dataclasses.replace(stats(FILES, COUNTS, state="running", bottleneck=slow), cause=cause)
    assert cause_text(now) == words
    assert (words in plain_line(now)) or slow is not None
    assert words in bars_line([Bar("counts", 1, 10, 2.0)], now)
    terminal = Terminal()
    with LiveView(terminal) as view:
        view.show(now)
    assert (cause is None) == ("bottleneck" not in terminal.getvalue())


def test_run_without_stages_or_bottleneck_has_a_report() -> None:
    report = render(RunStats("empty", "done", 0.0, (), (), None))
    assert "bottleneck: none found" in report


def test_live_view_without_a_terminal_prints_few_lines() -> None:
    now = 0.0
    stream = io.StringIO()
    with LiveView(stream, clock=lambda: now) as view:
        for _ in range(30):
            view.show(stats(FILES, COUNTS, state="running", bottleneck="counts"))
            now += PLAIN_EVERY / 10
    lines = stream.getvalue().splitlines()
    assert len(lines) == 2
    assert lines[0] == (
        "3 s running: files 1,204 340/s busy 0 % | counts (bottleneck) 1,204 338/s busy 97 "
        "% queue 12/64 failed 4"
    )


def test_plain_line_for_many_stages_shows_bottleneck_and_busiest_stages() -> None:
    many = [stage(f"s{number}", busy=number / 100) for number in range(100)]
    line = plain_line(stats(*many, bottleneck="s0"))
    assert "s0 (bottleneck)" in line
    assert "s99 " in line
    assert line.endswith("and 94 quieter stages")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_live_view_on_a_terminal_is_a_table() -> None:
    stream = Terminal()
    with LiveView(stream) as view:
        view.show(stats(FILES, COUNTS, state="running", bottleneck="counts"))
        view.print_line("[stopping]")
    for words in ("▶ counts", "the bottleneck: counts", "12/64", "1,204", "[stopping]"):
        assert words in stream.getvalue()
