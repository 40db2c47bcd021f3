"""Messages from one member to another arrive in order, whole, and without a receiver that waits for them."""

from __future__ import annotations

import os
import signal
from typing import Any

import numpy as np
import pytest
from collective_members import Processes, in_threads

from flowchan import MemberDied, MemberLeft, Mismatch


def test_messages_of_any_kind_arrive_in_order(run_on_one_host: Any) -> None:
    values = [1, "text", {"a": [1.5]}, np.arange(3), np.arange(200_000.0), b"bytes"]

    def body(g: Any) -> list[str]:
        for to in range(g.size):
            if to != g.rank:
                for value in values:
                    g.send(value, to)
        g.barrier()
        return [
            repr(g.receive(source))
            for source in range(g.size)
            if source != g.rank
            for _ in range(len(values))
        ]

    assert run_on_one_host(3, body) == [[*map(repr, values)] * 2] * 3


def test_a_ring_shift_replaces_what_each_has(run_on_one_host: Any) -> None:
    def body(g: Any) -> Any:
        x = g.rank
        for _ in range(g.size + 1):
            x = g.sendreceive(x, to=(g.rank + 1) % g.size, source=(g.rank - 1) % g.size)
        return x

    assert run_on_one_host(4, body) == [3, 0, 1, 2]


def test_out_is_filled_and_has_to_fit() -> None:
    def body(g: Any) -> Any:
        if g.rank == 0:
            g.send(np.arange(6.0), 1)
            g.send(np.arange(6.0), 1)
            return None
        out = np.empty((2, 3))
        assert g.receive(0, out=out) is out
        with pytest.raises(Mismatch, match=r"rank 0 sent float64\[6\]; rank 1 has room for float32\[6\]"):
            g.receive(0, out=np.empty(6, np.float32))
        return out.tolist()

    assert in_threads(2, body)[1] == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]


def test_what_was_sent_before_a_clean_end_is_received_after_it(run_on_one_host: Any) -> None:
    def body(g: Any) -> Any:
        if g.rank == 0:
            g.send("farewell", 1)
            return None
        g._see(0)
        found = g.receive(0)
        with pytest.raises(MemberLeft, match="rank 0 has left"):
            g.receive(0)
        return found

    assert run_on_one_host(2, body)[1] == "farewell"


def test_who_waits_for_a_message_of_a_dead_member_learns_of_its_death() -> None:
    def body(g: Any, sends: bool) -> Any:
        if g.rank == 0:
            if sends:
                g.send(1, 1)
                g.receive(1)
            os.kill(os.getpid(), signal.SIGKILL)
        if sends:
            g.receive(0)
            g.send(2, 0)
        with pytest.raises(MemberDied, match="rank 0 died") as info:
            g.receive(0)
        return info.value.ranks

    for sends in (False, True):
        assert Processes(2, body, sends).results(1) == {1: (0,)}


def test_wrong_ranks_and_times_are_refused() -> None:
    def body(g: Any) -> None:
        for wrong in (g.rank, 2, -1, True):
            with pytest.raises(ValueError, match="rank of another member"):
                g.send(1, wrong)
        with pytest.raises(TimeoutError, match="has sent nothing"):
            g.receive(1 - g.rank, timeout=0.01)
        g.barrier()

    assert in_threads(2, body) == [None, None]
