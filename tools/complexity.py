"""Check that no function of the product is too complex or has too many parameters.

``*args``, ``**kwargs``, ``self`` and ``cls`` do not count as parameters. A function with many options takes
them as ``**options: Unpack[...]``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import lizard

ROOT = Path(__file__).parents[1]
PRODUCT = ("flowchan", "pipelines", "viz", "flowchan_torch")
MAX_COMPLEXITY = 20
MAX_PARAMETERS = 8


class Measured(NamedTuple):
    """Cyclomatic complexity and number of parameters of one function."""

    complexity: int
    parameters: int


def is_counted(parameter: str) -> bool:
    """Return whether a parameter, in lizard's notation, counts towards the limit."""
    return parameter.strip() not in ("", "/", "self", "cls") and not parameter.strip().startswith("*")


def functions() -> Iterator[tuple[str, Measured]]:
    """Yield the name (``path name``) and the measurements of every function of the product."""
    for part in PRODUCT:
        for path in sorted((ROOT / part).rglob("*")):
            if path.suffix not in (".py", ".cpp", ".hpp"):
                continue
            for function in lizard.analyze_file(str(path)).function_list:
                parameters = sum(map(is_counted, function.full_parameters))
                name = f"{path.relative_to(ROOT)} {function.name}"
                yield name, Measured(function.cyclomatic_complexity, parameters)


def problems() -> Iterator[str]:
    """Yield one line for each function that exceeds a limit."""
    for name, (complexity, parameters) in functions():
        if complexity > MAX_COMPLEXITY or parameters > MAX_PARAMETERS:
            yield (
                f"{name}: complexity {complexity} (at most {MAX_COMPLEXITY}), {parameters} parameters (at "
                f"most {MAX_PARAMETERS}); split it"
            )


if __name__ == "__main__":
    sys.exit("\n".join(problems()) or None)
