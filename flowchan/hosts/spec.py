"""A provider as text, as commands take it: ``local:2``, ``ssh:gpu1,user@gpu2``, ``slurm``, ``ray:4``."""

from __future__ import annotations

from collections.abc import Mapping

from flowchan.hosts.local import local
from flowchan.hosts.provider import Provider
from flowchan.hosts.ray import ray
from flowchan.hosts.slurm import slurm
from flowchan.hosts.ssh import ssh

FORMS = "local:2, ssh:gpu1,user@gpu2, slurm or ray:4"
OPTIONS: Mapping[str, tuple[str, ...]] = {
    "local": (),
    "ssh": ("python", "address"),
    "slurm": ("address",),
    "ray": ("address",),
}
"""What may be said of each, behind the hosts: ``ssh:gpu1,python=~/venv/bin/python``."""


def parse(spec: str) -> Provider:
    """The provider that ``spec`` means. Raises ``ValueError``."""
    kind, colon, rest = spec.partition(":")
    words = rest.split(",") if colon else []
    given = [word for word in words if "=" not in word]
    options = dict(word.split("=", 1) for word in words if "=" in word)
    for name in options:
        if name not in OPTIONS.get(kind, (name,)):
            takes = " and ".join(f"{known}=" for known in OPTIONS[kind]) or "no options"
            raise ValueError(f"{spec!r}: {kind} takes {takes}, not {name}=")
    if kind == "ssh" and given not in ([], [""]):
        return ssh(*given, **options)
    if kind == "slurm" and not given and bool(colon) == bool(options):
        return slurm(**options)
    if kind in ("local", "ray") and len(given) == 1 and (count := _count(given[0])):
        return local(count) if kind == "local" else ray(count, address=options.get("address"))
    raise ValueError(f"hosts are given as {FORMS}, not {spec!r}")


def _count(word: str) -> int:
    return int(word) if word.isascii() and word.isdigit() else 0
