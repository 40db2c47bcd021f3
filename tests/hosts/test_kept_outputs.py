"""Large items between two stages of a pool stay on their host until the reader's host fetches them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from traceback import format_exception

import pytest
from kept_items import SIZE, CheckAndKill, MakeAndKill, check, driver_bytes, make

from flowchan import Graph, RunError, _core
from flowchan.hosts import local
from flowchan.hosts.kept_outputs import keeps_outputs
from flowchan.run.policy.plan import plan


def test_large_items_between_hosts_do_not_pass_through_driver():
    graph, pool = Graph("direct"), local(2)
    made = graph.source(range(40)).map(make, on=pool, workers=2)
    checked = made.map(check, on=pool, workers=2).collect()
    with graph.start() as run:
        assert run.wait()[checked] == list(range(40))
        assert driver_bytes(run) < 40 * SIZE / 2


def test_small_items_and_items_for_the_program_pass_through_driver():
    graph, pool = Graph("indirect"), local(2)
    made = graph.source(range(4)).map(make, on=pool)
    small = made.map(check, on=pool).map(str, on=pool).collect()
    large = graph.source(range(4)).map(make, on=pool).collect()
    result = graph.run()
    assert result[small] == ["0", "1", "2", "3"]
    assert result[large] == [make(number) for number in range(4)]


@pytest.mark.any_value
@pytest.mark.parametrize("ordered", [True, False])
def test_items_of_killed_hosts_are_recreated_exactly_once(tmp_path: Path, ordered: bool):
    graph, pool = Graph("deaths"), local(3)
    (tmp_path / "made").mkdir()
    (tmp_path / "checked").mkdir()
    killing_make = MakeAndKill(tmp_path / "made", frozenset({17, 60, 95}))
    killing_check = CheckAndKill(tmp_path / "checked", frozenset({30, 33, 80}))
    made = graph.source(range(120)).map(killing_make, on=pool, workers=3, ordered=ordered)
    checked = made.map(killing_check, on=pool, workers=3, ordered=ordered).collect()
    result = graph.run()[checked]
    assert (result if ordered else sorted(result)) == list(range(120))
    assert len(list((tmp_path / "made").iterdir())) == 3
    assert len(list((tmp_path / "checked").iterdir())) == 3


def test_flat_map_keeps_order_of_its_items_after_deaths(tmp_path: Path):
    graph, pool = Graph("several"), local(2)
    made = graph.source(range(0, 60, 3)).flat_map(three, on=pool, workers=2)
    checked = made.map(CheckAndKill(tmp_path, frozenset({10, 40})), on=pool, workers=2).collect()
    assert graph.run()[checked] == list(range(60))


def three(number: int) -> Iterator[bytes]:
    yield from (make(number + more) for more in range(3))


def test_chain_of_three_stages_recovers_items_of_killed_hosts(tmp_path: Path):
    graph, pool = Graph("chain"), local(2)
    made = graph.source(range(60)).map(make, on=pool, workers=2)
    copied = made.map(bytes, on=pool, workers=2)
    checked = copied.map(CheckAndKill(tmp_path, frozenset({20, 21, 50})), on=pool, workers=2).collect()
    assert graph.run()[checked] == list(range(60))


def test_reader_that_ends_early_ends_the_stage_that_makes_items():
    graph, pool = Graph("early"), local(2)
    made = graph.source(range(1000)).map(make, on=pool, workers=2)
    checked = made.map(check, on=pool, workers=2).take(5).collect()
    assert graph.run()[checked] == list(range(5))
    assert _core._references() == 0


def test_function_that_makes_fewer_items_in_replay_fails_the_run(tmp_path: Path):
    graph, pool = Graph("fewer"), local(1)
    made = graph.source(range(40)).flat_map(FewerOnceKilled(tmp_path), on=pool, workers=2)
    made.map(CheckAndKill(tmp_path, frozenset({20})), on=pool, workers=2).collect()
    with pytest.raises(RunError) as failed:
        graph.run()
    assert "was lost with the host that made it" in "".join(format_exception(failed.value))


class FewerOnceKilled:
    """Makes items until an agent has been killed, and none afterwards."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, number: int) -> Iterator[bytes]:
        if not (self.folder / "20").exists():
            yield make(number)


def test_only_stages_that_handle_each_item_separately_keep_outputs():
    graph, pool, other = Graph("which"), local(2), local(1)
    source = graph.source(range(4))
    source.map(make, on=pool, name="kept").map(check, on=pool, name="reader").collect()
    source.map(make, on=pool, name="to program").map(check, name="here").collect()
    source.map(make, on=other, name="to another pool").map(check, on=pool, name="far").collect()
    source.map(make, on=pool, name="batched").batch(2).map(len, on=pool, name="after").collect()
    planned = plan(graph._blueprint(), 0, 0)
    workers = {one.id: one for one in planned.workers}
    of_pool = {
        id for id in workers if id.stage in ("kept", "reader", "to program", "far", "batched", "after")
    }
    keeping = {id.stage for id in of_pool if keeps_outputs(planned, workers[id], of_pool)}
    assert keeping == {"kept"}
