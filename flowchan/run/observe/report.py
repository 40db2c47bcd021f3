"""Format the report of a run as text (R8).

The report begins with the bottleneck, advice, the numbers of workers that the run has chosen, and warnings.
Tables of stages and channels follow, and then the item counts of each stage.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from flowchan.declare.operators import OPERATORS
from flowchan.run.observe.what_if import advice
from flowchan.run.policy.explain import amount, starting_text
from flowchan.run.policy.stats import CauseKind, EdgeStats, HostStats, RunState, RunStats, StageStats


def render(stats: RunStats, width: int = 10**6) -> str:
    """Format the report of a run, which may be active or have ended.

    If the report is wider than ``width``, drop columns with redundant contents first, and then shorten names.
    """
    first = f"graph {stats.graph!r}: {stats.state} {_after(stats)} {stats.elapsed:.2f} s, seed {stats.seed}"
    if stats.memory:
        memory = f"channels hold up to {amount(stats.memory)}"
        first += f", {memory}" if len(first) + len(memory) + 2 <= width else f",\n{memory}"
    if recent := recent_text(stats):
        first += f";\nrates, shares and bottleneck of the {recent}"
    head = [first, bottleneck_text(stats)]
    head += [f"advice: {text}" for text in filter(None, [advice(stats)])]
    head += _scaling_lines(stats)
    head += [f"warning: {text}" for text in stats.warnings]
    accounts = [[stage.name, account_text(stage, stats.state)] for stage in stats.stages]
    tables = [
        _stage_table(stats, width),
        _edge_table(stats.edges, width),
        _host_table(stats.hosts, width),
        table(["stage", "account"], accounts, left={0, 1}, width=width),
    ]
    return "\n".join(head + [f"\n{text}" for text in tables if text])


def recent_text(stats: RunStats) -> str:
    """Return a text such as "last 5 s" if rates and shares cover only part of the run, otherwise ""."""
    return f"last {stats.window:.0f} s" if 0 < stats.window < stats.elapsed - 0.5 else ""


def bottleneck_text(stats: RunStats) -> str:
    """Describe what limits the run, which may be a stage or something else, and why."""
    cause, slow = stats.cause, _bottleneck(stats)
    if cause is not None and cause.kind != "bottleneck":
        return f"bottleneck: {_CAUSES[cause.kind]} ({cause.why})"
    if slow is None:
        return "bottleneck: none found"
    workers = "1 worker" if slow.workers == 1 else f"{slow.workers} workers"
    limit = "" if slow.rate_limit is None else f" of at most {slow.rate_limit:g}/s"
    return (
        f"bottleneck: {slow.name} (busy {share(slow.busy)} of the time, {workers} "
        f"on={slow.on!r}, {rate(slow.rate)}{limit})"
    )


def _scaling_lines(stats: RunStats) -> Iterator[str]:
    """Yield a line for each stage that the run has scaled, with the changes to its number of workers."""
    numbers: dict[str, list[int]] = {}
    for decision in stats.decisions:
        numbers.setdefault(decision.stage, [decision.workers_before]).append(decision.workers)
    for stage, seen in numbers.items():
        yield f"workers of {stage}: {' → '.join(map(str, seen))}"


def cause_text(stats: RunStats) -> str:
    """Describe in a few words what limits the run, or return an empty string if this is unknown."""
    cause, slow = stats.cause, _bottleneck(stats)
    if cause is not None and cause.kind != "bottleneck":
        stage = "" if cause.stage is None else f" ({cause.stage})"
        return f"waits for {_CAUSES[cause.kind]}{stage}"
    return "" if slow is None else f"bottleneck: {slow.name} (busy {share(slow.busy)})"


def _bottleneck(stats: RunStats) -> StageStats | None:
    return next((stage for stage in stats.stages if stage.name == stats.bottleneck), None)


_CAUSES: dict[CauseKind, str] = {
    "input": "the input",
    "consumer": "the program",
    "order": "the order",
    "gil": "the interpreter lock",
    "cores": "the cores",
    "memory": "the memory",
    "in_flight": "the items in flight",
    "starting": "the start",
}


def count(number: int) -> str:
    """Format a number of items."""
    return f"{number:,}"


def rate(number: float) -> str:
    """Format a rate in items per second."""
    return f"{number:,.0f}/s" if number >= 10 or number == 0 else f"{number:.2g}/s"


def share(part: float) -> str:
    """Format a fraction as a percentage."""
    return f"{100 * part:.0f} %"


def workers_text(stage: StageStats) -> str:
    """Return the number of workers, their placement, and how many are still starting, if any."""
    return ", ".join(filter(None, [f"{count(stage.workers)} {stage.on}", starting_text(stage)]))


def _after(stats: RunStats) -> str:
    return "for" if stats.state in ("running", "stopping") else "after"


def account_text(stage: StageStats, state: RunState) -> str:
    """Describe what happened to the items that a stage took, including failed members of batches."""
    members = f", {count(stage.members_failed)} members failed" if stage.members_failed else ""
    return _account(stage, state) + members


def _account(stage: StageStats, state: RunState) -> str:
    """Describe what happened to the items that a stage took.

    If the operator has one output per item, outputs and failures must add up to the inputs. Otherwise, the
    text shows the difference as items that are still moving or as missing items.
    """
    rest = [
        ("failed", stage.failed), ("in hand", stage.in_hand), ("unwanted", stage.unwanted),
        ("discarded", stage.discarded),
    ]  # fmt: skip
    missing = stage.items_in - stage.items_out - sum(number for _, number in rest)
    operator = OPERATORS[stage.kind]
    if operator.begins:
        return f"{count(stage.items_out)} out"
    if operator.lets_go and missing >= 0:
        return f"{count(stage.items_in)} = {_sum(stage.items_out, (operator.lets_go, missing), *rest)}"
    if not operator.owes:
        return f"{count(stage.items_in)} in, {_sum(stage.items_out, *rest)}"
    if not missing:
        return f"{count(stage.items_in)} = {_sum(stage.items_out, *rest)}"
    word = _DIFFERENCE.get(state, "MISSING" if missing > 0 else "TOO MANY")
    return f"{count(stage.items_in)} ≠ {_sum(stage.items_out, *rest)}: {count(abs(missing))} {word}"


_DIFFERENCE = {"running": "moving", "stopping": "moving"}


def _sum(out: int, *others: tuple[str, int]) -> str:
    return " + ".join(
        [f"{count(out)} out", *(f"{count(number)} {word}" for word, number in others if number)]
    )


def _stage_table(stats: RunStats, width: int) -> str:
    titles = [
        "stage",
        "operator",
        "workers",
        "in",
        "out",
        "failed",
        "retried",
        "restarts",
        "rate",
        "busy",
        "wait in",
        "wait out",
    ]
    rows = [
        [
            stage.name,
            stage.kind,
            workers_text(stage),
            count(stage.items_in),
            count(stage.items_out),
            count(stage.failed),
            count(stage.retried),
            count(stage.restarts),
            rate(stage.rate),
            share(stage.busy),
            share(stage.waiting_input),
            share(stage.waiting_output),
        ]
        for stage in stats.stages
    ]
    return table(
        titles, rows, left={0, 1, 2}, width=width, spare=("retried", "failed", "in", "out", "operator")
    )


def _edge_table(edges: Sequence[EdgeStats], width: int) -> str:
    titles = ["channel", "from", "to", "transport", "fill", "put", "passed", "left", "rate"]
    rows = [
        [
            edge.name,
            edge.writer,
            edge.reader or "-",
            edge.transport,
            f"{count(edge.inside)}/{count(edge.capacity)}",
            count(edge.put),
            count(edge.passed),
            count(edge.left),
            rate(edge.rate),
        ]
        for edge in edges
    ]
    return table(titles, rows, left={0, 1, 2, 3}, width=width, spare=("put", "rate"))


def _host_table(hosts: Sequence[HostStats], width: int) -> str:
    titles = ["host", "state", "agents", "breaks", "sent", "received", "round trip"]
    rows = [
        [
            host.name,
            host.state,
            count(host.agents),
            count(host.breaks),
            amount(host.sent),
            amount(host.received),
            f"{host.round_trip * 1e3:.2f} ms" if host.round_trip else "-",
        ]
        for host in hosts
    ]
    deaths = [f"host {host.name}: {death}" for host in hosts for death in host.deaths]
    return "\n".join(text for text in (table(titles, rows, left={0, 1}, width=width), *deaths) if text)


GAP, LEAST = 2, 8
"""Number of spaces between two columns, and minimum length of a shortened text."""


def table(
    titles: Sequence[str],
    rows: Sequence[Sequence[str]],
    left: set[int],
    width: int = 10**6,
    spare: Sequence[str] = (),
) -> str:
    """Format aligned columns. Return an empty string if ``rows`` is empty.

    Columns whose number is in ``left`` are left-aligned, the others right-aligned. If the table is wider than
    ``width``, drop as many ``spare`` columns as necessary, and then shorten long left-aligned texts.
    """
    if not rows:
        return ""
    columns = {titles[n]: (n in left, [titles[n], *(row[n] for row in rows)]) for n in range(len(titles))}
    for title in spare:
        if _wide(columns) > width:
            del columns[title]
    _cut(columns, width)
    lines = []
    for number in range(len(rows) + 1):
        padded = (
            cells[number].ljust(_longest(cells)) if is_left else cells[number].rjust(_longest(cells))
            for is_left, cells in columns.values()
        )
        lines.append((" " * GAP).join(padded).rstrip())
    lines.insert(1, (" " * GAP).join("-" * _longest(cells) for _, cells in columns.values()))
    return "\n".join(lines)


Columns = dict[str, tuple[bool, list[str]]]
"""Columns by title. Each has a flag for left alignment, and a list of its cells, title first."""


def _longest(cells: list[str]) -> int:
    return max(map(len, cells))


def _wide(columns: Columns) -> int:
    return sum(_longest(cells) + GAP for _, cells in columns.values()) - GAP


def _cut(columns: Columns, width: int) -> None:
    """Shorten the longest left-aligned texts, but keep at least LEAST characters."""
    names = [cells for is_left, cells in columns.values() if is_left]
    while _wide(columns) > width and (most := max(map(_longest, names)) - 1) >= LEAST:
        widest = max(names, key=_longest)
        widest[:] = [cell if len(cell) <= most else f"{cell[: most - 1].rstrip('…')}…" for cell in widest]
