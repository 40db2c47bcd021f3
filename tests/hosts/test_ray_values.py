"""Test unused Ray providers, and providers on a machine without Ray."""

from __future__ import annotations

import pickle
import sys
from types import SimpleNamespace

import pytest

from flowchan.errors import HostError
from flowchan.hosts.providers.ray import _Reservation, ray


def test_provider_is_compared_and_pickled_by_value():
    given = ray(2, resources={"GPU": 1, "blue": 0.5})
    assert given.hosts == ("ray-1", "ray-2")
    assert given == ray(2, resources={"blue": 0.5, "GPU": 1}) != ray(2)
    assert pickle.loads(pickle.dumps(given)) == given
    assert hash(given) == hash(pickle.loads(pickle.dumps(given)))
    assert repr(given) == "ray(2, resources={'GPU': 1.0, 'blue': 0.5})"
    assert repr(ray(1, address="10.0.0.1")) == "ray(1, address='10.0.0.1')"


def test_agent_reserves_one_core_by_default():
    assert ray(1, resources={"GPU": 1}).bundle == {"CPU": 1, "GPU": 1}
    assert ray(1, resources={"CPU": 4}).bundle == {"CPU": 4}


@pytest.mark.parametrize("amount", [-1, "1", True, None])
def test_invalid_resource_amount_is_refused(amount):
    with pytest.raises(ValueError, match=r"ray: resources\['GPU'\] must be a non-negative number, got"):
        ray(1, resources={"GPU": amount})


@pytest.mark.parametrize(("count", "error"), [(0, ValueError), ("2", TypeError)])
def test_invalid_count_is_refused(count, error):
    with pytest.raises(error, match="ray: count must be"):
        ray(count)


def test_ray_provider_without_ray_raises_with_the_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(HostError, match=r"Ray can't be imported here .*; pip install 'flowchan"):
        ray(2).listen_at()


def test_given_address_is_used_without_asking_ray(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    assert ray(2, address="10.0.0.1").listen_at() == "10.0.0.1"


NODES = [
    {"Alive": True, "NodeManagerAddress": "10.0.0.1", "Resources": {"CPU": 8.0, "memory": 1e9}},
    {"Alive": True, "NodeManagerAddress": "10.0.0.2", "Resources": {"CPU": 4.0, "node:10.0.0.2": 1.0}},
    {"Alive": False, "NodeManagerAddress": "10.0.0.3", "Resources": {"CPU": 4.0}},
]


@pytest.mark.parametrize(
    ("state", "why"),
    [
        ("INFEASIBLE", "Ray considers this infeasible, and waits for the cluster to grow"),
        ("NO_RESOURCES", "Ray waits until other jobs free their resources"),
    ],
)
def test_late_reservation_logs_requested_and_available_resources(monkeypatch, caplog, state, why):
    placement = SimpleNamespace(placement_group_table=lambda _: {"stats": {"scheduling_state": state}})
    monkeypatch.setitem(sys.modules, "ray.util.placement_group", placement)
    cluster = SimpleNamespace(nodes=lambda: NODES)
    reservation = _Reservation(None)
    reservation.warn_if_late(cluster, ray(3, resources={"GPU": 1}))
    assert not caplog.messages
    reservation.warn_at = 0.0
    for _ in range(2):
        reservation.warn_if_late(cluster, ray(3, resources={"GPU": 1}))
    assert caplog.messages == [
        (
            f"ray(3, resources={{'GPU': 1.0}}) is waiting for resources: it needs 1 CPU, 1 GPU on "
            "each of 3 different node(s), and the cluster has 2 node(s) (10.0.0.1 has 8 CPU, "
            f"10.0.0.2 has 4 CPU); {why}"
        )
    ]
