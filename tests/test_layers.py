"""Check that imports only go down the layers and have no cycle.

Imports in functions and under TYPE_CHECKING count.
"""

from __future__ import annotations

import ast
import functools
import graphlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from flowchan.channel.transports import TRANSPORTS
from flowchan.declare.operators import OPERATORS
from flowchan.declare.placements import PLACEMENTS

ROOT = Path(__file__).parents[1]
PACKAGES = {
    "flowchan": ROOT / "flowchan",
    "flowchan.pipelines": ROOT / "pipelines",
    "flowchan.viz": ROOT / "viz",
}

# Ordered from the lowest layer to the highest. A part is a folder in flowchan/, or the ``__init__.py`` of a
# package with subfolders: "collective front" is flowchan/collective/__init__.py. Parts in one row do not
# import each other. "flowchan" is the public package, flowchan/__init__.py. Lower parts never import it, but
# higher parts may.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("public",),
    ("errors",),
    ("_core", "native"),
    ("transport",),
    ("transport.device",),
    ("items",),
    ("channel", "transport front", "pure"),
    ("declare",),
    ("check",),
    ("run.policy",),
    ("run.worker",),
    ("run.observe",),
    ("run.crew",),
    ("run",),
    ("hosts.providers", "remote", "collective"),
    ("hosts", "collective.rendezvous", "collective.training"),
    ("collective.torch",),
    ("collective front",),
    ("flowchan",),
    ("viz",),
    ("pipelines",),
    ("viz.live",),
    ("viz.insight",),
    ("cli",),
)
FRONTS = {
    "flowchan.collective": "collective front",
    "flowchan.transport": "transport front",
    "flowchan.transport.sockets": "transport front",
}
WHOLE = ("pipelines",)
"""Parts that count as one, including their subfolders."""
RANK = {part: rank for rank, parts in enumerate(LAYERS) for part in parts}


def modules() -> dict[str, Path]:
    """Return every module of the project by its import name."""
    found = {}
    for package, folder in PACKAGES.items():
        for path in sorted(folder.rglob("*.py")):
            inner = path.relative_to(folder).with_suffix("").parts
            found[".".join((package, *(part for part in inner if part != "__init__")))] = path
    return found


MODULES = modules()
KNOWN = {*MODULES, "flowchan._core"}


def part(module: str) -> str:
    """Return the part that contains a module: ``run.worker`` for ``flowchan.run.worker.logs``."""
    if module in FRONTS:
        return FRONTS[module]
    _, *folders = module.split(".")
    if module not in MODULES or MODULES[module].name != "__init__.py":
        folders = folders[:-1] or folders  # a module in the root folder is a separate part
    if not folders:
        return module
    return folders[0] if folders[0] in WHOLE else ".".join(folders)


def import_statements(tree: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """Yield every import in a tree."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node


def targets(module: str, statement: ast.Import | ast.ImportFrom) -> Iterator[str]:
    """Yield the project's modules that a statement imports."""
    if isinstance(statement, ast.Import):
        names = [alias.name for alias in statement.names]
    else:
        base = statement.module or ""
        if statement.level:
            package = module if MODULES[module].name == "__init__.py" else module.rpartition(".")[0]
            above = package.split(".")[: len(package.split(".")) - statement.level + 1]
            base = ".".join([*above, base] if base else above)
        # in "from package import name", the name is a submodule or an attribute of the package
        names = [
            f"{base}.{alias.name}" if f"{base}.{alias.name}" in KNOWN else base for alias in statement.names
        ]
    for name in names:
        if name.split(".")[0] != "flowchan":
            continue
        assert name in KNOWN, f"{module} imports {name}, which is no module of the project"
        yield name


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@functools.cache
def imports(module: str) -> set[tuple[str, int]]:
    """Return the project's modules that a module imports, with the lines."""
    found = {
        (target, statement.lineno)
        for statement in import_statements(parsed(MODULES[module]))
        for target in targets(module, statement)
    }
    return {(target, line) for target, line in found if target != module}


def test_every_module_has_a_layer():
    """A new part must be added to LAYERS."""
    homeless = sorted(module for module in KNOWN if part(module) not in RANK)
    assert not homeless, f"say in {Path(__file__).name} where these stand: {homeless}"


def test_imports_go_down_only():
    """A module imports only lower parts and the other modules in its own part."""
    wrong = [
        f"{MODULES[module].relative_to(ROOT)}:{line} imports {target}"
        for module in MODULES
        for target, line in sorted(imports(module))
        if part(target) != part(module) and RANK[part(target)] >= RANK[part(module)]
    ]
    assert not wrong, "\n".join(wrong)


def test_imports_have_no_cycle():
    """Modules within a part must not form a cycle either."""
    graph = {module: {target for target, _ in imports(module)} for module in MODULES}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail(f"modules import each other in a circle: {' <- '.join(error.args[1])}", pytrace=False)


PRODUCT = [*MODULES.values(), *(ROOT / "flowchan_torch").rglob("*.py")]


def test_class_name_is_defined_in_one_file():
    """A class name has only one meaning in the product."""
    files: dict[str, set[str]] = {}
    for path in PRODUCT:
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.ClassDef):
                files.setdefault(node.name, set()).add(str(path.relative_to(ROOT)))
    assert not {name: sorted(found) for name, found in files.items() if len(found) > 1}


def test_each_file_name_occurs_only_once():
    """A file name is enough to find a file."""
    files: dict[str, list[str]] = {}
    for path in PRODUCT:
        if path.name != "__init__.py":
            files.setdefault(path.stem, []).append(str(path.relative_to(ROOT)))
    assert not {stem: found for stem, found in files.items() if len(found) > 1}


HOMES = {
    "declare/operators.py",  # the table of operators
    "declare/placements.py",
    "channel/transports.py",
}
NAMES = {*OPERATORS, *PLACEMENTS, *TRANSPORTS}


def compared_with(node: ast.AST) -> set[str]:
    """Return the strings in a comparison."""
    if not isinstance(node, ast.Compare):
        return set()
    sides = [node.left, *node.comparators]
    flat = [side for one in sides for side in (one.elts if isinstance(one, ast.Tuple | ast.Set) else [one])]
    return {side.value for side in flat if isinstance(side, ast.Constant) and isinstance(side.value, str)}


def test_only_tables_compare_operator_placement_and_transport_names():
    """The properties of each name are in its table, and other modules read that table."""
    readers = [path for path in MODULES.values() if path.is_relative_to(ROOT / "flowchan")]
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno} compares with {sorted(names)}"
        for path in readers
        if str(path.relative_to(ROOT / "flowchan")) not in HOMES
        for node in ast.walk(parsed(path))
        if (names := compared_with(node) & NAMES)
    ]
    assert not found, "\n".join(found)


def lines_of_examples(text: str) -> int:
    """Return the number of lines in the ``Example`` section of each docstring, which comes last."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, documented)]
    examples = [(ast.get_docstring(node) or "").partition("\nExample:\n")[2] for node in nodes]
    return sum(example.count("\n") + 3 for example in examples if example)  # including the section's title


def test_files_have_at_most_500_lines():
    """The limit of 500 lines also applies to native sources. Examples in docstrings do not count."""
    long = {}
    for folder in [*PACKAGES.values(), ROOT / "tests"]:
        for path in folder.rglob("*"):
            if path.suffix in {".py", ".pyi", ".cpp", ".hpp"}:
                text = path.read_text()
                lines = len(text.splitlines())
                if lines > 550 and path.suffix in {".py", ".pyi"}:
                    lines -= lines_of_examples(text)
                if lines > 550:
                    long[str(path.relative_to(ROOT))] = lines
    assert not long
