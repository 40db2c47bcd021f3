"""Test ``Weights``: versions, refreshes, late readers and errors, on one machine and over a channel."""

from __future__ import annotations

import gc
import os
import pickle
import threading
from typing import Any

import numpy as np
import pytest
from published_weights import equal_bits, everywhere, reader_of, remote_reader
from support.peers import HostPeer, ProcessPeer, ThreadPeer
from support.waiting import wait_until

from flowchan import Broken, Channel, Closed, Empty, pipelines
from flowchan.hosts import local
from flowchan.pipelines import Weights, WeightsReader

DTYPES = [
    "bool",
    "int8",
    "uint16",
    "<f4",
    ">f4",
    "f8",
    "c16",
    "M8[ns]",
    "S3",
    "U2",
    [("a", "i4"), ("b", "f2")],
]


def state(dtype: Any = "f4", seed: int = 0) -> dict[str, np.ndarray]:
    """Return arrays of several shapes with random bits."""
    dtype, random = np.dtype(dtype), np.random.default_rng(seed)
    shapes = {"matrix": (3, 5), "vector": (7,), "scalar": (), "empty": (0, 4)}
    return {
        name: np.frombuffer(random.bytes(max(1, int(np.prod(shape))) * dtype.itemsize), dtype)[
            : int(np.prod(shape))
        ]
        .reshape(shape)
        .copy()
        for name, shape in shapes.items()
    }


def blank(like: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: np.zeros_like(array) for name, array in like.items()}


@everywhere
def test_refresh_copies_the_latest_version_and_its_step(where: str) -> None:
    trained, model = state(), blank(state())
    with Weights(trained) as weights:
        reader = reader_of(weights, where)
        assert (weights.publish(), weights.publish(step=30)) == (1, 2)
        assert reader.refresh(model) == 2
        assert (reader.version, reader.step) == (2, 30)
        assert equal_bits(model, trained)


@everywhere
def test_refresh_returns_none_if_nothing_is_new(where: str) -> None:
    model = blank(state())
    with Weights(state()) as weights:
        reader = reader_of(weights, where)
        assert (reader.refresh(model), reader.version, reader.step) == (None, 0, None)
        assert equal_bits(model, blank(state()))
        weights.publish(1)
        assert reader.refresh(model) == 1
        model["vector"][:] = 5
        assert reader.refresh(model) is None
        assert (model["vector"] == 5).all()


@everywhere
def test_readers_get_the_values_at_the_time_of_publish(where: str) -> None:
    trained = state()
    with Weights(trained) as weights:
        weights.publish()
        trained["vector"][:] = -1
        reader = reader_of(weights, where)
        reader.refresh()
        assert equal_bits(reader.values, state())


@everywhere
def test_publish_reads_arrays_replaced_in_the_mapping(where: str) -> None:
    trained = state()
    with Weights(trained) as weights:
        trained["vector"] = state(seed=1)["vector"]
        weights.publish()
        reader = reader_of(weights, where)
        reader.refresh()
        assert equal_bits(reader.values, trained)


@everywhere
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_weights_accept_every_numpy_dtype_without_objects(where: str, dtype: Any) -> None:
    trained = state(dtype)
    with Weights(trained) as weights:
        reader = reader_of(weights, where)
        weights.publish()
        reader.refresh()
        assert equal_bits(reader.values, trained)
        trained["matrix"][1] = state(dtype, 1)["matrix"][1]
        weights.publish()
        reader.refresh()
        assert equal_bits(reader.values, trained)


@everywhere
def test_refresh_fills_non_contiguous_arrays(where: str) -> None:
    with Weights({"w": np.arange(12.0).reshape(3, 4)[:, ::2]}) as weights:
        weights.publish()
        memory = np.zeros((2, 6))
        reader_of(weights, where).refresh({"w": memory.T[::2]})
        assert memory.tolist() == [[0, 0, 4, 0, 8, 0], [2, 0, 6, 0, 10, 0]]


@everywhere
@pytest.mark.parametrize("peer", [ThreadPeer, ProcessPeer, HostPeer])
def test_reader_refreshes_in_any_process(where: str, peer: Any) -> None:
    with Weights(state()) as weights:
        weights.publish(3)

        def refresh(reader: WeightsReader) -> Any:
            return reader.refresh(timeout=60), reader.step, reader.values

        version, step, values = peer(refresh, reader_of(weights, where)).result()
        assert (version, step) == (1, 3)
        assert equal_bits(values, state())


@everywhere
def test_reader_can_be_sent_as_an_item(where: str) -> None:
    readers: Channel[WeightsReader] = Channel(across="processes")
    with Weights(state()) as weights:
        weights.publish()
        reader = reader_of(weights, where)
        reader.refresh()
        readers.put(reader)
        received = ProcessPeer(lambda: (copy := readers.get()) and (copy.version, copy.refresh(timeout=60)))
        assert received.result() == (0, 1)


def answer(reader: WeightsReader, number: int) -> float:
    reader.refresh(timeout=60, at_least=1)
    return float(reader.values["w"].sum())


@pytest.mark.parametrize("on", ["thread", "process", local(2)], ids=str)
def test_reader_can_be_a_worker_argument(on: Any) -> None:
    with Weights({"w": np.ones(4)}) as weights:
        weights.publish()
        assert pipelines.map(2, answer, weights.reader(), on=on).join() == [4.0, 4.0]


@everywhere
def test_late_reader_gets_the_full_weights(where: str) -> None:
    trained = state()
    with Weights(trained) as weights:
        early = reader_of(weights, where)
        for seed in range(5):
            trained.update(state(seed=seed))
            weights.publish(seed)
            early.refresh()
        late = reader_of(weights, where)
        assert (late.refresh(), late.step) == (5, 4)
        assert equal_bits(late.values, trained)
        assert equal_bits(early.values, trained)


@everywhere
def test_refresh_waits_for_the_version_in_at_least(where: str) -> None:
    with Weights(state()) as weights:
        reader = reader_of(weights, where)
        waiting = ThreadPeer(lambda: reader.refresh(at_least=2, timeout=60))
        weights.publish()
        assert waiting.running()
        weights.publish(8)
        assert (waiting.result(), reader.step) == (2, 8)
        assert reader.refresh(at_least=2) is None


@everywhere
def test_refresh_raises_empty_if_the_version_is_late(where: str) -> None:
    with Weights(state()) as weights:
        reader = reader_of(weights, where)
        weights.publish()
        with pytest.raises(Empty, match=r"version 2 was not published within 0.01 s|did not answer within"):
            reader.refresh(at_least=2, timeout=0.01)
        assert reader.refresh() == 1


@everywhere
def test_refresh_gets_whole_versions_while_the_trainer_publishes_continuously(where: str) -> None:
    """All values of one version are equal, so a mixture of versions would show."""
    trained, stop = {"a": np.zeros(30_000), "b": np.zeros(3)}, threading.Event()
    with Weights(trained) as weights:

        def publish() -> int:
            while not stop.is_set():
                trained["a"] += 1
                trained["b"] += 1
                version = weights.publish()
            return version

        trainer = ThreadPeer(publish)
        try:
            reader = reader_of(weights, where)
            versions = []
            for _ in range(100):
                versions.append(reader.refresh(at_least=reader.version + 1, timeout=60))
                assert {*reader.values["a"].tolist(), *reader.values["b"].tolist()} == {versions[-1]}
        finally:
            stop.set()
        assert versions == sorted(set(versions))
        assert trainer.result() >= versions[-1]


def test_publish_does_not_wait_for_a_reader_that_is_copying() -> None:
    with Weights(state()) as weights:
        weights.publish()
        slow = [weights.reader()._source.memory.pin() for _ in range(2)]
        for _ in range(10):
            weights.publish()
        slow.append(weights.reader()._source.memory.pin())
        weights.publish()
        assert [pinned.version for pinned in slow] == [1, 1, 11]
        assert weights._memory.count() == 3
        for pinned in slow:
            pinned.close()
        for _ in range(2):
            weights.publish()
        assert weights._memory.count() == 2


def test_weights_allocate_two_copies() -> None:
    with Weights({"w": np.ones(100_000)}) as weights:
        reader = weights.reader()
        for _ in range(10):
            weights.publish()
            reader.refresh()
        assert weights._memory.count() == 2


@everywhere
def test_refresh_overwrites_nothing_if_the_model_differs(where: str) -> None:
    with Weights({"a": np.ones(3), "b": np.ones(2)}) as weights:
        weights.publish()
        reader = reader_of(weights, where)
        for model, problem in (
            ({"a": np.zeros(3)}, "the weights must contain 'b'; they must have the names"),
            ({"a": np.zeros(3), "b": np.zeros(2), "c": np.zeros(1)}, "must not contain 'c'"),
            (
                {"a": np.zeros(3), "b": np.zeros(3)},
                r"b must have dtype float64 and shape \(2,\), got float64 and",
            ),
            ({"a": np.zeros(3), "b": np.zeros(2, "f4")}, r"b must have dtype float64 .*, got float32"),
        ):
            with pytest.raises(ValueError, match=problem):
                reader.refresh(model)
            assert not model["a"].any()
        with pytest.raises(TypeError, match=r"refresh: model must be an nn.Module or a mapping .*, got 3"):
            reader.refresh(3)
        assert reader.version == 0


def test_weights_reject_values_without_plain_memory() -> None:
    for source, problem in (
        ([np.ones(3)], "Weights: source must be an nn.Module or a mapping"),
        ({"a": 3}, "Weights: a must be a dense torch tensor or a NumPy array without Python objects, got 3"),
        ({"a": np.array([None])}, "a must be a dense torch tensor or a NumPy array"),
    ):
        with pytest.raises(TypeError, match=problem):
            Weights(source)
    with pytest.raises(TypeError, match=r"unknown option 'nam'; .*name"):
        Weights({}, nam="w")  # type: ignore[call-arg]


def test_failed_publish_keeps_the_previous_version() -> None:
    trained = state()
    with Weights(trained) as weights:
        weights.publish()
        trained["vector"] = np.zeros(8, "f4")
        with pytest.raises(ValueError, match="publish: vector must have dtype float32"):
            weights.publish()
        with pytest.raises(ValueError, match="step must be at least 0"):
            weights.publish(-1)
        reader = weights.reader()
        assert reader.refresh() == 1
        trained["vector"] = state()["vector"]
        assert weights.publish() == 2


def test_readers_never_get_a_version_that_failed_to_publish(monkeypatch: pytest.MonkeyPatch) -> None:
    trained = state()
    with Weights(trained) as weights:
        weights.publish()
        weights.publish()
        reader = weights.reader()

        def fail(tensors: Any, memory: memoryview) -> None:
            memory[:] = bytes(len(memory))
            raise MemoryError

        with monkeypatch.context() as patch:
            patch.setattr(type(weights._layout), "write", lambda self, *given: fail(*given))
            with pytest.raises(MemoryError):
                weights.publish()
        assert (reader.refresh(), weights.publish(), reader.refresh()) == (2, 3, 3)
        assert equal_bits(reader.values, trained)


@everywhere
def test_refresh_raises_broken_after_the_weights_are_closed(where: str) -> None:
    weights = Weights(state(), name="policy")
    weights.publish()
    early, late = reader_of(weights, where), reader_of(weights, where)
    early.refresh()
    weights.close()
    weights.close()
    for reader in (early, late):
        with pytest.raises(Broken, match="weights 'policy': "):
            reader.refresh(timeout=60)
    with pytest.raises(Closed, match="<Weights 'policy', version 1> is closed"):
        weights.publish()
    with pytest.raises(Closed, match="is closed"):
        weights.reader()


def test_dropped_weights_release_their_memory_and_thread() -> None:
    """After each test, a fixture also checks for leftover threads and mappings."""

    def named() -> set[str]:
        links = (f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd"))
        return {os.readlink(link) for link in links if os.path.exists(link)} & {
            "/memfd:flowchan weights (deleted)"
        }

    weights = Weights(state())
    weights.publish()
    remote_reader(weights).refresh()
    del weights
    gc.collect()
    wait_until(lambda: not named())
    wait_until(lambda: "flowchan weights" not in {thread.name for thread in threading.enumerate()})


def test_pickling_weights_raises_and_suggests_a_reader() -> None:
    with (
        Weights(state(), name="policy") as weights,
        pytest.raises(TypeError, match=r"send policy.reader\(\)"),
    ):
        pickle.dumps(weights)


def test_forked_child_can_read_but_not_publish() -> None:
    with Weights(state()) as weights:
        weights.publish()
        reader = weights.reader()

        def child() -> Any:
            with pytest.raises(RuntimeError, match="publish must be called in the process that created"):
                weights.publish()
            return reader.refresh()

        assert ProcessPeer(child).result() == 1
        assert weights.publish() == 2
