"""Test that dialling retries, and that its error reports the most useful reason."""

from __future__ import annotations

from typing import Any

import pytest
from ends import SECRET

from flowchan.errors import Refused
from flowchan.transport import dial, tcp


def test_dial_reports_earlier_error_if_last_attempt_times_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tries: list[float] = []
    really_meet = dial.meet

    def meet(sock: Any, *args: Any, timeout: float, **options: Any) -> Any:
        tries.append(timeout)
        if len(tries) > 1:
            # imitates a peer that does not answer
            return really_meet(sock, *args, timeout=timeout, **options)
        sock.close()
        raise Refused("its secret is different")

    monkeypatch.setattr(dial, "meet", meet)
    with (
        tcp.listen("127.0.0.1:0") as listener,
        pytest.raises(OSError, match=r"no way: its secret is different at 127\.0\.0\.1"),
    ):
        dial.reach(listener.address, SECRET, {}, why="no way", within=0.3, tls=False)
    assert len(tries) > 1


def test_backoff_pauses_double_with_jitter_up_to_a_limit() -> None:
    backoff = dial.Backoff()
    pauses = [backoff.pause() for _ in range(20)]
    for n, pause in enumerate(pauses):
        most = min(dial.SHORTEST * 2**n, dial.LONGEST)
        assert most / 2 <= pause <= most
    assert len({*pauses[-8:]}) > 1
    backoff.reset()
    assert backoff.pause() <= dial.SHORTEST
