"""Test the targets of ``flowchan run``, ``check`` and ``viz``: files, modules and standard input.

Arguments are converted to the annotated types.
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from flowchan.cli.commands import main
from flowchan.cli.conversion import converted

NUMBERS = """
from flowchan import Graph

numbers = Graph("numbers")
numbers.source(range(100)).sink(lambda item: None, name="last")
"""
TYPED = """
import enum
from pathlib import Path
from typing import Literal
from flowchan import Graph

class Speed(enum.Enum):
    slow = 1
    fast = 2

def made(
    n: int, at: Path, speed: Speed, mode: Literal["a", "b"] = "a", most: int | None = None, *rest: float
) -> Graph:
    graph = Graph("made")
    got = [n, at, speed.value, mode, most, rest]
    graph.source(got).map(repr).reduce(lambda one, other: f"{one} {other}", name="got")
    return graph
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield the working directory, and unload its modules afterwards."""
    monkeypatch.chdir(tmp_path)
    before, path = set(sys.modules), list(sys.path)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ("shop", "typed", "_stdin"):
            del sys.modules[name]
    sys.path[:] = path


def flowchan(*args: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(main, args, input=stdin)


@pytest.mark.parametrize("target", ["shop.parts:numbers", "shop.parts", "shop"])
def test_a_module_can_be_a_target(folder: Path, target: str) -> None:
    (folder / "shop").mkdir()
    (folder / "shop" / "__init__.py").write_text("from shop.parts import numbers")
    (folder / "shop" / "parts.py").write_text(NUMBERS)
    result = flowchan("run", target)
    assert result.exit_code == 0, result.output
    assert "100 = 100 out" in result.output
    result = flowchan("check", target)
    assert result.output.startswith("numbers: all clear: 2 stages, 1 channel, 2 workers\n")
    result = flowchan("viz", target)
    assert result.output.startswith(f"{target.partition(':')[0].rpartition('.')[2]}.svg: 2 stages")


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (
            "shop.nothing",
            "shop.nothing: no file or importable module has that name",
        ),
        ("nothing.py", "nothing.py: no such file"),
        ("shop.bad", "bad.py: ModuleNotFoundError: No module named 'not_there' (line 1)"),
    ],
)
def test_missing_module_is_reported_in_one_line(folder: Path, target: str, message: str) -> None:
    (folder / "shop").mkdir()
    (folder / "shop" / "__init__.py").touch()
    (folder / "shop" / "bad.py").write_text("import not_there")
    result = flowchan("check", target)
    assert result.exit_code == 2
    assert message in result.output
    assert len(result.output.splitlines()) == 1


@pytest.mark.usefixtures("folder")
def test_standard_input_can_be_a_target() -> None:
    result = flowchan("run", "-", stdin=NUMBERS)
    assert result.exit_code == 0, result.output
    assert "100 = 100 out" in result.output
    assert flowchan("viz", "-", stdin=NUMBERS).output.startswith("stdin.svg: 2 stages")
    result = flowchan("check", "-", stdin="1 / 0")
    assert "<stdin>: ZeroDivisionError: division by zero (line 1)" in result.output


@pytest.mark.usefixtures("folder")
def test_graph_in_standard_input_is_chosen_by_name() -> None:
    """If a file defines several graphs, the error suggests choosing one by name."""
    two = f"{NUMBERS}\nother = Graph('other')\nother.source([1]).sink(print)\n"
    assert (
        "defines several graphs; choose one of -:numbers, -:other" in flowchan("check", "-", stdin=two).output
    )
    for arguments in (["-:other"], ["--debug", "-:other"], ["--", "-:other"]):
        result = flowchan("check", *arguments, stdin=two)
        assert result.output.startswith("other: all clear: 2 stages"), arguments
    assert "has no 'third'; its graphs are numbers, other" in flowchan("check", "-:third", stdin=two).output


def test_arguments_are_converted_to_annotated_types(folder: Path) -> None:
    (folder / "typed.py").write_text(TYPED)
    result = flowchan("run", "typed.py", "--", "3", "a/b", "fast", "b", "7", "1.5", "2")
    assert result.exit_code == 0, result.output
    assert "got: \"3 PosixPath('a/b') 2 'b' 7 (1.5, 2.0)\"" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["x", ".", "slow"], "typed.py:made: n: 'x' is not a valid integer"),
        (["3", ".", "quick"], "typed.py:made: speed: the value must be one of slow, fast, got 'quick'"),
        (["3", ".", "slow", "c"], "typed.py:made: mode: the value must be one of a, b, got 'c'"),
    ],
)
def test_error_names_an_argument_that_cannot_be_converted(
    folder: Path, arguments: list[str], message: str
) -> None:
    (folder / "typed.py").write_text(TYPED)
    result = flowchan("check", "typed.py", "--", *arguments)
    assert result.exit_code == 2
    assert message in result.output


@pytest.mark.parametrize("annotation", [Any, object, Sequence, Iterable, Sequence[str]])
def test_argument_without_a_supported_annotation_stays_a_string(annotation: Any) -> None:
    assert converted("a text", annotation) == "a text"


@pytest.mark.parametrize("annotation", [list, list[str], list[int] | None, tuple[int, ...], set, dict])
def test_argument_annotated_as_list_is_rejected(annotation: Any) -> None:
    with pytest.raises(
        ValueError, match=r"^the value must be of type \w+, got the single string 'ab'; annotate"
    ):
        converted("ab", annotation)


def test_bool_argument_rejects_words_that_are_not_boolean() -> None:
    assert [converted(word, bool) for word in ("yes", "off", "1")] == [True, False, True]
    with pytest.raises(
        ValueError, match=r"^the value must be one of true, false, yes, no, on, off, 1, 0, got 'maybe'$"
    ):
        converted("maybe", bool)


def test_version_option_prints_the_version_of_the_package() -> None:
    assert flowchan("--version").output == f"flowchan {importlib.metadata.version('flowchan')}\n"
