"""Apply the checks of ``test_docstrings.py`` to the public names that need torch."""

from __future__ import annotations

import pytest
from support.docstrings import LISTED, missing, output_errors, public, wrong_errors
from support.optional_packages import optional

torch = optional("torch")
pytestmark = [
    pytest.mark.usefixtures("one_compute_thread"),
    # a pipe would not speed up such small modules
    pytest.mark.filterwarnings("ignore:Sequential. with .* parts:RuntimeWarning"),
]
PUBLIC = public(torch=True) if torch else {}
"""Public names and members that need torch."""


@pytest.mark.parametrize("name", [name for name, one in PUBLIC.items() if one.example])
def test_torch_docstring_example_prints_the_shown_output(name: str) -> None:
    assert not (errors := output_errors(name, PUBLIC[name].example)), errors


def test_every_public_torch_name_has_an_example() -> None:
    names = {name for name in LISTED if name in PUBLIC}
    assert {name for name in names if not PUBLIC[name].example} <= {
        "flowchan.collective.training.engine.HOOKS"
    }


def test_public_torch_docstrings_have_all_sections() -> None:
    assert {name: lacks for name in PUBLIC if (lacks := missing(name, PUBLIC))} == {}


def test_torch_raises_sections_list_the_exceptions_of_functions() -> None:
    assert {name: errors for name in PUBLIC if (errors := wrong_errors(PUBLIC[name]))} == {}
