"""Test the values that say where workers run."""

from __future__ import annotations

import pytest

from flowchan.declare.placements import HOSTS, PLACEMENTS, PROCESS, THREAD, Placement, placement_argument

TWO = Placement("pool", True, hosts=("a", "b"), shares=(3, 1))


@pytest.mark.parametrize(
    ("placement", "remote"),
    [
        (THREAD, False),
        (PROCESS, False),
        (HOSTS, True),
        (TWO, True),
        (Placement("pool", True, missing="no hosts"), True),
    ],
)
def test_placement_is_remote_if_its_hosts_are_known_or_expected(placement: Placement, remote: bool) -> None:
    assert placement.is_remote is remote


def test_weights_map_each_host_to_its_share() -> None:
    assert TWO.weights() == {"a": 3, "b": 1}
    assert Placement("pool", True, hosts=("a", "b")).weights() == {}
    assert THREAD.weights() == {}


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [(THREAD, PROCESS, True), (THREAD, TWO, False), (TWO, THREAD, False), (TWO, TWO, False)],
)
def test_placements_without_hosts_have_the_same_host(one: Placement, other: Placement, same: bool) -> None:
    assert one.has_same_host(other) is same


def test_placement_argument_is_a_placement_or_its_word() -> None:
    assert placement_argument("map", TWO) is TWO
    assert [placement_argument("map", word) for word in PLACEMENTS] == [THREAD, PROCESS, HOSTS]
    assert [str(placement) for placement in (THREAD, PROCESS, HOSTS)] == ["thread", "process", "hosts"]
    with pytest.raises(ValueError, match=r'map: on must be "thread", "process", "hosts" or a pool .*, got'):
        placement_argument("map", "nowhere")
    with pytest.raises(TypeError, match=r"map: on must be .*, got 7 \(int\)"):
        placement_argument("map", 7)
