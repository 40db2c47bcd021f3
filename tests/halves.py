"""``make test`` runs the files that load large libraries after the others, in processes of their own. The
names of what failed in either half, and what both come to, stand at the end."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

FIRST = "build/first-half.json"
KINDS = {"failed": "failed", "error": "errors", "passed": "passed", "skipped": "skipped"}


def tell(half: str, reporter: Any, root: Path, seconds: float) -> None:
    """Keeps what the first half came to, below ``root``; after the second, writes what both did."""
    kept = root / FIRST
    found = {
        "seconds": seconds,
        "counts": {kind: len(reporter.stats.get(kind, ())) for kind in KINDS},
        "names": [
            f"{kind.upper()} {report.nodeid}"
            for kind in ("failed", "error")
            for report in reporter.stats.get(kind, ())
        ],
    }
    if half == "without":
        kept.parent.mkdir(exist_ok=True)
        kept.write_text(json.dumps(found))
        return
    if not kept.exists():
        reporter.write_line("the half without large libraries has not come to its end")
        return
    first = json.loads(kept.read_text())
    kept.unlink()
    for name in (*first["names"], *found["names"]):
        reporter.write_line(name)
    reporter.write_line("in both halves:")
    reporter.write_line(closing(first, found))


def closing(*halves: dict[str, Any]) -> str:
    """As pytest's own last line."""
    counts = {kind: sum(half["counts"][kind] for half in halves) for kind in KINDS}
    told = ", ".join(f"{count} {KINDS[kind]}" for kind, count in counts.items() if count)
    seconds = sum(half["seconds"] for half in halves)
    return f"{told} in {seconds:.2f}s ({timedelta(seconds=int(seconds))})"
