"""Test ``flowchan peek RUN CHANNEL``, which shows items of a run of another program without taking them."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.scripts import script, start
from support.waiting import wait_until

from flowchan.cli.view_client import ViewedRun, ViewError, run_names

PEEK = [sys.executable, "-c", "from flowchan.cli.commands import main; main()", "peek"]

PROGRAM = """
import os, sys, threading
from flowchan import Graph

class Word:
    def __init__(self, text):
        self.text = text

def waits(word):
    while not os.path.exists(sys.argv[1]):
        threading.Event().wait(0.01)
    return word.text

def declared(name):
    graph = Graph(name)
    words = graph.source([f"w{n}" for n in range(20)], name="names").map(Word, on="process", name="words")
    return graph, words.map(waits, on="process", workers=2, name="lengths").collect(name="results")

if __name__ == "__main__":
    runs = [(graph.start(), result) for graph, result in map(declared, sys.argv[2:])]
    for run, result in runs:
        print(run.wait()[result] == [f"w{n}" for n in range(20)], flush=True)
"""


def names_of(pid: int) -> set[str]:
    """Return the names of the runs of a program that have a socket."""
    return {name for name in run_names() if name.startswith(f"{pid}-")}


@contextlib.contextmanager
def running(folder: Path, *graphs: str) -> Iterator[subprocess.Popen[str]]:
    """Run a program whose graphs wait until the folder contains a file named "go"; check its results."""
    with start(script(folder, PROGRAM), str(folder / "go"), *graphs, cwd=folder) as process:
        try:
            wait_until(lambda: len(names_of(process.pid)) == len(graphs) or process.poll() is not None)
            yield process
        finally:
            (folder / "go").touch()
            said, _ = process.communicate()
    assert said == "True\n" * len(graphs)


def peek(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*PEEK, *arguments], capture_output=True, text=True, check=False)


def begun(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen([*PEEK, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_peek_shows_items_of_a_run_and_takes_none(tmp_path: Path) -> None:
    with running(tmp_path, "shown") as process:
        done = peek(str(process.pid), "words", "-n", "5")
        again = peek(f"{process.pid}-1", "words", "-n", "5")
        head, *lines = done.stdout.splitlines()
        assert (done.returncode, done.stderr) == (0, "")
        assert head.startswith("channel 'words' in graph 'shown': ")
        assert [line.split(None, 2) for line in lines] == [
            ["0", "taken", "Word(text='w0')"],
            ["1", "taken", "Word(text='w1')"],
            *([str(number), "inside", f"Word(text='w{number}')"] for number in range(2, 5)),
        ]
        assert again.stdout.splitlines()[1:] == lines


def test_peek_waits_for_later_items_until_the_channel_ends(tmp_path: Path) -> None:
    with running(tmp_path, "ends") as process, begun(str(process.pid), "lengths", "-n", "50") as peeking:
        assert peeking.stdout is not None
        head = "channel 'lengths' in graph 'ends': 0 items inside, 0 taken by readers\n"
        assert peeking.stdout.readline() == head
        (tmp_path / "go").touch()
        said, errors = peeking.communicate()
        assert peeking.returncode == 0
        assert errors == f"flowchan: channel 'lengths' has ended after {len(said.splitlines())} items\n"


def test_run_continues_if_peek_is_interrupted_or_killed(tmp_path: Path) -> None:
    with running(tmp_path, "goes_on") as process:
        for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)):
            with begun(str(process.pid), "words", "-n", "100") as peeking:
                assert peeking.stdout is not None
                assert peeking.stdout.readline().startswith("channel 'words'")
                peeking.send_signal(number)
                peeking.communicate()
            assert peeking.returncode == code
            assert process.poll() is None


def test_peek_reports_end_of_a_program_that_is_killed(tmp_path: Path) -> None:
    with start(script(tmp_path, PROGRAM), str(tmp_path / "go"), "killed", cwd=tmp_path) as process:
        wait_until(lambda: bool(names_of(process.pid)))
        with begun(str(process.pid), "words", "-n", "100") as peeking:
            assert peeking.stdout is not None
            assert peeking.stdout.readline().startswith("channel 'words'")
            process.kill()
            _, errors = peeking.communicate()
        process.communicate()
    assert peeking.returncode == 1
    assert errors == f"flowchan: the program of run {process.pid}-1 exited before the run ended\n"


def test_peek_names_the_remedy_for_wrong_arguments(tmp_path: Path) -> None:
    with running(tmp_path, "one", "two") as process:
        pid = process.pid
        several = peek(str(pid), "words")
        assert (several.returncode, several.stdout) == (1, "")
        assert f"process {pid} has the runs {pid}-1, {pid}-2; pass one of these names" in several.stderr
        near = peek(f"{pid}-1", "word")
        assert near.returncode == 1
        assert "channel must be a channel of the run, got 'word'; did you mean 'words'?" in near.stderr
        far = peek(f"{pid}-1", "x" * 9)
        assert "the channels are names, words, lengths" in far.stderr
    none = peek("999999999", "words")
    assert none.returncode == 1
    assert "no run of process 999999999 was found" in none.stderr
    channel_missing = peek("999999999")
    assert channel_missing.returncode == 2
    assert "can't read 999999999" in channel_missing.stderr


def test_several_viewers_see_the_same_items(tmp_path: Path) -> None:
    with running(tmp_path, "seen") as process:
        peeks = [begun(str(process.pid), "words", "-n", "8") for _ in range(3)]
        texts = {one.communicate()[0] for one in peeks}
        assert len(texts) == 1
        assert len(texts.pop().splitlines()) == 9


@pytest.mark.parametrize("request_bytes", [b"no json\n", b"[]\n", b"{}\n", b'{"peek": "words"}\n', b"{"])
def test_invalid_request_ends_only_its_connection(request_bytes: bytes, tmp_path: Path) -> None:
    with running(tmp_path, "asked") as process:
        (name,) = names_of(process.pid)
        viewed = ViewedRun(name)
        with contextlib.closing(viewed):
            viewed.hello()
            viewed._socket.sendall(request_bytes)
            with pytest.raises(ViewError, match="exited before the run ended"):
                [*viewed.statistics()]
        assert process.poll() is None


def test_viewer_that_reads_nothing_does_not_delay_the_run(tmp_path: Path) -> None:
    with running(tmp_path, "silent") as process:
        (name,) = names_of(process.pid)
        viewed = ViewedRun(name)
        viewed._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        viewed._socket.sendall(json.dumps({"peek": "words", "count": 10**6}).encode() + b"\n")
        (tmp_path / "go").touch()
        assert process.wait(60) == 0
        viewed.close()
