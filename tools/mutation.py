"""Change a module in many small ways, one at a time, and count the changes that its tests notice.

Usage: ``python tools/mutation.py MODULE TEST... [--sample N] [--seed S]``. cosmic-ray makes the changes, for
example ``<`` instead of ``<=``. A change survives if all tests still pass. The script modifies the module's
file and restores it after each change, so run it in a clone.
"""

from __future__ import annotations

import argparse
import ast
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from cosmic_ray.ast import ast_nodes, get_ast_from_path
from cosmic_ray.mutating import mutate_and_test
from cosmic_ray.plugins import get_operator, operator_names
from cosmic_ray.work_item import MutationSpec, TestOutcome

LIMIT_S = 120.0
"""Seconds after which the tests of a change count as failed, because the change makes them hang."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("module", type=Path, help="path of the module's source file")
    parser.add_argument("tests", nargs="+", help="test files for the module")
    parser.add_argument("--sample", type=int, help="number of changes to try, drawn at random (default: all)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the sample (default: 1)")
    args = parser.parse_args()
    command = f"{sys.executable} -m pytest -q -x -p no:xdist {' '.join(args.tests)}"
    # The tests must pass with the unchanged module.
    subprocess.run(command.split(), check=True, stdout=subprocess.DEVNULL)
    changes = list(changes_of(args.module))
    tried = random.Random(args.seed).sample(changes, min(args.sample or len(changes), len(changes)))
    survived = []
    for number, change in enumerate(tried, 1):
        result = mutate_and_test([change], command, LIMIT_S)
        if result.test_outcome is TestOutcome.SURVIVED:
            survived.append(result.diff)
        print(f"\r{number} of {len(tried)}: {len(survived)} survived", end="", file=sys.stderr, flush=True)
    print(*survived, sep="\n")
    killed = len(tried) - len(survived)
    print(f"{args.module}: {killed} of {len(tried)} changes noticed ({killed / len(tried):.0%})")


def changes_of(module: Path) -> Iterator[MutationSpec]:
    """Yield the changes that cosmic-ray can make in a module.

    Annotations are left out, because nothing evaluates them.
    """
    spans = [*annotation_spans(ast.parse(module.read_text()))]
    tree = get_ast_from_path(module)
    for name in operator_names():
        if get_operator(name).arguments():
            continue
        operator = get_operator(name)()
        places = (place for node in ast_nodes(tree) for place in operator.mutation_positions(node))
        for number, (start, end) in enumerate(places):
            if not any(first <= start and end <= last for first, last in spans):
                yield MutationSpec(module, name, number, start, end)


def annotation_spans(tree: ast.AST) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Yield the line and column at which each annotation begins, and those at which it ends."""
    for node in ast.walk(tree):
        for one in (getattr(node, "annotation", None), getattr(node, "returns", None)):
            if isinstance(one, ast.expr):
                yield (one.lineno, one.col_offset), (one.end_lineno or 0, one.end_col_offset or 0)


if __name__ == "__main__":
    main()
