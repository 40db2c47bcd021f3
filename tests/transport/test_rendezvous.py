"""Test that participants get the values of all others, or learn that the rendezvous has ended, and why."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from flowchan.transport.rendezvous import Coordinator, Participant, RendezvousEnded


@pytest.fixture
def ends() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


def participant(coordinator: Coordinator, rank: int, ends: contextlib.ExitStack) -> Participant:
    local_end, remote_end = socket.socketpair()
    coordinator.come(rank, local_end)
    ends.callback(coordinator.close)
    return ends.enter_context(contextlib.closing(Participant(remote_end, "the driver")))


def test_each_participant_gets_all_values_of_a_round(ends: contextlib.ExitStack) -> None:
    coordinator = Coordinator(3)
    participants = [participant(coordinator, rank, ends) for rank in range(3)]
    with ThreadPoolExecutor(3) as pool:
        for number in range(2):
            received = [pool.submit(one.gather, [rank, number]) for rank, one in enumerate(participants)]
            while not all(future.done() for future in received):
                for rank in range(3):
                    coordinator.receive(rank)
            assert [one.result() for one in received] == [[[0, number], [1, number], [2, number]]] * 3
    assert all(one.goes_on() for one in participants)


def test_all_participants_learn_which_rank_ended(
    ends: contextlib.ExitStack,
) -> None:
    coordinator = Coordinator(3)
    first, second = (participant(coordinator, rank, ends) for rank in range(2))
    second.close()
    assert coordinator.receive(1) == b""
    late = participant(coordinator, 2, ends)
    for one in (first, late):
        assert not one.goes_on()
        with pytest.raises(RendezvousEnded, match="rank 1 ended during the rendezvous"):
            one.gather("never heard")


def test_second_connection_of_a_rank_is_closed(ends: contextlib.ExitStack) -> None:
    coordinator = Coordinator(2)
    first, again = participant(coordinator, 0, ends), participant(coordinator, 0, ends)
    with pytest.raises(RendezvousEnded, match="the driver ended during the rendezvous"):
        again.gather(None)
    assert first.goes_on()
