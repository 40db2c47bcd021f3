"""Test C11 and R4 with a short soak. ``python -m tests.deaths.soak --minutes 60`` runs it for an hour."""

from __future__ import annotations

import random

from soak import Totals, case, one, soak

from flowchan import Graph


def test_c11_random_kills_in_random_graphs_lose_and_repeat_nothing() -> None:
    totals = soak(seconds=5, seed=1)
    print(totals)
    assert not totals.failures
    assert (totals.lost, totals.repeated, totals.disordered, totals.hangs) == (0, 0, 0, 0)
    assert totals.kills > 0


def test_soak_test_detects_a_lost_and_a_repeated_item() -> None:
    wrong = case(1, 1)
    graph = Graph("wrong")
    wrong.out = graph.source([*wrong.expected[1:], wrong.expected[-1]]).collect()
    wrong.graph, wrong.most = graph, None
    totals = Totals()
    one(wrong, random.Random(1), totals, "planted", end=0)
    assert (totals.lost, totals.repeated) == (1, 1)
    assert len(totals.failures) == 1
