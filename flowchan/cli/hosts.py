"""Print the properties of hosts as a table, for ``flowchan hosts check``."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from flowchan.hosts.probe import Facts

HEADS = ("host", "Python", "flowchan", "round trip", "bandwidth", "cores", "speed", "memory", "GPUs")


def check(spec: str) -> bool:
    """Print a row for each host that answers, and a line for each problem.

    Args:
        spec: Value of ``--hosts``.

    Returns:
        True if all hosts work.

    Raises:
        HostError: The hosts cannot be determined.
    """
    from flowchan.hosts.probe import check_hosts
    from flowchan.hosts.spec import parse

    try:
        provider = parse(spec).provider
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="HOSTS") from error
    found = check_hosts(provider)
    answered = [facts for facts in found if facts.rate]
    if answered:
        for line in _table([HEADS, *map(_row, answered)]):
            click.echo(line)
    for facts in found:
        if facts.problem:
            click.echo(f"flowchan: {facts.problem}", err=True)
    return not any(facts.problem for facts in found)


def _row(facts: Facts) -> tuple[str, ...]:
    gpus = ", ".join(f"{count} × {name}" for name, count in Counter(facts.gpus).items())
    return (
        facts.host,
        facts.python,
        facts.flowchan,
        f"{facts.round_trip * 1e3:.2f} ms",
        f"{facts.rate / 1e6:,.0f} MB/s",
        str(facts.cores),
        f"{facts.speed:.2f}" if facts.speed else "unknown",
        f"{facts.memory / 2**30:.1f} GiB",
        gpus or "none",
    )


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
