"""C2, C12: a channel between processes uses address space and memory only for the items in it."""

from __future__ import annotations

import multiprocessing
import os
import resource
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flowchan import Channel, ChannelError, Drained, Full, Graph

MB = 1 << 20


def address_space() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def with_address_space(more: int, act: Callable[[], None]) -> None:
    """Run ``act`` in a forked child that may map only ``more`` bytes beyond its existing mappings."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            resource.setrlimit(resource.RLIMIT_AS, (address_space() + more, resource.RLIM_INFINITY))
            act()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def increment(item: int) -> int:
    return item + 1


def test_c2_hundreds_of_channels_fit_into_a_small_address_space() -> None:
    def use_many() -> None:
        channels: list[Channel[int]] = [Channel(across="processes") for _ in range(400)]
        for number, ch in enumerate(channels):
            ch.put_many(range(number, number + 50))
        assert [ch.get_many(50) for ch in channels] == [list(range(n, n + 50)) for n in range(400)]

    with_address_space(512 * MB, use_many)


def test_c2_twenty_process_stages_run_in_a_small_address_space() -> None:
    def run() -> None:
        graph = Graph("narrow")
        stream = graph.source(range(100))
        for _ in range(20):
            stream = stream.map(increment, on="process")
        result = stream.collect()
        assert graph.run()[result] == list(range(20, 120))

    with_address_space(2048 * MB, run)


def test_c2_unused_capacity_uses_no_memory() -> None:
    def use() -> None:
        ch: Channel[Any] = Channel(10**15, across="processes", max_bytes=10**15)
        array = np.arange(100_000)
        ch.put(array)
        ch.put_many(range(1000))
        assert np.array_equal(ch.get(), array)
        assert ch.get_many(1000) == list(range(1000))

    with_address_space(16 * MB, use)


def test_c11_reader_without_address_space_raises_without_taking_an_item() -> None:
    ch: Channel[Any] = Channel(8, across="processes")
    ch.put(1)
    array = np.arange(16 * MB)

    def read() -> None:
        assert ch.get() == 1
        ready.put(True)
        go.get()
        with pytest.raises(MemoryError, match=r"address space left.*ulimit -v"):
            ch.get()
        with pytest.raises(MemoryError, match=r"address space left.*ulimit -v"):
            ch.put(2)

    ready: Channel[bool] = Channel(1, across="processes")
    go: Channel[bool] = Channel(1, across="processes")
    other = multiprocessing.get_context("fork").Process(target=with_address_space, args=(32 * MB, read))
    other.start()
    assert ready.get()
    ch.put(array)
    go.put(True)
    other.join()
    assert other.exitcode == 0
    assert np.array_equal(ch.get(), array)
    ch.put(3)
    assert ch.get() == 3


def test_c4_channel_with_four_thousand_ports_rejects_one_more() -> None:
    ch: Channel[int] = Channel(5_000, across="processes")
    writers = [ch.writer() for _ in range(4_096)]
    with ch.reader() as reader:
        for number, writer in enumerate(writers):
            writer.put(number)
        assert [reader.get() for _ in writers] == list(range(4_096))
        assert ch.stats().writers == 4_096
        with pytest.raises(
            ChannelError, match="slots of this channel for ports and processes are in use; close some ports"
        ):
            writers.extend(ch.writer() for _ in range(1_000))
        for writer in writers:
            writer.close()
        with pytest.raises(Drained):
            reader.get()


def test_c11_put_without_address_space_raises_unless_channel_is_full() -> None:
    """The caller may be the only reader, so the put must not wait for a reader."""
    array = np.zeros(64 * MB, dtype=np.uint8)

    def put() -> None:
        ch: Channel[Any] = Channel(8, across="processes")
        with pytest.raises(MemoryError, match=r"no address space left for an item of 67\.1 MB.*ulimit -v"):
            ch.put_many([array] * 8)
        assert ch.stats().inside >= 1
        assert bytes(ch.get()[:2]) == b"\0\0"
        ch.put(1)

    with_address_space(256 * MB, put)


def test_c11_put_without_address_space_waits_for_an_open_reader() -> None:
    array = np.zeros(64 * MB, dtype=np.uint8)

    def put() -> None:
        ch: Channel[Any] = Channel(8, across="processes")
        with ch.reader() as reader:
            with pytest.raises(Full, match=r"no address space left for an item of 67\.1 MB.*ulimit -v"):
                ch.put_many([array] * 8, timeout=0)
            reader.get()
            reader.get_many(8, timeout=0)
            ch.put(array)

    with_address_space(256 * MB, put)
