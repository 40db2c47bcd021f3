"""Record the cores and relative speeds of hosts, and assign workers to the hosts.

A pool is an immutable value and cannot store the reports of hosts. This module stores them, by provider.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping

from flowchan.hosts.providers.provider import Provider

log = logging.getLogger("flowchan.hosts")

_lock = threading.Lock()  # guards both tables below
_reported: dict[Provider, dict[str, int]] = {}  # cores that hosts have reported
_speeds: dict[Provider, dict[str, float]] = {}  # relative speeds measured by a calibration


def report_cores(provider: Provider, host: str, cores: int) -> None:
    """Record the number of cores that a host reports."""
    with _lock:
        _reported.setdefault(provider, {})[host] = cores


def known_cores(provider: Provider) -> dict[str, int]:
    """Return the number of cores of each host, as far as it is known.

    Numbers from the provider take precedence over numbers that hosts reported.
    """
    own = provider.cores
    if own is not None:
        return dict(zip(provider.hosts, own, strict=True))
    with _lock:
        return dict(_reported.get(provider, {}))


def keep_speeds(provider: Provider, speeds: Mapping[str, float]) -> None:
    """Record the relative speeds of all of a provider's hosts."""
    with _lock:
        _speeds[provider] = dict(speeds)


def known_speeds(provider: Provider) -> dict[str, float]:
    """Return the relative speeds of a provider's hosts; empty before the first calibration."""
    with _lock:
        return dict(_speeds.get(provider, {}))


def relative(rates: Mapping[str, float]) -> dict[str, float]:
    """Return rates as fractions of the highest one, rounded to 0.01 and at least 0.01."""
    highest = max(rates.values(), default=1.0)
    return {host: max(0.01, round(rate / highest, 2)) for host, rate in rates.items()}


def deal(pool: str, count: int, cores: Mapping[str, int], weights: Mapping[str, float]) -> tuple[str, ...]:
    """Assign workers to hosts in turn, like ``sfork`` of lua---parallel.

    Each host gets one worker per turn, up to one worker per core. A host with half the highest weight gets a
    worker every second turn. When all cores are taken, the function warns once and continues the turns.

    Args:
        pool: Pool's name, for the warning.
        count: Number of workers.
        cores: Number of cores of each host, in the order of turns.
        weights: Relative number of workers of each host (default for a host without an entry: 1).

    Returns:
        The host of each worker.
    """
    total = sum(cores.values())
    if count > total:
        log.warning(
            "%s has %d cores in total, but gets %d workers; the workers share cores", pool, total, count
        )
    taken = dict.fromkeys(cores, 0)
    dealt = []
    for number in range(count):
        free = [host for host in cores if taken[host] < cores[host] or number >= total]
        before = cores if number >= total else {}
        host = min(free, key=lambda name: (taken[name] + 1 - before.get(name, 0)) / weights.get(name, 1))
        taken[host] += 1
        dealt.append(host)
    return tuple(dealt)
