"""Providers as text."""

from __future__ import annotations

import pytest

from flowchan.hosts.local import local
from flowchan.hosts.ray import ray
from flowchan.hosts.slurm import slurm
from flowchan.hosts.spec import parse
from flowchan.hosts.ssh import ssh

SPECS = {
    "local:2": local(2),
    "ssh:gpu1": ssh("gpu1"),
    "ssh:gpu1,user@gpu2": ssh("gpu1", "user@gpu2"),
    "slurm": slurm(),
    "ray:4": ray(4),
}


@pytest.mark.parametrize("spec", SPECS)
def test_a_text_means_a_provider(spec):
    assert parse(spec) == SPECS[spec]


@pytest.mark.parametrize(
    "spec",
    ["", "local", "local:", "local:0", "local:x", "ray:-1", "ray:²", "ssh", "ssh:", "k8s:4", "slurm:2"],
)
def test_what_means_none_is_refused_with_the_forms_that_do(spec):
    with pytest.raises(
        ValueError, match="hosts are given as local:2, ssh:gpu1,user@gpu2, slurm or ray:4, not"
    ):
        parse(spec)


def test_a_host_that_is_none_is_refused():
    with pytest.raises(ValueError, match="ssh: a host must not be empty"):
        parse("ssh:gpu1,,gpu2")
