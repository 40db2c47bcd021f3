"""Test the parsing of providers and pools from text."""

from __future__ import annotations

import pytest

from flowchan import hosts
from flowchan.hosts.providers.local import local
from flowchan.hosts.providers.ray import ray
from flowchan.hosts.providers.slurm import slurm
from flowchan.hosts.providers.ssh import ssh
from flowchan.hosts.spec import parse, pool_from
from flowchan.transport.link_events import PEER_TIMEOUT_S

SPECS = {
    "local:2": local(2),
    "ssh:gpu1": ssh("gpu1"),
    "ssh:gpu1,user@gpu2": ssh("gpu1", "user@gpu2"),
    "ssh:gpu1,gpu2,python=~/a=b/python": ssh("gpu1", "gpu2", python="~/a=b/python"),
    "ssh:gpu1,address=10.0.0.1": ssh("gpu1", address="10.0.0.1"),
    "slurm": slurm(),
    "slurm:address=10.0.0.1": slurm(address="10.0.0.1"),
    "ray:4,address=10.0.0.1": ray(4, address="10.0.0.1"),
    "ray:4": ray(4),
    "ray:4,GPU=1,big=0.5": ray(4, resources={"GPU": 1, "big": 0.5}),
    "ssh:gpu1,user@tls": ssh("gpu1", "user@tls"),
}
POOLS = {
    "local:2,tls": hosts.local(2, tls=True),
    "ssh:gpu1,tls,gpu2": hosts.ssh("gpu1", "gpu2", tls=True),
    "slurm:tls": hosts.slurm(tls=True),
    "slurm:peer_timeout=2.5": hosts.slurm(peer_timeout=2.5),
    "ray:4,peer_timeout=30,GPU=1": hosts.ray(4, resources={"GPU": 1}, peer_timeout=30),
}


@pytest.mark.parametrize("spec", SPECS)
def test_host_spec_is_parsed_as_a_provider(spec):
    assert parse(spec) == (SPECS[spec], PEER_TIMEOUT_S, False)


@pytest.mark.parametrize("spec", POOLS)
def test_host_spec_is_parsed_as_a_pool_with_options(spec):
    assert pool_from(spec) == POOLS[spec]


@pytest.mark.parametrize(
    "spec",
    [
        "",
        "local",
        "local:",
        "local:0",
        "local:x",
        "ray:-1",
        "ray:²",
        "ssh",
        "ssh:",
        "k8s:4",
        "slurm:",
        "slurm:2",
    ],
)
def test_invalid_host_spec_is_refused_with_the_allowed_forms(spec):
    with pytest.raises(
        ValueError, match="hosts must look like local:2, ssh:gpu1,user@gpu2, slurm or ray:4, got"
    ):
        parse(spec)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            "local:2,python=x",
            "'local:2,python=x': local has no option python=; its options are tls and peer_timeout=",
        ),
        ("ssh:a,user=b", "ssh has no option user=; its options are tls, python=, address= and peer_timeout="),
        ("ssh:a,tls=1", "ssh has no option tls=; its options are tls, python=, address= and peer_timeout="),
        ("ray:2,GPU=x", "'ray:2,GPU=x': GPU must be a non-negative number, got 'x'"),
        (
            "local:2,peer_timeout=0",
            "'local:2,peer_timeout=0': peer_timeout must be greater than 0 seconds, got 0",
        ),
        ("local:2,peer_timeout=-1", "peer_timeout must be a non-negative number, got '-1'"),
        ("k8s:2,a=b", "hosts must look like"),
        ("ssh:python=x", "hosts must look like"),
    ],
)
def test_unknown_option_in_host_spec_is_refused_with_allowed_options(spec, message):
    with pytest.raises(ValueError, match=message):
        parse(spec)


def test_empty_host_name_is_refused():
    with pytest.raises(ValueError, match="ssh: a host must not be empty"):
        parse("ssh:gpu1,,gpu2")
