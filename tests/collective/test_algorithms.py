"""Test that all algorithms of an operation give the same result, even without direct reads.

``explain`` reports the algorithm, and ``set_algorithm`` selects an algorithm. Values of built-in types are
not pickled and arrive unchanged.
"""

from __future__ import annotations

import os
import random
import re
import sysconfig
import time
from typing import Any

import numpy as np
import pytest
from support.group_members import Processes, in_processes, in_threads, raised

from flowchan import collective
from flowchan.collective.value_bytes import dumps, loads
from flowchan.errors import Mismatch

LARGE = 400_000
ALGORITHMS = {
    "allreduce": ["exchange", "slices"],
    "reduce": ["exchange", "slices"],
    "broadcast": ["chunks", "direct"],
    "allgather": ["chunks", "direct"],
    "alltoall": ["chunks", "direct"],
}


def moved(g: Any, length: int) -> list[Any]:
    """Return the results of the operations that move arrays of ``length`` elements."""
    own = np.arange(length) + g.rank
    first = g.broadcast(own.copy(), root=1)
    buffers = [np.empty(length * (rank + 1), int) for rank in range(g.size)]
    all_of_them = g.allgather(np.resize(own, length * (g.rank + 1)), out=buffers)
    outs = [np.empty(length, int) for _ in range(g.size)]
    swapped = g.alltoall([own * 10 + to for to in range(g.size)], out=outs)
    return [first, *all_of_them, *swapped]


def right(rank: int, size: int, length: int) -> list[Any]:
    numbers = np.arange(length)
    return [
        numbers + 1,
        *(np.resize(numbers + other, length * (other + 1)) for other in range(size)),
        *((numbers + other) * 10 + rank for other in range(size)),
    ]


@pytest.mark.each_value
@pytest.mark.parametrize("run", [in_threads, in_processes], ids=["threads", "processes"])
@pytest.mark.parametrize("operation", ALGORITHMS)
def test_each_algorithm_gives_the_same_result(run: Any, operation: str) -> None:
    def body(g: Any, algorithm: str | None) -> list[bytes]:
        g.set_algorithm(operation, algorithm)
        found = []
        for length in (0, 1, 3000, 60_000, LARGE):
            x = (np.arange(length) + g.rank) / np.float32(7)
            found += [g.allreduce(x.copy()), *moved(g, length)]
            if g.reduce(x, root=1) is not None:
                found.append(x)
        return [one.tobytes() for one in found]

    first, *others = (raised(run(2, body, algorithm)) for algorithm in (None, *ALGORITHMS[operation]))
    assert others == [first] * 2


@pytest.mark.parametrize(("algorithm", "times"), [("direct", 1), (None, 40)])
def test_results_stay_the_same_without_direct_reads(algorithm: str | None, times: int) -> None:
    """Sandboxes and Yama may forbid direct reads.

    A member tries a direct read only once: when the algorithm is selected, or in the algorithm's first trial.
    """
    if os.getuid():
        pytest.skip("needs root, to become a user whose memory others may not read")

    def body(g: Any) -> Any:
        for operation in ("broadcast", "allgather", "alltoall"):
            g.set_algorithm(operation, algorithm)
        g.barrier()
        os.setuid(65534)
        x = np.arange(LARGE)
        before = g.explain("allgather", x)
        same = []
        for _ in range(times):
            pairs = zip(moved(g, LARGE), right(g.rank, 3, LARGE), strict=True)
            same += [np.array_equal(*pair) for pair in pairs]
        return before, all(same), g.explain("allgather", x)

    for before, same, after in raised(list(Processes(3, body).results(3).values())):
        assert same
        assert (algorithm == "direct") == ("direct: each member reads directly" in before)
        assert "chunks" in after


def test_gathered_arrays_may_be_large_small_or_empty() -> None:
    def body(g: Any) -> Any:
        sizes = [LARGE, 3, 70_000, 0]
        buffers = [np.empty(size) for size in sizes]
        g.allgather(np.full(sizes[g.rank], float(g.rank)), out=buffers)
        outs = [np.empty(size) for size in sizes]
        g.alltoall([np.full(sizes[g.rank], float(g.rank)) for _ in sizes], out=outs)
        return [(len(one), set(one.tolist())) for one in (*buffers, *outs)]

    expected = [(LARGE, {0.0}), (3, {1.0}), (70_000, {2.0}), (0, set())] * 2
    assert raised(in_processes(4, body)) == [expected] * 4


@pytest.mark.parametrize("algorithm", [None, *ALGORITHMS["alltoall"]])
def test_alltoall_can_receive_into_its_input(algorithm: str | None) -> None:
    """Receive each array in place. Then receive parts of one array at other offsets of the same array.

    Large and small arrays are mixed.
    """

    def body(g: Any) -> None:
        g.set_algorithm("alltoall", algorithm)
        for length in (3, 3000, 24_000, 40_000):
            xs = [np.full(length, 10 * g.rank + to) for to in range(g.size)]
            assert g.alltoall(xs, out=xs)[0] is xs[0]
            assert [set(x.tolist()) for x in xs] == [{10 * source + g.rank} for source in range(g.size)]
            whole = np.empty(2 * length * g.size, int)
            sent = [length + length // 2 * (to > g.rank) for to in range(g.size)]
            comes = [length + length // 2 * (g.rank > source) for source in range(g.size)]
            ins, outs = (np.split(whole, np.cumsum(sizes))[:-1] for sizes in (sent, comes))
            for to, x in enumerate(ins):
                x[:] = 10 * g.rank + to
            g.alltoall(ins, out=outs)
            assert [set(x.tolist()) for x in outs] == [{10 * source + g.rank} for source in range(g.size)]

    raised(in_processes(3, body))


@pytest.mark.each_value
@pytest.mark.parametrize("algorithm", [None, *ALGORITHMS["alltoall"]])
@pytest.mark.parametrize("others", [0, 5, 6000])
def test_alltoall_accepts_a_large_part_for_the_sender_itself(algorithm: str | None, others: int) -> None:
    def body(g: Any) -> None:
        g.set_algorithm("alltoall", algorithm)
        for _ in range(3):
            sizes = [LARGE if to == g.rank else others for to in range(g.size)]
            outs = [np.empty(size, int) for size in sizes]
            g.alltoall([np.full(size, 10 * g.rank + to) for to, size in enumerate(sizes)], out=outs)
            for source, x in enumerate(outs):
                assert (x == 10 * source + g.rank).all()

    raised(in_processes(3, body))


_PLAN = r"(direct(?: with two threads)?|\S+ of \d+ KB(?: \w+ past the caches)?)"
QUICKEST = re.compile(_PLAN + ": .*, as measured: (.*); shared")


@pytest.mark.parametrize("operation", ["allreduce", "reduce_scatter", "broadcast"])
def test_fastest_plan_is_found_and_used_by_all_members(run_on_one_host: Any, operation: str) -> None:
    """All members must report the same times."""

    def body(g: Any) -> Any:
        x = np.ones(300_000, np.float32)
        before = g.explain(operation, x)
        for _ in range(80):  # often enough to try each plan several times
            g.reduce_scatter(x) if operation == "reduce_scatter" else getattr(g, operation)(x)
        for _ in range(2):  # the first barrier tells rank 0 how long the last operation took
            g.barrier()
        found = g.explain(operation, x)
        g.barrier()
        return before, found, g.explain(operation, x[:99])

    (before, found, small), *others = run_on_one_host(3, body)
    assert others == [(before, found, small)] * 2
    assert "measured" not in before + small
    measured = QUICKEST.search(found)
    assert measured
    figures = dict(re.findall(r"([a-z][^,]*?) (\d+) µs", measured[2]))
    assert len(figures) >= (6 if operation == "allreduce" else 3)
    assert measured[1] in figures


@pytest.mark.each_value
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="reading with two threads needs two cores")
@pytest.mark.parametrize("operation", ["broadcast", "allgather", "alltoall"])
def test_direct_read_by_two_threads_is_complete(run_on_one_host: Any, operation: str) -> None:
    def given(rank: int, turn: int) -> Any:
        return np.arange(LARGE + 77 * rank) + 10 * turn + rank

    def body(g: Any) -> Any:
        g.set_algorithm(operation, "direct")
        for turn in range(60):
            own = given(g.rank, turn)
            if operation == "broadcast":
                found = [own if g.rank else np.empty(LARGE + 77, int)]
                g.broadcast(found[0], root=1)
            else:
                found = g.allgather(own) if operation == "allgather" else g.alltoall([own] * 2)
            senders = [1] if operation == "broadcast" else [0, 1]
            for sender, x in zip(senders, found, strict=True):
                np.testing.assert_array_equal(x, given(sender, turn))
        return g.explain(operation, np.resize(own, 2 * own.size) if operation == "alltoall" else own)

    assert "direct with two threads" in run_on_one_host(2, body)[0]


def test_chosen_algorithm_uses_its_fastest_plan(run_on_one_host: Any) -> None:
    def body(g: Any) -> Any:
        x = np.ones(300_000, np.float32)
        for algorithm in ("exchange", "slices"):
            g.set_algorithm("allreduce", algorithm)
            assert f"allreduce: {algorithm}: " in g.explain("allreduce", x)
            for _ in range(60):
                g.allreduce(x)
            assert f"allreduce: {algorithm} of " in g.explain("allreduce", x)

    run_on_one_host(3, body)


def test_fastest_plan_is_found_without_direct_reads() -> None:
    if os.getuid():
        pytest.skip("needs root, to become a user whose memory others may not read")

    def body(g: Any) -> Any:
        g.set_algorithm("broadcast", "direct")
        g.barrier()
        os.setuid(65534)
        x = np.ones(LARGE)
        for _ in range(60):
            g.broadcast(x)
        g.barrier()
        return g.explain("broadcast", x)

    for explanation in raised(list(Processes(3, body).results(3).values())):
        assert "as measured: " in explanation


def test_time_of_an_operation_before_a_mismatch_is_ignored(run_on_one_host: Any) -> None:
    """The next matching call publishes an operation's time. Here, that call is a different operation."""

    def body(g: Any) -> Any:
        x = np.ones(300_000, np.float32)
        for _ in range(60):
            g.allreduce(x, op="max")
            with pytest.raises(Mismatch):
                g.allreduce(x[: 10 + g.rank])
        g.barrier()
        assert "measured" not in g.explain("allreduce", x)

    run_on_one_host(3, body)


def test_late_members_use_the_same_plans_as_others(run_on_one_host: Any) -> None:
    def body(g: Any) -> None:
        sizes, own = random.Random(1), random.Random(g.rank)
        for turn in range(150):
            x = np.full(sizes.choice([10_000, 30_000, 70_000]), turn + g.rank)
            if own.random() < 0.1:
                time.sleep(own.random() / 1000)
            assert set(g.allreduce(x).tolist()) == {g.size * turn + 3}

    run_on_one_host(3, body)


def test_different_algorithms_raise_mismatch() -> None:
    def body(g: Any) -> Any:
        if g.rank:
            g.set_algorithm("allreduce", "slices")
        with pytest.raises(Mismatch, match=r"rank 0 called allreduce\(.*\); rank 1 called .* with slices"):
            g.allreduce(np.ones(3))
        g.set_algorithm("allreduce", None)
        return g.allreduce(1)

    assert in_threads(2, body) == [2, 2]


def test_all_members_use_the_same_plans_after_a_mismatch(run_on_one_host: Any) -> None:
    def body(g: Any) -> None:
        lengths = (5_000, 30_000, 300_000, 700_000)
        for turn in range(120):
            for length in lengths:
                if turn % 40 == 39:
                    if g.rank == 1:
                        g.set_algorithm("allreduce", "slices")
                    with pytest.raises(Mismatch):
                        g.allreduce(np.ones(length, np.float32))
                    if g.rank == 1:
                        g.set_algorithm("allreduce", None)
                x = np.full(length, turn + g.rank, np.float32)
                assert (g.allreduce(x, timeout=60) == g.size * turn + sum(range(g.size))).all()

    for size in (2, 3):
        run_on_one_host(size, body)


def test_set_algorithm_error_lists_allowed_algorithms() -> None:
    (g,) = collective.members(1)
    with pytest.raises(
        ValueError, match=r"name must be None or one of 'exchange', 'slices', .* for allreduce, got 'direct'"
    ):
        g.set_algorithm("allreduce", "direct")
    g.set_algorithm("reduce_scatter", "chunks")
    expected = r"name must be None or one of 'chunks', .* for reduce_scatter, got 'slices'"
    with pytest.raises(ValueError, match=expected):
        g.set_algorithm("reduce_scatter", "slices")
    with pytest.raises(ValueError, match="name must be None for barrier, got 'direct'"):
        g.set_algorithm("barrier", "direct")
    with pytest.raises(ValueError, match="operation must be one of 'barrier'"):
        g.set_algorithm("sum", None)
    g.set_algorithm("allreduce", "slices")
    assert "slices" in g.explain("allreduce", np.ones(1))
    g.close()


def test_started_gathers_run_in_the_background() -> None:
    """The members do not know the sizes of the arrays in advance. Other values are also gathered."""

    def body(g: Any) -> Any:
        handles = [
            g.allgather(np.full(3 + g.rank, g.rank), wait=False),
            g.gather(np.full(2 + g.rank, g.rank), 1, wait=False),
            g.allgather("x" * g.rank, wait=False),
        ]
        arrays, at_one, texts = (handle.wait() for handle in handles)
        return [one.tolist() for one in arrays], at_one and [one.tolist() for one in at_one], texts

    first, second = in_threads(2, body)
    assert first == ([[0, 0, 0], [1, 1, 1, 1]], None, ["", "x"])
    assert second == ([[0, 0, 0], [1, 1, 1, 1]], [[0, 0], [1, 1, 1]], ["", "x"])


class Text(str):
    pass


LOOP: list[Any] = []
LOOP.append(LOOP)
SHARED = [1]
PLAIN = [
    *(None, True, 7, 2.5, "é", b"\0\1", (), [], {}),
    {"a": [1, (2, [3])], 4: {"b": b"y" * 300}, (5, 6): None, "": [[[[[[]]]]]]},
    {"content": bytes(10_000), "number": 1},
    [[i, str(i)] for i in range(300)],
]
OTHERS = [
    *(-(10**30), "x" * 70_000),
    Text("its own class"),
    {Text("key"): 1},
    {1, 2},
    bytearray(3),
]


@pytest.mark.parametrize("value", PLAIN + OTHERS, ids=range(len(PLAIN + OTHERS)))
def test_values_arrive_unchanged(value: Any) -> None:
    for found in (loads(dumps(value)), *in_threads(2, lambda g: g.allgather(value)[1 - g.rank])):
        assert found == value
        assert repr(found) == repr(value)
        assert type(found) is type(value)


def test_only_built_in_types_are_sent_without_pickle() -> None:
    """Very large values are pickled. On free-threaded Python, lists and dicts are also pickled.

    Without a GIL, other threads may change a list or dict during the call.
    """
    fixed = [value for value in PLAIN if not isinstance(value, list | dict)]
    without_gil = sysconfig.get_config_var("Py_GIL_DISABLED")
    assert {dumps(value)[-1:] for value in (fixed if without_gil else PLAIN)} == {b"\2"}
    assert b"\2" not in {dumps(value)[-1:] for value in OTHERS}


def test_object_used_twice_in_a_value_arrives_as_one_object() -> None:
    twice = loads(dumps([SHARED, {"again": SHARED}, (SHARED,)]))
    assert twice[0] is twice[1]["again"] is twice[2][0]
    inside = ([1],)
    one, other = loads(dumps([inside, inside]))
    assert one[0] is other[0]
    loop = loads(dumps(LOOP))
    assert loop[0] is loop


def test_plain_and_pickled_values_can_be_gathered_in_one_call() -> None:
    def body(g: Any) -> Any:
        return g.allgather([1, "plain"] if g.rank else {2.5j})

    assert in_threads(2, body) == [[{2.5j}, [1, "plain"]]] * 2
