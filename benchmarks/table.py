"""Write the stored figures into README.md, between its two markers: ``python -m benchmarks.table``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.__main__ import LATEST

README = Path(__file__).parents[1] / "README.md"
BEGIN, END = "<!-- benchmarks: begin -->", "<!-- benchmarks: end -->"


def main() -> None:
    text = README.read_text()
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"README.md has no part between {BEGIN} and {END}")
    README.write_text(f"{head}{BEGIN}\n{table(json.loads(LATEST.read_text()))}\n{END}{tail}")


def table(latest: dict[str, Any]) -> str:
    """The rows of all benchmarks as one Markdown table, and below it what they were measured with."""
    lines = ["| work | to reach | flowchan | peer | ratio | reached |", "|---|---|---|---|---|---|"]
    keys = ("work", "target", "flowchan", "peer", "ratio")
    for benchmark in latest.values():
        for row in benchmark["rows"]:
            cells = [row[key] for key in keys] + ["yes" if row["reached"] else "no"]
            lines.append(f"| {' | '.join(cells)} |")
    machines = {
        f"{one['cores']} cores of {one['processor']}, {one['system']}, {one['python']}"
        for one in latest.values()
    }
    return "\n".join([*lines, "", f"Measured on {'; '.join(sorted(machines))}."])


if __name__ == "__main__":
    main()
