"""Test channels between processes that run in an emulator, as in a container for another architecture."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

EMULATOR = shutil.which(f"qemu-{platform.machine()}-static")
PROGRAM = """
import multiprocessing
from flowchan import Channel, Empty

def write(channel, asked):
    with channel.writer() as writer:
        writer.put("first")
        asked.wait()
        writer.put("second")

if __name__ == "__main__":
    fork = multiprocessing.get_context("fork")
    channel, asked = Channel(2, across="processes"), fork.Event()
    process = fork.Process(target=write, args=(channel, asked), daemon=True)
    process.start()
    print(channel.get())
    try:
        channel.get(timeout=2)  # long enough for a look at the writer's process
    except Empty:
        print("no item yet")
    asked.set()
    print(channel.get())
    process.join()
"""


@pytest.mark.skipif(EMULATOR is None, reason="an emulator is missing: apt install qemu-user-static")
def test_living_writer_in_an_emulator_does_not_count_as_dead(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = subprocess.run(
        [str(EMULATOR), sys.executable, program], capture_output=True, text=True, timeout=300
    )
    assert (done.stdout, done.stderr) == ("first\nno item yet\nsecond\n", "")
