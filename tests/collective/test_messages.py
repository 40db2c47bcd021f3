"""Test that messages arrive complete and in order, even if they are sent before the receiver waits."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import numpy as np
import pytest
from support.group_members import Processes, in_threads, over_hosts, raised
from support.waiting import wait_blocked, wait_until

from flowchan import Full, GroupError, MemberDied, MemberLeft, Mismatch
from flowchan.collective import members, point_to_point


def test_messages_of_all_types_arrive_in_order(run: Any) -> None:
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

    assert run(3, body) == [[*map(repr, values)] * 2] * 3


def test_receive_converts_between_array_and_tensor(run: Any) -> None:
    """The element types and sizes must match, as in any operation."""

    def body(g: Any) -> Any:
        import torch

        values = [np.arange(6.0), torch.arange(6.0).double().reshape(2, 3).T]
        if g.rank == 0:
            for value in values:
                g.send(value, 1)
            return None
        outs = torch.empty(2, 3, dtype=torch.float64), np.empty((3, 2))
        return [g.receive(0, out=out).tolist() for out in outs]

    pytest.importorskip("torch")
    assert run(2, body)[1] == [[[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]], [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]]


# --- receives that were started with wait=False ---


def test_started_receives_get_the_messages_in_their_order(run: Any) -> None:
    def body(g: Any) -> Any:
        source = (g.rank + 1) % g.size
        to, out = (g.rank - 1) % g.size, np.zeros(3)
        handles = [g.receive(source, wait=False), g.receive(source, out=out, wait=False)]
        before = [handle.done() for handle in handles]
        g.barrier()
        for value in ("first", np.arange(3.0) + g.rank, "third", "fourth"):
            g.send(value, to)
        last = g.receive(source, wait=False)
        fourth = g.receive(source, timeout=60)  # receives that were started earlier come first
        assert [handle.done() for handle in (*handles, last)] == [True] * 3
        assert handles[1].wait() is out
        return before, handles[0].wait(), out.tolist(), last.wait(), fourth

    received = [[0.0 + rank, 1.0 + rank, 2.0 + rank] for rank in (1, 2, 0)]
    assert run(3, body) == [([False, False], "first", values, "third", "fourth") for values in received]


def test_done_becomes_true_when_the_message_arrives(run: Any) -> None:
    def body(g: Any) -> Any:
        if g.rank:
            g.receive(0)
            g.send("now", 0)
            return None
        handle = g.receive(1, wait=False)
        assert not handle.done()
        with pytest.raises(TimeoutError, match=r"receive: rank 1 sent nothing to rank 0 in time"):
            handle.wait(timeout=0.01)
        g.send("go", 1)
        wait_until(handle.done)
        return handle.wait(), handle.wait()

    assert run(2, body)[0] == ("now", "now")


def test_started_receive_raises_its_own_error_only(run: Any) -> None:
    def body(g: Any) -> Any:
        if g.rank:
            g.send(np.arange(4.0), 0)
            g.send("text", 0)
            return None
        small, text = g.receive(1, out=np.zeros(3), wait=False), g.receive(1, wait=False)
        assert text.wait() == "text"
        for _ in range(2):
            with pytest.raises(Mismatch):
                small.wait()
        return "done"

    assert run(2, body)[0] == "done"


def test_started_receives_end_when_the_sender_leaves(run: Any) -> None:
    def body(g: Any) -> Any:
        if g.rank:
            g.send("last", 0)
            return None
        handles = [g.receive(1, wait=False) for _ in range(3)]
        assert handles[0].wait() == "last"
        for handle in handles[1:]:
            with pytest.raises(MemberLeft):
                handle.wait()
            assert handle.done()
        return "done"

    assert run(2, body)[0] == "done"


def test_receive_any_does_not_wait_for_started_receives() -> None:
    def body(g: Any) -> Any:
        if g.rank:
            return g.receive(0)
        handle = g.receive(1, wait=False)
        message = (
            "receive_any: earlier receives must be complete, but the receive from rank 1 is still in "
            "progress; wait"
        )
        with pytest.raises(GroupError, match=message):
            g.receive_any()
        with pytest.raises(
            ValueError, match=r"receive: timeout must be None with wait=False, got 3; pass it to"
        ):
            g.receive(1, wait=False, timeout=3)
        g.send("bye", 1)
        return handle.done()

    assert in_threads(2, body) == [False, "bye"]


def test_dropped_member_closes_although_a_receive_is_in_progress() -> None:
    first, second = members(2)
    handle = first.receive(1, wait=False)
    assert not handle.done()
    del first
    with pytest.raises(MemberLeft):
        second.receive(0)
    with pytest.raises(GroupError, match="receive failed: this member has left the group"):
        handle.wait()


def test_interrupted_wait_loses_no_message() -> None:
    first, second = members(2)
    second.send("opens the channel", 0)
    assert first.receive(1) == "opens the channel"
    handle = first.receive(1, wait=False)
    timer = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        handle.wait()
    second.send("kept", 0)
    assert handle.wait() == "kept"


def test_interrupt_just_after_a_message_arrives_does_not_duplicate_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, second = members(2)
    second.send("once", 0)
    handle = first.receive(1, wait=False)
    append_result = point_to_point.append_result

    def interrupted(results: Any, call: Any, *args: Any) -> None:
        append_result(results, call, *args)
        if args == ("once",):
            monkeypatch.undo()
            raise KeyboardInterrupt

    monkeypatch.setattr(point_to_point, "append_result", interrupted)
    with pytest.raises(KeyboardInterrupt):
        handle.wait()
    assert handle.wait() == "once"
    with pytest.raises(TimeoutError):
        first.receive(1, timeout=0)


def test_sendreceive_shifts_along_a_ring(run: Any) -> None:
    def body(g: Any) -> Any:
        x = g.rank
        for _ in range(g.size + 1):
            x = g.sendreceive(x, to=(g.rank + 1) % g.size, source=(g.rank - 1) % g.size)
        return x

    assert run(4, body) == [3, 0, 1, 2]


def test_receive_fills_the_out_array_and_rejects_other_sizes() -> None:
    def body(g: Any) -> Any:
        if g.rank == 0:
            g.send(np.arange(6.0), 1)
            g.send(np.arange(6.0), 1)
            return None
        out = np.empty((2, 3))
        assert g.receive(0, out=out) is out
        with pytest.raises(Mismatch, match=r"that rank 0 sent, float64\[6\], got float32\[6\] on rank 1"):
            g.receive(0, out=np.empty(6, np.float32))
        return out.tolist()

    assert in_threads(2, body)[1] == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]


def test_messages_sent_before_close_arrive_after_close(run: Any) -> None:
    def body(g: Any) -> Any:
        if g.rank == 0:
            g.send("farewell", 1)
            return None
        found = g.receive(0)
        with pytest.raises(MemberLeft, match=r"rank 0.* has left"):
            g.receive(0)
        return found

    assert run(2, body)[1] == "farewell"


def test_receive_from_dead_member_raises() -> None:
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


def test_send_raises_if_receiver_ends_without_receiving() -> None:
    """The channel is full, and the receiver never opened it."""

    def body(g: Any, dies: bool) -> Any:
        if g.rank == 0:
            g.barrier()
            if dies:
                os.kill(os.getpid(), signal.SIGKILL)
            g.close()
            return None
        for number in range(64):
            g.send(number, 0)
        g.barrier()
        with pytest.raises(MemberDied, match="rank 0 died" if dies else "rank 0 has left") as info:
            g.send("too much", 0)
        return info.value.ranks, type(info.value) is MemberLeft

    assert Processes(2, body, True).results(1) == {1: ((0,), False)}
    assert Processes(2, body, False).results(2)[1] == ((0,), True)


class Counted:
    def __init__(self) -> None:
        self.packed = 0

    def __reduce__(self) -> Any:
        self.packed += 1
        return int, ()


def test_waiting_message_is_serialized_once() -> None:
    """The message waits because the receiver has not opened the channel yet."""
    own, other = members(2)
    item = Counted()
    with own, other:
        other._take_slot()
        for number in range(64):
            own.send(number, 1)
        with pytest.raises(Full):
            own.send(item, 1, timeout=0.1)
    assert item.packed == 1


def test_send_on_closed_group_raises() -> None:
    reported: list[GroupError] = []

    def send_for_ever() -> None:
        try:
            while True:
                own.send("more", 1)
        except GroupError as error:
            reported.append(error)

    own, other = members(2)
    sender = threading.Thread(target=send_for_ever)
    with other:
        sender.start()
        other.receive(0)
        wait_blocked(own._messages.peer(1)._out.channel, writers=1)  # type: ignore[attr-defined]
        own.close()
        sender.join()
    assert [(type(error), str(error)) for error in reported] == [
        (GroupError, "send failed: this member has left the group")
    ]


def test_invalid_ranks_and_timeouts_raise() -> None:
    def body(g: Any) -> None:
        for wrong in (g.rank, 2, -1, True):
            with pytest.raises(ValueError, match="rank of another member"):
                g.send(1, wrong)
        with pytest.raises(TimeoutError, match="sent nothing"):
            g.receive(1 - g.rank, timeout=0.01)
        g.barrier()

    assert in_threads(2, body) == [None, None]


@pytest.mark.parametrize("at_once", [128, 2])
def test_receive_any_returns_sender_and_keeps_message_order(
    run: Any, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    """One ``select`` does not accept as many channels as this group has members."""
    monkeypatch.setattr(point_to_point, "CHANNELS_OF_ONE_SELECT", at_once)

    def body(g: Any) -> Any:
        if g.rank:
            for number in range(20):
                g.send(number, 0)
            return None
        found: dict[int, list[int]] = {rank: [] for rank in range(1, g.size)}
        for _ in range(20 * (g.size - 1)):
            number, source = g.receive_any()
            found[source].append(number)
        with pytest.raises(MemberLeft, match="has left"):
            g.receive_any()
        return found

    assert run(4, body)[0] == {rank: list(range(20)) for rank in (1, 2, 3)}


def test_receive_any_loses_no_message_after_a_death() -> None:
    """The death is raised only after all messages have been received.

    Otherwise, the caller might miss a message that has already arrived.
    """

    def body(g: Any) -> Any:
        if g.rank == 1:
            g.send("last word", 0)
            g.receive(0)
            os.kill(os.getpid(), signal.SIGKILL)
        if g.rank == 2:
            for number in range(5):
                g.send(number, 0)
            with pytest.raises(MemberDied, match="rank 1 died"):
                g.receive(1)
            g.send("after it", 0)
            return g.receive(0)
        found = [g.receive_any() for _ in range(6)]
        g.send("go", 1)
        found.append(("after it", 2) if g.receive(2) == "after it" else None)
        with pytest.raises(MemberDied, match="rank 1 died") as info:
            g.receive_any()
        g.send("done", 2)
        return sorted(map(str, found)), info.value.ranks

    found = Processes(3, body).results(2)
    expected = [("after it", 2), ("last word", 1), *((number, 2) for number in range(5))]
    assert found == {0: (sorted(map(str, expected)), (1,)), 2: "done"}


def test_receive_any_times_out() -> None:
    def body(g: Any) -> None:
        with pytest.raises(TimeoutError, match=f"no member sent anything to rank {g.rank}"):
            g.receive_any(timeout=0.01)
        g.barrier()

    in_threads(3, body)


def test_message_errors_across_hosts_use_group_ranks() -> None:
    def body(g: Any) -> Any:
        if g.rank == 2:
            g.send("word", 0)
            g.barrier()
            return None
        if g.rank == 0:
            assert g.receive(2) == "word"
            with pytest.raises(TimeoutError, match="rank 2 sent nothing to rank 0"):
                g.receive(2, timeout=0)
        g.barrier()
        if g.rank == 0:
            with pytest.raises(MemberLeft, match="rank 2 has left") as info:
                g.receive(2)
            return info.value.ranks
        return None

    assert raised(over_hosts(4, body)) == [(2,), None, None, None]
