"""Test that the record keeps sent messages until they are handled, wherever one thread interrupts another."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from typing import Any

from support.optional_packages import optional

torch = optional("torch")


def switched(first: Callable[[], Any], second: Callable[[], Any], point: int) -> bool:
    """Run ``second`` before one bytecode instruction of ``first``, as another thread could.

    Return False if ``first`` has fewer instructions.
    """
    left = point
    before = sys.gettrace()

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal left
        frame.f_trace_opcodes = True
        if event == "opcode":
            left -= 1
            if left == 0:
                sys.settrace(None)
                second()
        return trace if left > 0 else None

    sys.settrace(trace)
    try:
        first()
    finally:
        sys.settrace(before)
    return left <= 0


def test_record_keeps_unhandled_messages_at_each_thread_switch() -> None:
    """One thread receives the answer to all messages except the last, while another sends a message."""
    from flowchan.pipelines.remote_tensors.command_format import TemplateSpec, pack_batch
    from flowchan.pipelines.remote_tensors.sent_commands import RECENT, SentCommands

    spec = TemplateSpec("op", (), {}, 0, 0, (), (), None)
    last = RECENT + 1

    def send(record: SentCommands, number: int) -> None:
        record.sent(pack_batch(0, [-1 if number < last else -2, number], []))
        record.freed([-1] if number == 2 else [-2] if number == last else [])

    for point in itertools.count(1):
        record = SentCommands()
        record.defined(-1, spec)
        record.defined(-2, spec)
        for number in range(1, last + 1):
            send(record, number)

        def answer(record: SentCommands = record) -> None:
            record.answered(last - 1)

        if not switched(answer, lambda: send(record, last + 1), point):  # noqa: B023
            break
        assert record.first_lost((), None) == (last, "op")
        record.answered(last + 1)
        assert record.first_lost((), None) is None
    assert point > 3
