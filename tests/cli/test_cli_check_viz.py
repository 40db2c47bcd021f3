"""Test ``flowchan check`` and ``flowchan viz`` as a user calls them: their output and their exit codes."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from flowchan.cli.commands import main
from tests.support.waiting import GIL

HEAD = """
from flowchan.declare.blueprint import Blueprint as Graph

def never(*_):
    raise AssertionError("a stage was started")

def declare(name):
    graph = Graph(name)
    numbers = graph.source(never, name="numbers")
    numbers.map(never, name="half", workers=2, on="process").sink(never, name="save")
    return graph
"""
ONE = HEAD + "\ngraph = declare('halves')\nif __name__ == '__main__':\n    never()\n"
BUILDER = HEAD + "\ndef build(name: str, twice='no') -> Graph:\n    return declare(name + twice)\n"


@pytest.fixture(autouse=True)
def _user_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run each test in an empty folder, and unload the modules that the test imported from there."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def call(*words: str, file: str = "", name: str = "mine.py") -> Result:
    if file:
        Path(name).write_text(file)
    return CliRunner().invoke(main, list(words))


def refused(result: Result) -> str:
    """Return the one-line message that rejects the call."""
    assert result.exit_code == 2, result.output
    (line,) = result.stderr.splitlines()
    assert line.startswith("flowchan: ")
    return line


def test_check_counts_initial_workers_of_auto_stage() -> None:
    result = call("check", "mine.py", file=ONE.replace("workers=2", "workers='auto'"))
    assert "2 channels, 3 workers at the start, 1 of them in processes\n" in result.stdout


def test_check_prints_counts_if_there_are_no_problems() -> None:
    result = call("check", "mine.py", file=ONE)
    assert result.exit_code == 0
    assert result.stdout.splitlines()[0] == (
        "halves: all clear: 3 stages, 2 channels, 4 workers, 2 of them in processes"
    )


def test_check_reports_whether_threads_run_in_parallel() -> None:
    line = call("check", "mine.py", file=ONE).stdout.splitlines()[1]
    assert ("in parallel on this CPython" in line) is not GIL
    assert line.startswith(f"threads run Python code {'one at a time' if GIL else 'in parallel'}")


@pytest.mark.skipif(not sysconfig.get_config_var("Py_GIL_DISABLED"), reason="this Python always has the GIL")
def test_check_names_variable_if_gil_is_enabled_again() -> None:
    Path("mine.py").write_text(ONE)
    command = [sys.executable, "-c", "from flowchan.cli.commands import main; main()", "check", "mine.py"]
    result = subprocess.run(command, env={**os.environ, "PYTHON_GIL": "1"}, capture_output=True, text=True)
    assert result.stdout.splitlines()[1].endswith("; set PYTHON_GIL=0"), result


def test_check_lists_all_problems_with_the_users_file_and_line() -> None:
    wrong = (
        HEAD
        + "\ngraph = Graph('wrong')\na = graph.source(never, name='a')\nb = graph.source(never, name='b')\n"
    )
    result = call("check", "mine.py", file=wrong)
    line = 1 + wrong.splitlines().index("a = graph.source(never, name='a')")
    assert result.exit_code == 2
    assert [message.partition(": ")[0] for message in result.stdout.splitlines()] == [
        f"mine.py:{line}",
        f"mine.py:{line + 1}",
        "wrong",
    ]


def test_check_calls_a_graph_function_with_string_arguments() -> None:
    result = call("check", "mine.py", "--", "5", "-x", file=BUILDER)
    assert result.stdout.startswith("5-x: all clear")


def test_viz_draws_to_working_directory_without_starting_the_graph() -> None:
    result = call("viz", "mine.py", file=ONE)
    assert result.exit_code == 0
    assert result.stdout == "mine.svg: 3 stages, 2 channels, 4 workers, 2 of them in processes\n"
    assert "halves" in Path("mine.svg").read_text()


@pytest.mark.parametrize("suffix", ["svg", "png", "dot", "mmd"])
def test_viz_chooses_the_format_by_the_output_suffix(suffix: str) -> None:
    assert call("viz", "mine.py", "-o", f"out.{suffix}", file=ONE).exit_code == 0
    assert Path(f"out.{suffix}").stat().st_size > 0


def test_viz_draws_a_graph_that_has_problems() -> None:
    result = call(
        "viz", "mine.py", "-o", "out.dot", file=HEAD + "\ngraph = Graph('g')\ngraph.source(never)\n"
    )
    assert result.exit_code == 0
    assert "not read" in Path("out.dot").read_text()


def test_viz_rejects_unknown_format() -> None:
    result = call("viz", "mine.py", "-o", "out.gif", file=ONE)
    assert result.exit_code == 2
    assert "'out.gif': the file name must end in one of .svg, .png, .pdf, .dot, .mmd" in result.stderr


def test_viz_rejects_an_output_that_cannot_be_written() -> None:
    assert "can't write nowhere/out.dot: No such file" in refused(
        call("viz", "mine.py", "-o", "nowhere/out.dot", file=ONE)
    )


def test_missing_file_is_reported_in_one_line() -> None:
    assert refused(call("check", "none.py")) == "flowchan: none.py: no such file"


@pytest.mark.parametrize("content", [b"\0\1\2", b"\xff\xfe", b"def (", b"plain words here"])
def test_invalid_python_is_reported_in_one_line(content: bytes) -> None:
    Path("mine.py").write_bytes(content)
    assert "mine.py" in refused(call("check", "mine.py"))
    assert "not valid Python" in refused(call("check", "mine.py"))


def test_error_in_file_is_reported_in_one_line() -> None:
    line = refused(call("check", "mine.py", file="import os\nimport no_such_module\n"))
    assert line.startswith(
        "flowchan: mine.py: ModuleNotFoundError: No module named 'no_such_module' (line 2)"
    )


def test_debug_shows_the_traceback() -> None:
    result = call("check", "mine.py", "--debug", file="1 / 0\n")
    assert result.exit_code == 2
    assert "Traceback" in result.stderr
    assert "ZeroDivisionError" in result.stderr


def test_error_for_file_that_exits_on_import_names_main_guard() -> None:
    assert "__main__" in refused(call("check", "mine.py", file="raise SystemExit(0)\n"))


def test_file_without_graph_is_reported_in_one_line() -> None:
    assert "no graph found" in refused(call("check", "mine.py", file="x = 1\n"))


def test_error_for_file_with_several_graphs_lists_the_graphs() -> None:
    two = ONE + "\nother = declare('other')\nsame = other\ndef build() -> 'Graph':\n    return other\n"
    assert refused(call("check", "mine.py", file=two)) == (
        "flowchan: mine.py defines several graphs; choose one of mine.py:graph, mine.py:other, mine.py:build"
    )
    assert call("check", "mine.py:other").stdout.startswith("other: all clear")
    assert call("check", "mine.py:build").stdout.startswith("other: all clear")


def test_object_with_a_graph_attribute_is_accepted_as_a_target() -> None:
    head = f"""{HEAD}
class Pipe:
    def __init__(self, name: str = "within") -> None:
        self.found = Graph(name)
        self.found.source([1]).sink(print)

    @property
    def graph(self) -> Graph:
        return self.found
"""
    one = head + "pipe = Pipe()\ngraph = pipe.graph\n"
    builder = head + "def make(name: str) -> Pipe:\n    return Pipe(name)\n"
    assert call("check", "mine.py", file=one).stdout.startswith("within: all clear")
    assert call("check", "mine.py", "other", file=builder).stdout.startswith("other: all clear")
    assert "only a function that returns a graph takes arguments, got a" in refused(
        call("check", "mine.py", "a", file=one)
    )


def test_function_named_on_the_command_line_needs_no_annotation() -> None:
    assert call("check", "mine.py:declare", "plain", file=HEAD).stdout.startswith("plain: all clear")


def test_unknown_graph_name_is_reported_in_one_line() -> None:
    assert "has no 'nope'; its graphs are graph" in refused(call("check", "mine.py:nope", file=ONE))
    assert "must be a graph or a function that returns one, got an object" in refused(
        call("check", "mine.py:x", file=ONE + "\nx = 1\n")
    )
    assert "got an object of type int" in refused(call("check", "mine.py:f", file="def f():\n    return 1\n"))


def test_wrong_arguments_are_reported_in_one_line() -> None:
    assert "(name: str, twice='no'), got 3 argument" in refused(
        call("check", "mine.py", "a", "b", "c", file=BUILDER)
    )
    assert "only a function that returns a graph takes arguments, got a" in refused(
        call("check", "mine.py", "a", file=ONE)
    )


def test_file_named_like_standard_module_does_not_replace_it() -> None:
    assert call("check", "queue.py", file=ONE, name="queue.py").exit_code == 0
    import queue

    assert hasattr(queue, "SimpleQueue")


def test_modules_next_to_the_file_can_be_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("neighbour_of_mine.py").write_text(ONE)
    Path("mine.py").write_text("from neighbour_of_mine import graph\n")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert call("check", "../mine.py").stdout.startswith("halves: all clear")


def test_loading_a_file_does_not_write_bytecode() -> None:
    assert call("check", "mine.py", file=ONE).exit_code == 0
    assert os.listdir() == ["mine.py"]


def test_help_does_not_load_heavy_modules() -> None:
    code = (
        "import sys; from click.testing import CliRunner; from flowchan.cli.commands import main\n"
        "assert CliRunner().invoke(main, ['--help']).exit_code == 0\n"
        "heavy = {'torch', 'numpy', 'networkx', 'graphviz', 'rich', 'flowchan.viz'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
