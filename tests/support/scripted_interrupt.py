"""Simulate a Ctrl-C at a given point of a call, without a signal."""

from __future__ import annotations

import dis
import functools
import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

CHECKS_AFTER = ("CALL", "CALL_KW", "CALL_FUNCTION_EX", "JUMP_BACKWARD")


@functools.cache
def instructions(code: CodeType) -> dict[int, str]:
    return {one.offset: one.opname for one in dis.get_instructions(code)}


class Interrupt:
    """Raises KeyboardInterrupt at a given check for signals; checks are counted from 1.

    Python checks for signals when a Python function begins, when it has called native code, and when it jumps
    backwards. Only the checks in functions whose files begin with one of ``files`` count.

    Attributes:
        where: Function and line of the check that raised; empty if none did.
    """

    def __init__(self, number: int, files: tuple[str, ...]) -> None:
        self.where = ""
        self._left, self._files = number, files
        self._before: dict[FrameType, str] = {}

    def during(self, call: Callable[..., Any], *arguments: Any) -> Any:
        sys.settrace(self._begin)
        try:
            return call(*arguments)
        except KeyboardInterrupt:
            return None
        finally:
            sys.settrace(None)
            self._before.clear()  # release the frames and their objects

    def _begin(self, frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(self._files):
            return None
        if frame.f_back is not None:
            # For a call of a Python function, Python checks at the function's beginning, not after the call.
            self._before.pop(frame.f_back, None)
        frame.f_trace_opcodes = True
        self._look(frame)
        return self._follow

    def _follow(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "opcode":
            if self._before.get(frame) in CHECKS_AFTER:
                self._look(frame)
            self._before[frame] = instructions(frame.f_code)[frame.f_lasti]
        elif event in ("return", "exception"):  # Python does not check after a call that has raised
            self._before.pop(frame, None)
        return self._follow

    def _look(self, frame: FrameType) -> None:
        self._left -= 1
        if self._left == 0:
            self.where = f"{frame.f_code.co_qualname}, line {frame.f_lineno}"
            raise KeyboardInterrupt
