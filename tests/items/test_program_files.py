"""Test in-memory files that are part of a program."""

from __future__ import annotations

from support.scripts import run_python

USED_LAST = """
import atexit, os

files = []
atexit.register(lambda: print(os.fstat(files[0].fd).st_size))  # registered first, so it runs last

from flowchan.items.program_file import ProgramFile

files.append(ProgramFile("test"))
"""


def test_file_stays_open_until_the_process_has_ended() -> None:
    assert run_python("-c", USED_LAST) == "0\n"
