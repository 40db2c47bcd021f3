"""Parse a pool's text form, for commands: ``local:2``, ``ssh:gpu1,user@gpu2``, ``slurm``, ``ray:4``.

Options follow the hosts, as in ``ssh:gpu1,gpu2,tls,peer_timeout=30`` and ``ray:4,GPU=1``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from flowchan.hosts.host_pool import Pool, pool_of
from flowchan.hosts.providers.local import local
from flowchan.hosts.providers.provider import Provider
from flowchan.hosts.providers.ray import ray
from flowchan.hosts.providers.slurm import slurm
from flowchan.hosts.providers.ssh import ssh
from flowchan.transport.link_events import PEER_TIMEOUT_S

FORMS = "local:2, ssh:gpu1,user@gpu2, slurm or ray:4"
OPTIONS: Mapping[str, tuple[str, ...]] = {
    "local": (),
    "ssh": ("python", "address"),
    "slurm": ("address",),
    "ray": ("address",),  # Ray's resource names are also accepted
}
"""Options of each provider. All pools also have the options ``tls`` and ``peer_timeout=``."""


class Spec(NamedTuple):
    """Provider and options of a pool, parsed from its text form."""

    provider: Provider
    peer_timeout: float
    tls: bool


def pool_from(spec: str) -> Pool:
    """Make a pool from its text form. Raise ``ValueError`` if it is invalid."""
    return pool_of("parse", *parse(spec))


def parse(spec: str) -> Spec:
    """Parse a pool's text form.

    Raise ``ValueError`` if the text is invalid. The word ``tls`` is the option; write ``user@tls`` for a host
    with this name.
    """
    kind, colon, rest = spec.partition(":")
    words = rest.split(",") if colon else []
    given = [word for word in words if "=" not in word and word != "tls"]
    options = dict(word.split("=", 1) for word in words if "=" in word)
    peer_timeout = _number(spec, "peer_timeout", options.pop("peer_timeout", str(PEER_TIMEOUT_S)))
    if not peer_timeout:
        raise ValueError(f"{spec!r}: peer_timeout must be greater than 0 seconds, got 0")
    resources = {
        name: _number(spec, name, options.pop(name))
        for name in list(options)
        if kind == "ray" and name not in OPTIONS[kind]
    }
    for name in options:
        if name not in OPTIONS.get(kind, (name,)):
            takes = ", ".join(["tls", *(f"{known}=" for known in OPTIONS[kind])])
            raise ValueError(
                f"{spec!r}: {kind} has no option {name}=; its options are {takes} and peer_timeout="
            )
    provider = _provider(kind, given, options, resources)
    if provider is None or words[:1] == [""]:
        raise ValueError(f"hosts must look like {FORMS}, got {spec!r}")
    return Spec(provider, peer_timeout, "tls" in words)


def _provider(
    kind: str, given: list[str], options: dict[str, str], resources: dict[str, float]
) -> Provider | None:
    if kind == "ssh" and given not in ([], [""]):
        return ssh(*given, **options)
    if kind == "slurm" and not given:
        return slurm(**options)
    if kind in ("local", "ray") and len(given) == 1 and (count := _count(given[0])):
        return local(count) if kind == "local" else ray(count, resources=resources or None, **options)
    return None


def _number(spec: str, name: str, word: str) -> float:
    try:
        number = float(word)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise ValueError(f"{spec!r}: {name} must be a non-negative number, got {word!r}")
    return number


def _count(word: str) -> int:
    return int(word) if word.isascii() and word.isdigit() else 0
