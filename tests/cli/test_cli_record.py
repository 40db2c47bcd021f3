"""Test ``flowchan record``, ``flowchan replay`` and ``flowchan peek``: their output and exit codes."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from support.optional_packages import optional

from flowchan import Recording
from flowchan.cli.commands import main
from flowchan.items.recording import recording_options

numpy = optional("numpy")

GRAPH = """
import sys
from flowchan import Graph


class Word:
    def __init__(self, text):
        self.text = text

    def __repr__(self):
        return f"Word({self.text!r})"


def inverse(word):
    return 12 // int(word.text)


def made(most: int = 6) -> Graph:
    graph = Graph("words")
    numbers = graph.source(map(str, range(most)), name="numbers")
    words = numbers.map(Word, on="process", workers=2, name="words")
    results = words.map(inverse, on="process", name="inverse")
    results.errors.sink(lambda failed: print("failed", failed.item, file=sys.stderr), name="failures")
    pairs = results.map(lambda n: n % 5, key=lambda n: n % 2, workers=2, name="keyed")
    left, right = pairs.tee(2, name="tee")
    left.reduce(lambda a, b: a + b, 0, name="total")
    right.sink(lambda n: print("effect", n, file=sys.stderr), name="effect")
    return graph
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "words.py").write_text(GRAPH)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def flowchan(*args: str, code: int = 0) -> Result:
    """Run a command, and check its exit code."""
    result = CliRunner().invoke(main, args)
    assert result.exit_code == code, result.output
    return result


def test_record_runs_graph_and_writes_items_of_channel(folder: Path) -> None:
    result = flowchan("record", "words.py:made", "words", "-o", "out.rec", "--seed", "3")
    assert "graph 'words': done after" in result.stdout
    assert "seed 3" in result.stdout
    assert "total: " in result.stdout
    size = (folder / "out.rec").stat().st_size
    assert result.stdout.endswith(f"\nout.rec: 6 items of channel 'words' in graph 'words', {size:,} bytes\n")
    assert [word.text for word in Recording("out.rec")] == list("012345")


def test_arguments_after_double_dash_reach_graph_of_record_and_replay(folder: Path) -> None:
    flowchan("record", "words.py:made", "words", "--", "9")
    assert len(Recording("items.rec")) == 9
    assert "9 = 9 out" in flowchan("replay", "words.py:made", "words", "items.rec", "--", "4").stdout


def test_record_reports_that_a_limit_ended_the_recording(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    result = flowchan("record", "words.py:made", "numbers", "--most", "4")
    reason = "the limit of 4 items was reached"
    assert f"'numbers' ended after 4 items, because {reason}" in caplog.text
    assert f"the recording ended before the channel did: {reason}\n" in result.stdout
    assert list(Recording("items.rec")) == list("0123")
    flowchan("record", "words.py:made", "words", "--max-bytes", "0.5KB")
    assert (folder / "items.rec").stat().st_size < 700
    assert "500 bytes" in Recording("items.rec").stopped


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["other"], "channel must be one of 'numbers', 'words', 'inverse', 'inverse.errors', "),
        (
            ["words", "--max-bytes", "many"],
            "must be a number of bytes such as 4096, 500MB or 2GiB, got 'many'",
        ),
        (["words", "--most", "0"], "0 is not in the range"),
        (["words", "-o", "missing/items.rec"], "path must name a file in a folder that exists"),
    ],
)
def test_record_refuses_wrong_arguments_with_exit_code_2(
    arguments: list[str], reason: str, folder: Path
) -> None:
    result = CliRunner().invoke(main, ["record", "words.py:made", *arguments])
    assert result.exit_code == 2
    assert reason in " ".join(result.output.split())
    assert not (folder / "items.rec").exists()


def test_failed_run_exits_with_1_and_keeps_its_recording(folder: Path) -> None:
    (folder / "fails.py").write_text(
        "from flowchan import Graph\ngraph = Graph()\n"
        "graph.source([4, 2, 0], name='numbers').map(lambda n: 8 // n, name='halve').collect()\n"
    )
    result = flowchan("record", "fails.py", "numbers", code=1)
    assert "stage 'halve' failed on item 0" in result.stderr
    assert "items.rec: 3 items of channel 'numbers'" in result.stdout


def test_replay_feeds_stage_alone_and_prints_its_outputs(folder: Path) -> None:
    flowchan("record", "words.py:made", "words")
    result = flowchan("replay", "words.py:made", "inverse", "items.rec")
    assert "inverse" in result.stdout
    assert "effect" not in result.output
    assert "output of inverse: [12, 6, 4, 3, 2]\n" in result.stdout
    assert "output of inverse.errors: 1 item, [Failed(item=Word('0')" in result.stdout


def test_replay_of_one_item_shows_its_traceback(folder: Path) -> None:
    flowchan("record", "words.py:made", "words")
    command = ("replay", "words.py:made", "inverse", "items.rec", "--item")
    assert "output of inverse: [4]" in flowchan(*command, "3").stdout
    result = flowchan(*command, "0", code=1)
    assert "stage 'inverse' failed on item Word('0')" in result.stderr
    assert "return 12 // int(word.text)" in result.stderr
    assert "ZeroDivisionError" in result.stderr
    assert "number must be between -6 and 5" in flowchan(*command, "6", code=2).stderr


@pytest.mark.parametrize(
    ("channel", "stage", "shown"),
    [
        ("inverse", "keyed", "output of keyed: [2, 1, 4, 3, 2]"),
        ("keyed", "tee", "output of tee.1: [2, 1, 4, 3, 2]"),
        ("tee.0", "total", "total: 12"),
        ("tee.1", "effect", "5 = 5 out"),
    ],
)
def test_replay_works_for_each_kind_of_stage(channel: str, stage: str, shown: str, folder: Path) -> None:
    flowchan("record", "words.py:made", channel)
    result = flowchan("replay", "words.py:made", stage, "items.rec")
    assert shown in result.output
    assert ("effect 2" in result.stderr) == (stage == "effect")


@pytest.mark.parametrize(
    ("stage", "file", "reason"),
    [
        ("other", "items.rec", "has no stage named 'other'"),
        (
            "numbers",
            "items.rec",
            "stage must have exactly one input that recorded items can fill, got 'numbers'",
        ),
        ("inverse", "words.py", "path must be a file that `flowchan record` has written, got 'words.py'"),
        ("inverse", "missing.rec", "can't read missing.rec: No such file or directory"),
    ],
)
def test_replay_refuses_wrong_arguments_with_exit_code_2(
    stage: str, file: str, reason: str, folder: Path
) -> None:
    with recording_options("items.rec", "words", "words", 3, 1_000).opened() as writer:
        writer.write("1")
    result = CliRunner().invoke(main, ["replay", "words.py:made", stage, file])
    assert result.exit_code == 2
    assert reason in result.output


def test_peek_shows_short_texts_of_the_first_items(folder: Path) -> None:
    items = [1, numpy.zeros((480, 640, 3), "f4"), {"a": numpy.zeros(100)}, numpy.arange(2), b"x" * 1_000]
    items += ["long " * 100, *range(100)]
    with recording_options("items.rec", "pictures", "decode", 1_000, 10**8).opened() as writer:
        for item in items:
            writer.write(item)
    head, *lines, end = flowchan("peek", "items.rec", "-n", "6").stdout.splitlines()
    assert head.startswith("items.rec: 106 items of channel 'decode' in graph 'pictures', ")
    assert lines[:4] == [
        "  0  1",
        "  1  <ndarray 480 × 640 × 3 float32>",
        "  2  {'a': <ndarray 100 float64>}",
        "  3  array([0, 1])",
    ]
    assert lines[4].endswith("x'... (1,000 bytes)")
    assert all(len(line) <= 200 for line in lines)
    assert end == "… 100 more; -n 106 shows all"
    assert len(flowchan("peek", "items.rec", "-n", "1000").stdout.splitlines()) == 107


def test_peek_continues_after_item_that_cannot_be_unpickled(folder: Path) -> None:
    (folder / "shapes.py").write_text("class Shape:\n    pass\n")
    program = (
        "import shapes\nfrom flowchan.items.recording import recording_options\n"
        "with recording_options('items.rec', 'g', 'c', 9, 9000).opened() as writer:\n"
        "    for item in (1, shapes.Shape(), 3):\n        writer.write(item)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
    (folder / "shapes.py").unlink()
    result = flowchan("peek", "items.rec", code=1)
    assert result.stdout.splitlines()[1:] == [
        "  0  1",
        "  1  <can't be unpickled: ModuleNotFoundError: No module named 'shapes'>",
        "  2  3",
    ]


def test_incomplete_recording_is_reported_but_replayed(folder: Path) -> None:
    flowchan("record", "words.py:made", "words")
    data = (folder / "items.rec").read_bytes()
    (folder / "items.rec").write_bytes(data[:-120])
    incomplete = "the file is incomplete: its program was killed or is still running"
    assert incomplete in flowchan("peek", "items.rec").stdout
    result = flowchan("replay", "words.py:made", "inverse", "items.rec")
    assert incomplete in result.stderr
    assert "output of inverse: [12, 6, 4, 3]" in result.stdout


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_record_completes_its_file(number: int, folder: Path) -> None:
    (folder / "endless.py").write_text(
        "import itertools\nfrom flowchan import Graph\ngraph = Graph()\n"
        "def tell(item):\n    if item == 100:\n        print('going', flush=True)\n"
        "graph.source(itertools.count, name='numbers').sink(tell)\n"
    )
    call = "from flowchan.cli.commands import main; main()"
    command = [sys.executable, "-c", call, "record", "endless.py", "numbers", "--most", "1000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "going\n"
        process.send_signal(number)
        out, err = process.communicate()
    assert process.returncode == 128 + number, err
    assert "of channel 'numbers'" in out
    recording = Recording("items.rec")
    assert recording.complete
    assert list(recording) == list(range(len(recording)))
