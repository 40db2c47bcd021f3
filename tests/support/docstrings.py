"""Find the public names, their docstrings, and the examples in these docstrings.

The pages of ``docs/reference`` list the public names. The public members of a class are the methods and
properties defined in the class or in its base classes in flowchan.
"""

from __future__ import annotations

import ast
import builtins
import doctest
import importlib
import inspect
import pkgutil
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import flowchan

ROOT = Path(__file__).parents[2]
LISTED = sorted(
    name
    for page in (ROOT / "docs" / "reference").glob("*.md")
    for name in re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE)
)
NEEDS_TORCH = re.compile(
    r"flowchan\.(collective\.training\.|pipelines\.([Dd]ataset|Sequential|Training|Stash|Pop|"
    r"AsySGInCon|DiLoCo|Downpour|ElasticAveraging|RemoteNodes|NodeStats|RemoteTensor|RemoteError|NodeDied)\b)"
)
INDIRECT = {
    "derive": "except* calls it",
    "extra_repr": "repr() calls it",
    "forward": "a call of the module calls it",
    "has_same_host": "a run calls it",
    "open_part": "a run calls it",
    "transport_to": "a declaration calls it",
    "weights": "a run calls it",
    **dict.fromkeys(("encode", "decode"), "Gradients calls it"),
}
"""Members that need no example, because users do not call them."""
SECTION = re.compile(r"^(Args|Attributes|Returns|Yields|Raises|Example):$", re.MULTILINE)
BODY = re.compile(r"\n*((?:[ ]{4}.*(?:\n|\Z)|\n)*)")


class Documented(NamedTuple):
    """A public name or member, with its docstring by section. The summary has the key ``""``."""

    value: Any
    sections: dict[str, str]

    @property
    def example(self) -> str:
        """Return the example, or an empty string."""
        return self.sections.get("Example", "")

    def raises(self) -> Iterator[str]:
        """Yield the names of the exceptions in its ``Raises`` section."""
        for names in re.findall(r"^(\w[\w., ]*):", self.sections.get("Raises", ""), re.MULTILINE):
            yield from names.split(", ")


def public(*, torch: bool) -> dict[str, Documented]:
    """Return the public names and members that need torch, or those that do not."""
    found = {}
    for name in LISTED:
        if bool(NEEDS_TORCH.match(name)) is not torch:
            continue
        module, _, attribute = name.rpartition(".")
        value = getattr(importlib.import_module(module), attribute)
        found[name] = Documented(value, sections(value))
        for member, inner in members(value).items():
            found[f"{name}.{member}"] = Documented(inner, sections(inner))
    return found


def members(owner: Any) -> dict[str, Any]:
    """Return the public methods and properties of a class; empty for other values."""
    found: dict[str, Any] = {}
    bases = owner.__mro__ if inspect.isclass(owner) else ()
    for base in reversed(bases):
        for name, value in vars(base).items():
            value = getattr(value, "__func__", value)
            is_ours = base.__module__.split(".")[0] == "flowchan"
            if is_ours and not name.startswith("_") and (inspect.isroutine(value) or is_property(value)):
                found[name] = value
            elif name in found:
                del found[name]
    return found


def is_property(value: Any) -> bool:
    """Return whether the value is a property defined by Python or nanobind, and not a slot."""
    return isinstance(value, property) or type(value).__name__ == "nb_static_property"


def sections(value: Any) -> dict[str, str]:
    """Return the sections of a docstring by their names."""
    text = value.__doc__ if inspect.isclass(value) else inspect.getdoc(value)
    text = re.sub(r"\A\w+\(self.*\n\n", "", inspect.cleandoc(text or ""))  # nanobind prepends the signature
    parts = SECTION.split(text)
    found = {"": parts[0].partition("\n")[0]}
    for title, body in zip(parts[1::2], parts[2::2], strict=True):
        inside = BODY.match(body)
        found[title] = inspect.cleandoc(f"\n{inside[1]}") if inside else ""
    return found


def missing(name: str, known: dict[str, Documented]) -> list[str]:
    """List the parts that are missing in the docstring of a public name or member."""
    value, found = known[name]
    lacks = [] if found[""].endswith((".", ":")) else ["a summary"]
    if not inspect.isroutine(value):
        return lacks
    if name.rpartition(".")[2] not in INDIRECT and not is_shown(name, known):
        lacks.append("an example, of its own or of its class")
    try:
        signature = inspect.signature(value)
    except ValueError:  # functions from nanobind have no signature
        return lacks
    parameters = signature.parameters.keys() - {"self"}
    if parameters and "Args" not in found:
        lacks.append(f"Args: {', '.join(sorted(parameters))}")
    returns = signature.return_annotation not in (inspect.Signature.empty, None, "None")
    if returns and not found.keys() & {"Returns", "Yields"} and not found[""].startswith("Return "):
        lacks.append("Returns")
    return lacks


def is_shown(name: str, known: dict[str, Documented]) -> bool:
    """Return whether an example of the name, or of another name in its class, uses the name."""
    owner, _, last = name.rpartition(".")
    if owner not in known:
        return bool(known[name].example) or known[name].value is None
    uses = re.compile(rf"\.{last}\(")
    return any(
        uses.search(one.example)
        for other, one in known.items()
        if other == owner or other.startswith(f"{owner}.")
    )


def exception(name: str) -> Any:
    """Return the exception that a docstring calls ``name``.

    The name must include the module unless the exception is builtin or from flowchan.
    """
    for module in (builtins, flowchan, importlib.import_module("flowchan.viz")):
        if hasattr(module, name):
            return getattr(module, name)
    if name in ("RemoteError", "NodeDied"):  # the only exceptions that the patterns define
        return getattr(importlib.import_module("flowchan.pipelines"), name)
    return pkgutil.resolve_name(name)


def wrong_errors(one: Documented) -> set[str]:
    """Return the names in a ``Raises`` section that are not exceptions, and the errors that it lacks."""
    others = {name for name in one.raises() if not issubclass(exception(name), BaseException)}
    return others | undocumented_errors(one)


def undocumented_errors(one: Documented) -> set[str]:
    """Return the exceptions that a public function raises by name but does not document."""
    function: Any = vars(one.value).get("__init__") if inspect.isclass(one.value) else one.value
    function = inspect.unwrap(function.fget if isinstance(function, property) else function)
    if not inspect.isfunction(function) or function.__module__.split(".")[0] != "flowchan":
        return set()
    if function.__code__.co_filename == "<string>":  # a dataclass's generated constructor has no source
        return set()
    named = tuple(exception(name) for name in one.raises())
    found = set()
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(function)))):
        match node:
            case ast.Raise(exc=ast.Call(func=ast.Name(id=name))):
                raised = function.__globals__.get(name) or vars(builtins).get(name)
                if inspect.isclass(raised) and not issubclass(raised, (AssertionError, *named)):
                    found.add(name)
    return found


def parsed(name: str, example: str) -> doctest.DocTest:
    """Return an example as a test. The example imports the names that it uses."""
    return doctest.DocTestParser().get_doctest(example, {"__name__": "__main__"}, name, None, None)


def output_errors(name: str, example: str) -> str:
    """Run an example, and return a report of its wrong outputs."""
    test = parsed(name, example)
    assert test.examples, f"{name}: the example needs lines that begin with >>>"
    report: list[str] = []
    doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=report.append)
    return "".join(report)
