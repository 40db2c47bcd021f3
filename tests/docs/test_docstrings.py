"""Test that docstrings of public names have all sections, and that their examples print what they show.

``test_docstrings_torch.py`` runs the examples that need torch.
"""

from __future__ import annotations

import inspect
import pydoc

import pytest
from support.docstrings import LISTED, missing, output_errors, parsed, public, wrong_errors
from support.optional_packages import optional

np = optional("numpy")  # imported before the tests, because NumPy's threads keep running

PUBLIC = public(torch=False)
"""Public names and members that do not need torch."""

LINES_OF_A_SCREEN = 50

COMPILED = {
    "flowchan.HostError": "needs a host that cannot be reached",
    "flowchan.MemberDied": "needs four hosts",
    "flowchan.hosts.ray": "needs a Ray cluster",
    "flowchan.hosts.slurm": "needs a Slurm cluster",
    "flowchan.hosts.ssh": "needs two hosts",
}
"""Public names whose examples are compiled but not run, with the reason."""

WITHOUT = {
    "flowchan.ChannelError": "base class, which flowchan does not raise itself",
    "flowchan.FlowchanError": "base class, which flowchan does not raise itself",
    "flowchan.Refused": "it appears only in log messages and in the text of a HostError",
    "flowchan.viz.FORMATS": "a tuple of strings",
}
"""Public names without an example, with the reason."""


@pytest.mark.parametrize(
    "name", [name for name, one in PUBLIC.items() if one.example and name not in COMPILED]
)
def test_docstring_example_prints_the_shown_output(name: str) -> None:
    if "numpy" in PUBLIC[name].example or ".loan" in name:
        np.ndarray  # noqa: B018  # skips the test without NumPy
    assert not (errors := output_errors(name, PUBLIC[name].example)), errors


@pytest.mark.parametrize("name", COMPILED)
def test_example_that_needs_other_hosts_compiles(name: str) -> None:
    test = parsed(name, PUBLIC[name].example)
    assert test.examples
    for example in test.examples:
        compile(example.source, name, "single")


def test_every_public_name_has_an_example() -> None:
    assert {name for name in LISTED if name in PUBLIC and not PUBLIC[name].example} == set(WITHOUT)


def test_public_docstrings_have_all_sections() -> None:
    assert {name: lacks for name in PUBLIC if (lacks := missing(name, PUBLIC))} == {}


def test_help_of_public_functions_fits_on_a_screen() -> None:
    values = {name: one.value for name, one in PUBLIC.items() if inspect.isroutine(one.value)}
    lines = {name: pydoc.render_doc(values[name], renderer=pydoc.plaintext).count("\n") for name in values}
    assert {name: count for name, count in lines.items() if count > LINES_OF_A_SCREEN} == {}


def test_raises_sections_list_the_exceptions_of_functions() -> None:
    assert {name: errors for name in PUBLIC if (errors := wrong_errors(PUBLIC[name]))} == {}
