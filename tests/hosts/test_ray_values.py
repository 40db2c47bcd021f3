"""What a Ray provider is before it is used, and where Ray is missing."""

from __future__ import annotations

import pickle
import sys

import pytest

from flowchan.errors import HostError
from flowchan.hosts.ray import ray


def test_a_provider_is_a_value():
    given = ray(2, resources={"GPU": 1, "blue": 0.5})
    assert given.hosts == ("ray-1", "ray-2")
    assert given == ray(2, resources={"blue": 0.5, "GPU": 1}) != ray(2)
    assert pickle.loads(pickle.dumps(given)) == given
    assert hash(given) == hash(pickle.loads(pickle.dumps(given)))
    assert repr(given) == "ray(2, resources={'GPU': 1.0, 'blue': 0.5})"
    assert repr(ray(1, address="10.0.0.1")) == "ray(1, address='10.0.0.1')"


def test_each_agent_takes_a_core_unless_told_otherwise():
    assert ray(1, resources={"GPU": 1}).bundle == {"CPU": 1, "GPU": 1}
    assert ray(1, resources={"CPU": 4}).bundle == {"CPU": 4}


@pytest.mark.parametrize("amount", [-1, "1", True, None])
def test_an_amount_that_is_none_is_refused(amount):
    with pytest.raises(ValueError, match=r"ray: resources\['GPU'\] must be a number of at least 0, not"):
        ray(1, resources={"GPU": amount})


@pytest.mark.parametrize(("count", "error"), [(0, ValueError), ("2", TypeError)])
def test_a_count_that_is_none_is_refused(count, error):
    with pytest.raises(error, match="ray: count must be"):
        ray(count)


def test_without_ray_the_remedy_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(HostError, match=r"Ray can't be imported here .*: pip install ray"):
        ray(2).listen_at()


def test_an_address_that_was_given_is_taken_without_asking_ray(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    assert ray(2, address="10.0.0.1").listen_at() == "10.0.0.1"
