"""Test the deltas sent to readers on other machines: they are small and match full copies bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from published_weights import equal_bits, remote_reader

from flowchan.pipelines import Weights
from flowchan.pipelines.parameter_server import weights_answers
from flowchan.pipelines.parameter_server.deltas import _BUCKET, apply_delta, changed_units, delta_of

UNITS = 3 * _BUCKET + 64


@st.composite
def changes(draw: st.DrawFn) -> tuple[int, int, float, int]:
    """Draw the begin and end of a change, the fraction of units to set, and a seed."""
    begin = draw(st.integers(0, UNITS))
    return (
        begin,
        draw(st.integers(begin, UNITS)),
        draw(st.sampled_from([0.0, 0.001, 0.4, 0.6, 1.0])),
        draw(st.integers(0, 2**32)),
    )


def change(block: np.ndarray, begin: int, end: int, fraction: float, seed: int) -> None:
    """Set some units to random bits. Every NaN of ``bfloat16``, ``float16`` and ``float32`` can occur."""
    random = np.random.default_rng(seed)
    chosen = begin + np.flatnonzero(random.random(end - begin) < fraction)
    block[chosen] = random.integers(0, 2**16, len(chosen), np.uint16)


@given(st.lists(changes(), min_size=1, max_size=4))
@settings(max_examples=40, deadline=None)
def test_delta_turns_the_old_block_into_the_new_one(steps: list[tuple[Any, ...]]) -> None:
    old = np.random.default_rng(0).integers(0, 2**16, UNITS, np.uint16)
    new, bits = old.copy(), np.zeros(UNITS // 8, np.uint8)
    for step in steps:  # ``bits`` accumulates the changes of all steps
        before = new.copy()
        change(new, *step)
        bits |= changed_units(memoryview(before).cast("B"), memoryview(new).cast("B"))
    delta, copy = delta_of(bits, memoryview(new).cast("B")), bytearray(old.tobytes())
    apply_delta(delta, copy)
    assert copy == new.tobytes()
    assert delta.nbytes <= new.nbytes + 8 * (UNITS // _BUCKET + 1)


@given(st.lists(st.tuples(st.booleans(), st.booleans(), changes()), min_size=1, max_size=12))
@settings(max_examples=15, deadline=None)
def test_remote_readers_match_the_trainer_bit_for_bit(steps: list[tuple[Any, ...]]) -> None:
    """Two readers refresh at different times."""
    block = np.zeros(UNITS, np.uint16)
    with Weights({"w": block}) as weights:
        readers = [remote_reader(weights), remote_reader(weights)]
        for *refresh, step in steps:
            change(block, *step)
            weights.publish()
            for reader, wanted in zip(readers, refresh, strict=True):
                if wanted:
                    assert reader.refresh(timeout=60) == weights.stats().version
                    assert equal_bits(reader.values, {"w": block})


def test_delta_of_one_percent_sends_at_most_three_percent() -> None:
    """The changed two-byte values are at random positions, as after one step of reinforcement learning."""
    trained, random = {"w": np.zeros(1_000_000, np.uint16)}, np.random.default_rng(0)
    with Weights(trained) as weights:
        reader = remote_reader(weights)
        weights.publish()
        reader.refresh()
        full = weights.stats()
        assert (full.full, full.deltas) == (1, 0)
        trained["w"][random.choice(1_000_000, 10_000, replace=False)] = 1
        weights.publish()
        reader.refresh()
        after = weights.stats()
        assert (after.full, after.deltas) == (1, 1)
        assert after.bytes_sent - full.bytes_sent <= 0.03 * trained["w"].nbytes
        assert equal_bits(reader.values, trained)


def test_first_refresh_gets_the_full_weights_in_one_message() -> None:
    """vllm#5723: sending 70 B parameters took minutes, because each tensor was sent separately."""
    trained = {f"layer{number}": np.full(1000, number, "f4") for number in range(300)}
    size = sum(array.nbytes for array in trained.values())
    with Weights(trained) as weights:
        weights.publish()
        reader = remote_reader(weights)
        reader.refresh()
        stats = weights.stats()
        assert (stats.full, stats.deltas) == (1, 0)
        assert size <= stats.bytes_sent <= 1.02 * size
        assert reader._remote is not None
        assert reader._remote._reply.stats().items_in == 1
        assert equal_bits(reader.values, trained)


def test_refresh_sends_no_weights_if_nothing_is_new() -> None:
    with Weights({"w": np.ones(1000)}) as weights:
        weights.publish()
        reader = remote_reader(weights)
        reader.refresh()
        before = weights.stats()
        assert reader.refresh() is None
        assert weights.stats() == before


def test_reader_far_behind_gets_the_full_weights() -> None:
    trained = {"w": np.zeros(1000)}
    with Weights(trained) as weights:
        slow, fast = remote_reader(weights), remote_reader(weights)
        weights.publish()
        slow.refresh()
        for step in range(weights_answers._MOST_COMPARISONS + 1):
            trained["w"][step] = 1
            weights.publish()
            fast.refresh()
        before = weights.stats()
        slow.refresh()
        assert weights.stats().full == before.full + 1
        assert equal_bits(slow.values, trained)


def test_remote_readers_get_full_weights_without_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights_answers, "_comparison", lambda: None)
    trained = {"w": np.zeros(1000)}
    with Weights(trained) as weights:
        reader = remote_reader(weights)
        for step in range(3):
            trained["w"][step] = 1
            weights.publish()
            reader.refresh()
            assert equal_bits(reader.values, trained)
        assert (weights.stats().full, weights.stats().deltas) == (3, 0)
