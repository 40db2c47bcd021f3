"""Test that all public names of ``flowchan.pipelines`` are documented, and that its modules use only
flowchan's public names."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

from support.optional_packages import optional

import flowchan
from flowchan import pipelines

optional("torch")  # start torch's threads now and not during a test

SOURCES = sorted((Path(__file__).parents[2] / "pipelines").rglob("*.py"))


def test_every_public_name_and_method_has_a_docstring() -> None:
    for name in pipelines.__all__:
        value = getattr(pipelines, name)
        assert value.__doc__, name
        assert value.__module__ == "flowchan.pipelines", name
        if inspect.isclass(value):
            bare = [
                method
                for method, member in vars(value).items()
                if not method.startswith("_")
                and (callable(member) or isinstance(member, property))
                and not member.__doc__
            ]
            assert not bare, name


# Modules that patterns may use in addition to the public names. These modules cover options, placements,
# argument checks, globals of the main script, refusals, failures and worker exits.
SHARED = {
    "flowchan.channel.transports",
    "flowchan.items.arguments",
    "flowchan.items.codec",
    "flowchan.items.program_file",
    "flowchan.declare.callables",
    "flowchan.declare.options",
    "flowchan.declare.placements",
    "flowchan.items.unpicklable",
    "flowchan.public",
    "flowchan.items.worker_globals",
    "flowchan.remote.joining",
    "flowchan.hosts",
    "flowchan.hosts.code",
    "flowchan.hosts.pool_channels",
    "flowchan.run.policy.decisions",
    "flowchan.run.observe.cgroups",
    "flowchan.run.policy.events",
    "flowchan.items.text",
    "flowchan.run.policy.failures",
    "flowchan.channel.latch",
    "flowchan.collective.training.codes",
    "flowchan.viz.gantt",
    "flowchan.transport.interrupts",
    "flowchan.transport.descriptors",
    "flowchan.collective",
    "flowchan.transport.local_peers",
    # remote tensors: channels that a node owns, leases that travel in items, tensors in the channel's memory
    "flowchan.items",
    "flowchan.remote.channel_server",
    "flowchan.remote.orphans",
    "flowchan.run.crew.at_exit",
    "flowchan.transport",
    "flowchan.transport.tcp",
}
# Uses of the core itself, for operations that must be atomic in C or must access memory without a copy.
NATIVE = {"handle_transfer.py": {"_core"}, "inference.py": {"_core"}, "wire_format.py": {"View"}}


def imported(source: Path) -> dict[str, set[str]]:
    """Return the names that a file imports from flowchan, grouped by module."""
    found: dict[str, set[str]] = {}
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "flowchan":
            found.setdefault(node.module or "", set()).update(alias.name for alias in node.names)
        elif isinstance(node, ast.Import):
            assert not any(alias.name.split(".")[0] == "flowchan" for alias in node.names)
    return found


def test_patterns_import_only_public_names_of_flowchan() -> None:
    assert SOURCES
    for source in SOURCES:
        native = NATIVE.get(source.name, set())
        for module, names in imported(source).items():
            if module in ("flowchan", "flowchan._core"):
                assert names <= {*flowchan.__all__, *native}, source
            else:
                assert module.startswith("flowchan.pipelines.") or module in SHARED, source
