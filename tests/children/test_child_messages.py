"""Test the messages between a program and its children."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from support.waiting import wait_until

from flowchan import Closed
from flowchan.hosts import local
from flowchan.pipelines import children
from flowchan.pipelines.children import Children, Parent

WAIT_S = 60


@pytest.fixture(params=[pytest.param(on, marks=pytest.mark.alternative(on)) for on in ("process", "pool")])
def kids(request: pytest.FixtureRequest) -> Iterator[Children]:
    """Provide three children. ``make test`` uses one of the placements, and ``make soak`` uses both."""
    with children.start(3, on="process" if request.param == "process" else local(2)) as made:
        yield made


def echo(parent: Parent) -> None:
    """Send back each value that arrives."""
    while True:
        parent.send(parent.receive())


def pauses(parent: Parent) -> list[Any]:
    """Collect all messages from ``join`` to ``stop``."""
    seen = []
    while not seen or seen[-1] != "stop":
        seen.append(parent.pause())
    return seen


def test_join_meets_pause_and_passes_the_message(kids: Children) -> None:
    kids.run(pauses)
    for message in ("go", {"a": [1, 2]}, None, "stop"):
        kids.join(message, timeout=WAIT_S)
    assert kids.wait(WAIT_S) == {number: ["go", {"a": [1, 2]}, None, "stop"] for number in (1, 2, 3)}


def test_join_returns_only_after_the_child_has_paused(kids: Children) -> None:
    kids.run(lambda parent: [parent.send("before"), parent.pause()])
    kids.join(timeout=WAIT_S)
    assert kids.receive(timeout=0) == {1: "before", 2: "before", 3: "before"}


def late(parent: Parent) -> list[Any]:
    parent.send("ready")
    if parent.number == 2:
        parent.receive()
    return pauses(parent)


def test_join_that_times_out_withdraws_its_message(kids: Children) -> None:
    kids.run(late)
    kids.receive(timeout=WAIT_S)
    with pytest.raises(TimeoutError, match=r"join: child 2 was not ready within 0\.2 s"):
        kids.join("early", timeout=0.2)
    kids[2].send("continue")
    kids.join("stop", timeout=WAIT_S)
    seen = kids.wait(WAIT_S)
    assert seen[2] == ["stop"]


def test_pause_times_out_without_a_join(kids: Children) -> None:
    def program(parent: Parent) -> str:
        with pytest.raises(TimeoutError, match=r"pause: the parent did not call join within 0\.01 s"):
            parent.pause(timeout=0.01)
        parent.send("late")
        return str(parent.pause())

    kids.run(program)
    kids.receive(timeout=WAIT_S)
    kids.join("now", timeout=WAIT_S)
    assert kids.wait(WAIT_S) == dict.fromkeys((1, 2, 3), "now")


def test_values_travel_both_ways_in_order(kids: Children) -> None:
    kids.run(echo)
    values = [1, "a", None, {"x": (1, 2)}, np.arange(5), lambda: 3]
    for value in values:
        kids.send(value, timeout=WAIT_S)
    found = [kids.receive(timeout=WAIT_S) for _ in values]
    assert [one[3] for one in found[:4]] == values[:4]
    assert all(one[1].tolist() == [0, 1, 2, 3, 4] for one in found[4:5])
    assert found[5][2]() == 3


def test_send_each_sends_every_child_its_own_value(kids: Children) -> None:
    kids.run(echo)
    kids.send_each({3: "c", 1: {"plain": "dict"}})
    assert kids[1, 3].receive(timeout=WAIT_S) == {1: {"plain": "dict"}, 3: "c"}
    with pytest.raises(KeyError):
        kids[1, 2].send_each({3: 0})


class Counted:
    """A value whose class counts in the program how often instances are serialised."""

    times = 0

    def __getstate__(self) -> dict[str, int]:
        Counted.times += 1
        return {"a": 1}


def test_group_send_serialises_the_value_once(kids: Children) -> None:
    kids.run(lambda parent: type(parent.receive()).__name__)
    Counted.times = 0
    kids.send(Counted())
    assert Counted.times == 1
    assert set(kids.wait(WAIT_S).values()) == {"Counted"}


def test_receive_keeps_values_when_another_child_is_late(kids: Children) -> None:
    kids.run(lambda parent: (parent.number == 2 and parent.receive()) or parent.send(parent.number))
    with pytest.raises(TimeoutError, match=r"receive: child.*2.* not ready within"):
        kids.receive(timeout=0.2)
    kids[2].send(0)
    assert kids.receive(timeout=WAIT_S) == {1: 1, 2: 2, 3: 3}


def test_receive_fills_the_given_arrays(kids: Children) -> None:
    kids.run(lambda parent: [parent.send(np.full(3, float(parent.number))) for _ in range(2)])
    into = {number: np.zeros(3) for number in (1, 2, 3)}
    found = kids.receive(timeout=WAIT_S, into=into)
    assert all(found[number] is into[number] for number in into)
    assert into[2].tolist() == [2.0, 2.0, 2.0]
    with pytest.raises(ValueError, match="receive: into must have dtype float64 and shape"):
        kids[1].receive(timeout=WAIT_S, into=np.zeros(4))
    assert kids[1].receive(timeout=WAIT_S).tolist() == [1.0, 1.0, 1.0]
    with pytest.raises(TypeError, match="receive: into must be a mapping"):
        kids.receive(into=np.zeros(3))  # type: ignore[arg-type]


def test_child_receives_into_its_own_array(kids: Children) -> None:
    def program(parent: Parent) -> list[float]:
        mine = np.zeros(2)
        assert parent.receive(into=mine) is mine
        return list(mine)

    kids.run(program)
    kids.send(np.array([1.0, 2.0]))
    assert kids.wait(WAIT_S) == {number: [1.0, 2.0] for number in (1, 2, 3)}


def test_send_times_out_if_the_channel_is_full(kids: Children) -> None:
    kids.run(lambda parent: parent.pause())
    for _ in range(64):
        kids.send(0, timeout=WAIT_S)
    with pytest.raises(TimeoutError, match=r"send: children 1, 2, 3 were not ready within 0\.01 s"):
        kids.send(0, timeout=0.01)


def test_send_names_a_value_that_cannot_be_serialised(kids: Children) -> None:
    kids.run(echo)
    with pytest.raises(TypeError, match="lock"):
        kids.send([threading.Lock()])
    kids.send("next")
    assert kids.receive(timeout=WAIT_S) == dict.fromkeys((1, 2, 3), "next")


def test_waiting_call_in_a_closed_child_raises_closed(kids: Children) -> None:
    def program(parent: Parent) -> None:
        parent.send("ready")
        try:
            parent.receive()
        except Closed as error:
            parent.print(error)

    kids.run(program)
    kids.receive(timeout=WAIT_S)
    kids.close()
    with pytest.raises(Closed, match="child 1 was closed"):
        kids.wait()


def test_print_prefixes_output_with_number_and_host(
    kids: Children, capsys: pytest.CaptureFixture[str]
) -> None:
    kids.run(lambda parent: parent.print("hello", parent.number, sep="-", end="!\n"))
    kids.wait(WAIT_S)
    lines = sorted(capsys.readouterr().out.splitlines())
    wheres = {number: f" on {kids[number].host}" if kids[number].host else "" for number in (1, 2, 3)}
    assert lines == [f"<child 00{number}{wheres[number]}> hello-{number}!" for number in (1, 2, 3)]


def test_overlapping_groups_can_join_at_the_same_time(kids: Children) -> None:
    kids.run(pauses)
    threads = [
        threading.Thread(target=lambda group=group: [group.join(n) for n in range(20)])
        for group in (kids[1, 2], kids[2, 3])
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    kids.join("stop")
    seen = kids.wait(WAIT_S)
    assert seen[1] == [*range(20), "stop"]
    assert sorted(seen[2][:-1]) == sorted([*range(20), *range(20)])


def test_overlapping_groups_in_opposite_order_join_at_the_same_time(kids: Children) -> None:
    kids.run(pauses)
    met: list[int] = []

    def join(group: Children) -> None:
        for message in range(300):
            group.join(message, timeout=WAIT_S)
            met.append(message)

    threads = [threading.Thread(target=join, args=(group,)) for group in (kids[1, 2], kids[2, 1])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(met) == sorted([*range(300), *range(300)])
    kids.join("stop")
    seen = kids.wait(WAIT_S)
    assert sorted(seen[1][:-1]) == sorted(seen[2][:-1]) == sorted(met)


@pytest.mark.parametrize("size", [10, 1_000_000])
def test_pause_returns_an_array_of_any_size(kids: Children, size: int) -> None:
    kids.run(lambda parent: float(parent.pause()["x"].sum()))
    kids.join({"x": np.ones(size)}, timeout=WAIT_S)
    assert kids.wait(WAIT_S) == dict.fromkeys((1, 2, 3), float(size))


def test_large_value_is_stored_once_for_all_children() -> None:
    def program(parent: Parent, kept: Any) -> tuple[float, bool]:
        value = parent.receive()["x"]
        parent.send("read")
        parent.pause()
        return float(value.sum() + kept.sum()), value.flags.writeable

    with children.start(3) as kids:
        kids.run(program, np.ones(500_000))
        kids.send({"x": np.ones(1_000_000)})
        kids.receive(timeout=WAIT_S)
        assert all(state.links.down.stats().bytes_in < 2_000_000 for state in kids._states)
        kids.join(timeout=WAIT_S)
        assert kids.wait(WAIT_S) == dict.fromkeys((1, 2, 3), (1_500_000.0, False))


def test_ctrl_c_interrupts_join_and_withdraws_its_message(kids: Children) -> None:
    kids.run(late)
    kids.receive(timeout=WAIT_S)
    main = threading.main_thread().ident
    assert main is not None
    messages = kids._states[1].links.joins

    def interrupt() -> None:
        wait_until(lambda: messages.stats().items_in == 1)
        signal.pthread_kill(main, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        kids.join("early", timeout=WAIT_S)
    thread.join()
    kids[2].send("continue")
    kids.join("stop", timeout=WAIT_S)
    assert kids.wait(WAIT_S)[2] == ["stop"]


def test_values_of_unknown_children_are_refused(kids: Children) -> None:
    kids.run(echo)
    kids.send(1.0)
    with pytest.raises(KeyError, match=r"the keys of into must be child numbers \(1, 2, 3\), got 4"):
        kids.receive(timeout=WAIT_S, into={4: np.zeros(1)})
    with pytest.raises(TypeError, match="values must be a mapping from child numbers to values, got list"):
        kids.send_each([1, 2, 3])  # type: ignore[arg-type]
    assert kids.receive(timeout=WAIT_S) == dict.fromkeys((1, 2, 3), 1.0)
