"""Format Python stacks like tracebacks, with the most recent call last.

The stacks of worker processes come from ``faulthandler``, which puts the most recent call first and omits
source lines. Calls from before the start of the worker are dropped, because after a fork they belong to the
main program.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator
from types import FrameType
from typing import Any

from flowchan.run.worker.stack_file import serving_stacks

_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')
_STARTS = f" in {serving_stacks.__name__}"
_THREAD = re.compile(r"(?:Current thread|Thread) (0x[0-9a-f]+)")


def text_of_dump(dump: str) -> str:
    """Convert a dump from ``faulthandler`` to text.

    If the process has several threads, a line with the thread's ID precedes each stack. The oldest thread
    comes first, because it usually runs the worker.
    """
    threads: list[tuple[str, list[str]]] = []
    started = False
    for line in dump.splitlines():
        if found := _THREAD.match(line):
            threads.append((f"thread {found[1]}:\n", []))
            started = False
        elif line and threads and not started:
            started = line.endswith(_STARTS)
            threads[-1][1].append(_entry(line))
    alone = len(threads) == 1
    stacks = (("" if alone else name) + "".join(reversed(frames)) for name, frames in reversed(threads))
    return "\n".join(stacks) or dump


def _entry(line: str) -> str:
    if not (found := _FRAME.fullmatch(line)):
        return f"{line}\n"  # a line such as "<no Python frame>"
    file, number, function = found.groups()
    return "".join(traceback.format_list([traceback.FrameSummary(file, int(number), function)]))


def text_of_frame(frame: FrameType) -> str:
    """Return the stack of the thread that executes ``frame``, as text."""
    return "".join(traceback.format_stack(frame))


def text_of_coroutine(coroutine: Any) -> str:
    """Return the stack of a suspended coroutine as text, including everything that it awaits."""
    return "".join(traceback.StackSummary.extract(_awaited(coroutine)).format())


def _awaited(coroutine: Any) -> Iterator[tuple[FrameType, int]]:
    """Yield the frame and line of a coroutine, of the awaitable that it waits for, and so on."""
    while coroutine is not None:
        for frame, awaits in (
            ("cr_frame", "cr_await"),
            ("gi_frame", "gi_yieldfrom"),
            ("ag_frame", "ag_await"),
        ):
            if (found := getattr(coroutine, frame, None)) is not None:
                yield found, found.f_lineno
                coroutine = getattr(coroutine, awaits)
                break
        else:
            return
