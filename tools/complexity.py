"""Check that no function of the product is too complex or takes too many parameters.

``*args``, ``**kwargs``, ``self`` and ``cls`` do not count as parameters. ``tools/complexity_allowed.txt``
lists the functions that exceed a limit, with their numbers. The list may only shrink: an entry that is
exceeded, or no longer needed, is an error.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import lizard

ROOT = Path(__file__).parents[1]
PRODUCT = ("flowchan", "pipelines", "viz", "flowchan_torch")
ALLOWED = ROOT / "tools" / "complexity_allowed.txt"
MOST_COMPLEX = 20
MOST_PARAMETERS = 8


class Measured(NamedTuple):
    """Cyclomatic complexity and number of parameters of one function."""

    complexity: int
    parameters: int

    def exceeds(self, complexity: int = MOST_COMPLEX, parameters: int = MOST_PARAMETERS) -> bool:
        """Tell whether either number is above its limit."""
        return self.complexity > complexity or self.parameters > parameters


def is_counted(parameter: str) -> bool:
    """Tell whether a parameter, as lizard writes it, counts."""
    return parameter.strip() not in ("", "/", "self", "cls") and not parameter.strip().startswith("*")


def functions() -> Iterator[tuple[str, Measured]]:
    """Yield every function of the product as ``path name``, with its measurements."""
    for part in PRODUCT:
        for path in sorted((ROOT / part).rglob("*")):
            if path.suffix not in (".py", ".cpp", ".hpp"):
                continue
            for function in lizard.analyze_file(str(path)).function_list:
                parameters = sum(map(is_counted, function.full_parameters))
                name = f"{path.relative_to(ROOT)} {function.name}"
                yield name, Measured(function.cyclomatic_complexity, parameters)


def allowed() -> dict[str, Measured]:
    """Read the list of exceptions."""
    found = {}
    for line in ALLOWED.read_text().splitlines():
        if line and not line.startswith("#"):
            path, name, complexity, parameters = line.split()
            found[f"{path} {name}"] = Measured(int(complexity), int(parameters))
    return found


def problems() -> Iterator[str]:
    """Yield the problems, one line each."""
    exceptions = allowed()
    needed = set()
    for name, found in functions():
        if not found.exceeds():
            continue
        before = exceptions.get(name, Measured(0, 0))
        limits = Measured(max(before.complexity, MOST_COMPLEX), max(before.parameters, MOST_PARAMETERS))
        needed.add(name)
        if found.exceeds(*limits):
            yield (
                f"{name}: complexity {found.complexity} (at most {limits.complexity}), "
                f"{found.parameters} parameters (at most {limits.parameters}); take it apart"
            )
    for name in sorted(exceptions.keys() - needed):
        yield f"{name}: is within the limits now; remove it from {ALLOWED.relative_to(ROOT)}"


if __name__ == "__main__":
    sys.exit("\n".join(problems()) or None)
