"""Test that a signal handler that raises in a receive of the torch backend leaves no lock locked."""

from __future__ import annotations

import contextlib
import itertools
import threading
from typing import Any

import pytest
from support.optional_packages import optional
from support.scripted_interrupt import Interrupt

from flowchan import collective

optional("torch")


@pytest.mark.parametrize("call", ["next", "close"])
def test_interrupted_receive_leaves_no_lock_held(call: str) -> None:
    from flowchan.collective.torch.receives import Receives

    def run(receives: Any) -> None:
        with contextlib.suppress(TimeoutError):
            receives.next(None, "tag", 0.0) if call == "next" else receives.close()

    one, other = collective.members(2)
    for number in itertools.count(1):
        receives, interrupt = Receives(one), Interrupt(number, (threading.__file__,))
        interrupt.during(run, receives)
        thread = threading.Thread(target=receives.close, daemon=True)
        thread.start()
        thread.join(30)
        assert not thread.is_alive(), interrupt.where
        if not interrupt.where:
            break
    for member in (one, other):
        member._abandon()
