"""Test the format of Python stacks, and the file that a worker process writes its stacks to."""

from __future__ import annotations

import os
import types
from typing import Any

from runs import last_calls

from flowchan.run.observe.stack_text import text_of_coroutine, text_of_dump
from flowchan.run.worker import stack_file


def test_coroutine_stack_follows_awaited_calls() -> None:
    @types.coroutine
    def bottom() -> Any:
        yield

    async def middle() -> None:
        await bottom()

    async def top() -> None:
        await middle()

    one = top()
    one.send(None)
    assert last_calls(text_of_coroutine(one)) == ["top", "middle", "bottom"]
    one.close()
    assert text_of_coroutine(one) == ""


def test_text_of_dump_reverses_order_of_threads_and_calls() -> None:
    dump = (
        'Thread 0x0000002a (most recent call first):\n  File "/none.py", line 5 in <lambda>\n'
        '  File "/none.py", line 6 in run\n\n'
        "Current thread 0x0000002b (most recent call first):\n  <no Python frame>\n"
    )
    assert text_of_dump(dump) == (
        "thread 0x0000002b:\n  <no Python frame>\n\n"
        'thread 0x0000002a:\n  File "/none.py", line 6, in run\n  File "/none.py", line 5, in <lambda>\n'
    )


def test_text_of_dump_omits_process_startup_calls() -> None:
    dump = (
        'Current thread 0x0000002b (most recent call first):\n  File "/none.py", line 5 in f\n'
        '  File "/none.py", line 6 in serving_stacks\n  File "/none.py", line 7 in <module>\n'
    )
    calls = '  File "/none.py", line 6, in serving_stacks\n  File "/none.py", line 5, in f\n'
    assert text_of_dump(dump) == calls


def test_text_of_single_thread_dump_has_no_thread_heading() -> None:
    dump = (
        'Current thread 0x0000002b [name] (most recent call first):\n  File "/none.py", line 5 in f\n  ...\n'
    )
    assert text_of_dump(dump) == '  ...\n  File "/none.py", line 5, in f\n'


def test_text_that_is_not_a_dump_is_returned_unchanged() -> None:
    assert text_of_dump("") == ""
    assert text_of_dump("unknown\n") == "unknown\n"


def test_stack_file_ignores_incomplete_dumps() -> None:
    file = stack_file.StackFile()
    try:
        assert file.state == b""
        os.write(file._fd, stack_file.READY + b"\x02old\x03")
        assert file.state == stack_file.READY
        file.clear()
        assert file.answer() is None
        os.write(file._fd, b"rest of an old one\x03")
        assert file.answer() is None
        os.write(file._fd, b"\x02new")
        assert file.answer() is None
        os.write(file._fd, b"est\x03\x02la")
        assert file.answer() == "newest"
        assert file.last_words() == ""
        os.write(file._fd, b"\x01last\x03")
        assert file.last_words() == "last"
        assert file.state == stack_file.READY
    finally:
        file.close()
