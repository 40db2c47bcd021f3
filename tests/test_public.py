"""Test the public interface: the modules that ``import flowchan`` loads, the public names, and the stub file
for the native module."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import inspect
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import flowchan
import flowchan._core as native

HEAVY = ("torch", "numpy", "networkx", "graphviz", "pygraphviz", "rich", "asyncio", "psutil", "cloudpickle")
RARE = (
    "bz2",
    "decimal",
    "email",
    "fractions",
    "gzip",
    "hashlib",
    "http",
    "lzma",
    "numbers",
    "pathlib",
    "ssl",
    "urllib",
)
"""Modules of the standard library that are slow to import and that few programs need."""
ROOT = Path(__file__).parents[1]
STUB = ROOT / "flowchan" / "_core.pyi"
ACCEPT = "to accept a change of the native module, write it into flowchan/_core.pyi and commit that"

PUBLIC = {name: getattr(flowchan, name) for name in flowchan.__all__ if not name.startswith("__")}


def modules_after(statement: str) -> set[str]:
    """Return the modules that a fresh interpreter has loaded after a statement."""
    code = f"{statement}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout))


def loaded_after(statement: str) -> set[str]:
    """Return the top-level modules that a fresh interpreter has loaded after a statement."""
    return {name.split(".")[0] for name in modules_after(statement)}


def test_import_flowchan_does_not_load_heavy_modules():
    """The import is quick, because heavy modules are imported when they are first needed."""
    assert loaded_after("from flowchan import *") & {*HEAVY, *RARE} == set()


def test_channel_does_not_load_the_modules_of_graphs():
    """A program that uses only channels must not wait for modules that declare and run graphs."""
    parts = {
        name.split(".")[1]
        for name in modules_after("import flowchan; flowchan.Channel")
        if "flowchan." in name
    }
    assert {"channel", "items"} <= parts
    assert parts & {"declare", "run", "check", "hosts", "remote", "collective"} == set()


def test_using_a_channel_does_not_load_heavy_modules():
    """The first use of a channel does not load heavy modules either."""
    statement = (
        "import flowchan\n"
        "for across in ('threads', 'processes'):\n"
        "    ch = flowchan.Channel(across=across)\n"
        "    ch.put_many([1, 'a', (1, 2.5), {'b': [3]}])\n"
        "    ch.close()\n"
        "    assert len(list(ch)) == 4"
    )
    assert loaded_after(statement) & {*HEAVY, *RARE} == set()


@pytest.mark.parametrize(("place", "needed"), [("thread", set()), ("process", {"cloudpickle"})])
def test_graph_runs_without_heavy_imports(place: str, needed: set[str]) -> None:
    """A program's first run must not wait for heavy imports."""
    statement = (
        "import flowchan\n"
        "graph = flowchan.Graph('light')\n"
        f"numbers = graph.source(range(3)).map(abs, on={place!r}).collect()\n"
        "assert graph.run()[numbers] == [0, 1, 2]"
    )
    assert loaded_after(statement) & {*HEAVY, *RARE} <= {"hashlib", *needed}


def test_lock_does_not_load_the_modules_of_graphs():
    """A pattern loads only the modules that it needs."""
    assert "flowchan.run.graph" not in modules_after("import flowchan.pipelines; flowchan.pipelines.Lock()")


def test_pools_and_agents_do_not_load_heavy_modules():
    """Every run waits for its agents, so they must start quickly. Reading a package's metadata would load
    ``email``."""
    assert loaded_after("import flowchan.hosts") & {*HEAVY, "email"} == set()
    assert loaded_after("import flowchan.hosts.agent") & {*HEAVY, "email"} - {"cloudpickle"} == set()


def test_pipelines_load_torch_only_if_they_need_it():
    """``flowchan.pipelines.Sequential`` is loaded only when a program accesses it."""
    assert "torch" not in loaded_after("import flowchan.pipelines; flowchan.pipelines.map(1, abs).join()")
    if importlib.util.find_spec("torch"):
        assert "torch" in loaded_after("from flowchan.pipelines import Sequential")


def test_dunder_all_has_no_duplicates_and_only_existing_names():
    assert len(set(flowchan.__all__)) == len(flowchan.__all__)
    assert all(hasattr(flowchan, name) for name in flowchan.__all__)


PACKAGES = {"flowchan": ROOT / "flowchan", "flowchan.pipelines": ROOT / "pipelines"}
for_each_package = pytest.mark.parametrize("package", PACKAGES)


def imported_names(package: str, body: list[ast.stmt]) -> dict[str, set[str]]:
    """Return the names that a block imports from the package's modules, grouped by module."""
    found: dict[str, set[str]] = {}
    for node in body:
        if isinstance(node, ast.ImportFrom) and (module := (node.module or "")).startswith(f"{package}."):
            found.setdefault(module.removeprefix(f"{package}."), set()).update(
                name.name for name in node.names
            )
    return found


@for_each_package
def test_type_checkers_see_names_that_load_on_first_use(package: str) -> None:
    """The package lists these names once for type checkers and once for the program."""
    module = importlib.import_module(package)
    body = ast.parse((PACKAGES[package] / "__init__.py").read_text()).body
    (checked,) = (
        node.body for node in body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    )
    later, at_once = imported_names(package, checked), imported_names(package, body)
    assert later == {name: set(names) for name, names in module._NAMES.items() if names}
    names = [*(name for names in later.values() for name in names), *at_once.get("errors", ())]
    assert sorted(names) == sorted(module.__all__)


@for_each_package
def test_public_names_show_their_package_as_module(package: str) -> None:
    """Pickle finds an object by its module and name, even if the program has not used ``flowchan.X``."""
    if package == "flowchan.pipelines" and importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed: pip install torch")
    code = (
        "import importlib\n"
        f"package = importlib.import_module({package!r})\n"
        "for module, names in package._NAMES.items():\n"
        "    defining = importlib.import_module(f'{package.__name__}.{module}')\n"
        "    for name in names:\n"
        "        assert getattr(defining, name).__module__ == package.__name__, name\n"
        "        assert getattr(package, name) is getattr(defining, name), name\n"
        "        assert name in vars(package), name"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("package", "name"),
    [("flowchan", "Graph"), ("flowchan.pipelines", "Lock"), ("flowchan.pipelines", "children")],
)
def test_dir_lists_names_that_are_not_loaded(package: str, name: str) -> None:
    code = (
        "import importlib\n"
        f"package = importlib.import_module({package!r})\n"
        f"assert {name!r} not in vars(package)\n"
        f"assert {{{name!r}, *package.__all__}} <= set(dir(package))\n"
        f"package.{name}"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_unknown_name_raises_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'flowchan' has no attribute 'Chanel'"):
        flowchan.Chanel  # type: ignore[attr-defined]  # noqa: B018


def test_every_public_name_has_a_docstring() -> None:
    """A class needs its own docstring, not an inherited docstring."""
    for name, value in PUBLIC.items():
        if inspect.isclass(value):
            assert value.__dict__.get("__doc__"), f"flowchan.{name} has no docstring of its own"
        assert inspect.getdoc(value), f"flowchan.{name} has no docstring"


def test_every_public_name_has_flowchan_as_its_module() -> None:
    """Messages and tracebacks show ``flowchan.X``, no matter which file defines X."""
    named = {name: value for name, value in PUBLIC.items() if not inspect.ismodule(value)}
    assert [name for name, value in named.items() if value.__module__ != "flowchan"] == []


def test_every_public_method_has_a_docstring() -> None:
    for name, value in PUBLIC.items():
        if not inspect.isclass(value) or issubclass(value, BaseException):
            continue
        bare = [
            f"{name}.{method}"
            for method, member in vars(value).items()
            if not method.startswith("_")
            and (callable(member) or isinstance(member, property))
            and not member.__doc__
        ]
        assert bare == []


# The stub


def stub_tree() -> ast.Module:
    return ast.parse(STUB.read_text())


def declared(body: list[ast.stmt]) -> dict[str, ast.stmt]:
    """Return the declarations in a stub's module or class body, without imports and type variables; the last
    overload counts."""
    found: dict[str, ast.stmt] = {}
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found[node.name] = node
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found[node.target.id] = node
        elif (
            isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and not is_type_variable(node.value)
        ):
            found[node.targets[0].id] = node
    return found


def is_type_variable(value: ast.expr) -> bool:
    return (
        isinstance(value, ast.Call)
        and isinstance(value.func, ast.Name)
        and value.func.id in ("TypeVar", "ParamSpec")
    )


def plain(names: Any) -> set[str]:
    """Return all names except Python's double-underscore names."""
    return {name for name in names if not name.startswith("__")}


def stub_signature(node: ast.FunctionDef) -> inspect.Signature:
    """Return the parameters of a stub's function, without annotations and without ``self``."""
    names = [argument.arg for argument in (*node.args.posonlyargs, *node.args.args)]
    bare = ast.parse(f"def f({ast.unparse(strip_annotations(node.args))}): ...").body[0]
    scope: dict[str, Any] = {}
    exec(compile(ast.Module([bare], []), str(STUB), "exec"), scope)
    signature = inspect.signature(scope["f"])
    kept = list(signature.parameters.values())
    return inspect.Signature(kept[1:] if names[:1] in (["self"], ["cls"]) else kept)


def strip_annotations(arguments: ast.arguments) -> ast.arguments:
    for node in ast.walk(arguments):
        if isinstance(node, ast.arg):
            node.annotation = None
    return arguments


def native_signature(function: Any) -> inspect.Signature:
    """Return the parameters of the native function, without annotations and without ``self``.

    ``inspect`` cannot read a nanobind function, so nanobind's text of the signature is parsed instead.
    """
    texts = getattr(function, "__nb_signature__", None)
    if texts:
        text, _, *defaults = texts[-1]
        for number, default in enumerate(defaults[0] if defaults and defaults[0] else ()):
            text = text.replace(f"\\{number}", repr(default))
        node = ast.parse(f"{text}: ...").body[0]
        assert isinstance(node, ast.FunctionDef)
        return stub_signature(node)
    kept = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for parameter in inspect.signature(function).parameters.values()
    ]
    return inspect.Signature(kept[1:] if kept and kept[0].name in ("self", "cls") else kept)


def functions() -> dict[str, tuple[ast.FunctionDef, Any]]:
    """Return every function, method and constructor in the stub, with its native counterpart."""
    pairs: dict[str, tuple[ast.FunctionDef, Any]] = {}
    for name, node in declared(stub_tree().body).items():
        if isinstance(node, ast.FunctionDef):
            pairs[name] = (node, getattr(native, name, None))
        elif isinstance(node, ast.ClassDef):
            for method, inner in declared(node.body).items():
                called = method == "__init__" or not method.startswith("__")
                if isinstance(inner, ast.FunctionDef) and called and not is_property(inner):
                    pairs[f"{name}.{method}"] = (inner, getattr(getattr(native, name, None), method, None))
    return pairs


def is_property(node: ast.FunctionDef) -> bool:
    return any(
        isinstance(decorator, ast.Name) and decorator.id == "property" for decorator in node.decorator_list
    )


def test_stub_names_match_the_native_module():
    stub = declared(stub_tree().body)
    assert plain(stub) == plain(vars(native)), ACCEPT


def test_stub_classes_have_exactly_the_native_members() -> None:
    # since 3.12, Python shows the last of these methods
    unseen = {"__init__", "__new__", "__hash__", "__buffer__"}
    classes = {
        name: node for name, node in declared(stub_tree().body).items() if isinstance(node, ast.ClassDef)
    }
    assert classes
    for name, node in classes.items():
        stub = declared(node.body)
        assert plain(stub) == plain(vars(getattr(native, name))), f"{name}: {ACCEPT}"
        special = {member for member in stub if member.startswith("__")} - unseen
        assert special <= set(dir(getattr(native, name))), f"{name}: {ACCEPT}"


def test_stub_signatures_match_the_native_signatures() -> None:
    found = functions()
    assert found
    for name, (node, function) in found.items():
        assert function is not None, f"{name}: {ACCEPT}"
        assert stub_signature(node) == native_signature(function), f"{name}: {ACCEPT}"


def documented() -> dict[str, tuple[str | None, str | None]]:
    """Return the docstrings of each class, function and property in the stub and in the native module."""
    pairs: dict[str, tuple[str | None, str | None]] = {}
    for name, node in declared(stub_tree().body).items():
        if not isinstance(node, ast.FunctionDef | ast.ClassDef):
            continue
        owner = getattr(native, name)
        pairs[name] = (ast.get_docstring(node), native_text(owner))
        for member, inner in declared(getattr(node, "body", [])).items():
            if isinstance(inner, ast.FunctionDef) and not member.startswith("__"):
                pairs[f"{name}.{member}"] = (ast.get_docstring(inner), native_text(vars(owner)[member]))
    return pairs


def native_text(value: Any) -> str | None:
    """Return a native object's docstring without the signature that nanobind adds."""
    signatures = getattr(value, "__nb_signature__", None)
    text = signatures[-1][1] if signatures else value.__doc__
    return None if text is None or text.startswith("(self)") else text


def test_stub_docstrings_match_the_native_docstrings() -> None:
    """Editors show the stub's docstrings. Lines may break at different words."""
    found = documented()
    assert found
    for name, (stub, module) in found.items():
        assert (stub or "").split() == (module or "").split(), f"{name}: {ACCEPT}"


def test_package_contains_licences_of_bundled_code() -> None:
    named = importlib.metadata.metadata("flowchan").get_all("License-File") or []
    texts = {Path(name).stem: (ROOT / name).read_text() for name in named}
    assert "Wenzel Jakob" in texts["nanobind"]
    assert "Goetghebuer-Planchon" in texts["robin-map"]
    assert "Apache License" in texts["LICENSE"]
