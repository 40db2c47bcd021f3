"""Test the texts and times that events derive from their fields, and the worker time of a stage."""

from __future__ import annotations

import dataclasses

import pytest

from flowchan.run.policy.events import Death, ItemSpans, ItemTraced, WorkerId
from flowchan.run.policy.scaling import Scale, Size, scaled

WORK = WorkerId("work", 1)
DEATH = Death(WORK, "was killed by SIGKILL", 1)


@pytest.mark.parametrize(
    ("death", "summary"),
    [
        (DEATH, "was killed by SIGKILL"),
        (dataclasses.replace(DEATH, over_item=1), "was killed by SIGKILL while it was processing an item"),
        (
            dataclasses.replace(DEATH, over_item=2),
            "was killed by SIGKILL while it was processing an item (death 2 over this item)",
        ),
        (dataclasses.replace(DEATH, over_item=1, retired=True), ""),
    ],
)
def test_summary_of_a_death_names_its_item(death: Death, summary: str) -> None:
    assert death.summary == summary


def test_death_uses_a_restart_unless_it_says_otherwise() -> None:
    assert (DEATH.deaths, DEATH.over_item, DEATH.unbegun, DEATH.counts) == (1, 0, 0, True)
    assert (DEATH.retired, DEATH.always, DEATH.irreplaceable, DEATH.error) == (False, False, "", None)


def test_spans_of_another_host_are_moved_to_this_clock() -> None:
    spans = ItemSpans(WORK, (((1, 2), 100, 250), ((3,), 300, 301)))
    assert spans.shifted(1000) == ItemSpans(WORK, (((1, 2), 1100, 1250), ((3,), 1300, 1301)))
    assert spans.shifted(-50).spans[0] == ((1, 2), 50, 200)


def test_traced_item_knows_its_path_and_latency() -> None:
    item = ItemTraced("read", 3, (("read", 1, 1.0, 1.5), ("work", 2, 2.0, 4.0), ("save", 1, 5.0, 7.25)))
    assert item.path == ("read", "work", "save")
    assert item.latency == 6.25


def test_worker_time_grows_with_the_number_of_workers() -> None:
    size = Size(workers=3, since=10.0, last=3, spent=5.0)
    assert [size.seconds(now) for now in (10.0, 14.0)] == [5.0, 17.0]


@pytest.mark.parametrize(
    ("workers", "new", "fewer"),
    [(5, [8, 9], []), (4, [8], []), (3, [], []), (2, [], [7]), (1, [], [5, 7]), (0, [], [2, 5, 7])],
)
def test_scaled_stage_adds_new_numbers_and_removes_the_highest(
    workers: int, new: list[int], fewer: list[int]
) -> None:
    peers = {WorkerId("work", number) for number in (7, 2, 5)}
    size, added, removed = scaled(Size(3, 10.0, 7, 5.0), Scale("work", workers), peers, 14.0)
    assert [worker.number for worker in added] == new
    assert [worker.number for worker in removed] == fewer
    assert {worker.stage for worker in (*added, *removed)} <= {"work"}
    assert size == Size(workers, 14.0, 7 + len(new), 17.0)
