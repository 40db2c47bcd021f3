"""A provider as text, as commands take it: ``local:2``, ``ssh:gpu1,user@gpu2``, ``slurm``, ``ray:4``."""

from __future__ import annotations

from flowchan.hosts.local import local
from flowchan.hosts.provider import Provider
from flowchan.hosts.ray import ray
from flowchan.hosts.slurm import slurm
from flowchan.hosts.ssh import ssh

FORMS = "local:2, ssh:gpu1,user@gpu2, slurm or ray:4"


def parse(spec: str) -> Provider:
    """The provider that ``spec`` means. Raises ``ValueError``."""
    kind, colon, rest = spec.partition(":")
    if kind == "slurm" and not colon:
        return slurm()
    if kind == "ssh" and rest:
        return ssh(*rest.split(","))
    if kind in ("local", "ray") and rest.isascii() and rest.isdigit() and int(rest):
        return local(int(rest)) if kind == "local" else ray(int(rest))
    raise ValueError(f"hosts are given as {FORMS}, not {spec!r}")
