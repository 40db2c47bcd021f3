"""Arrays, tensors and memory views are written to shared memory once and read in place."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import gc
import os
from typing import Any

import numpy as np
import psutil
import pytest
from support.optional_packages import optional
from support.tensors import LARGE, TENSORS
from support.waiting import wait_until

from flowchan import Channel, Full

torch = optional("torch")

pytestmark = pytest.mark.usefixtures("one_compute_thread")

BLOCK = 16_384
"""Minimum size of an item that is read in place, in bytes."""


@dataclasses.dataclass
class Sample:
    image: Any
    label: int


ARRAYS = {
    "plain": np.arange(LARGE),
    "small": np.arange(5),
    "0-d": np.array(2.5),
    "of size zero": np.empty((0, 3), "int16"),
    "bool": np.arange(LARGE) % 3 == 0,
    "complex": np.arange(LARGE) * (1 + 2j),
    "big endian": np.arange(LARGE, dtype=">i4"),
    "structured": np.zeros(5000, [("a", "i4"), ("b", "f8", 3)]),
    "times": np.arange(LARGE).astype("datetime64[s]"),
    "of strings": np.array(["a", "bcd"] * 5000),
    "of objects": np.array([1, "a", None], dtype=object),
    "Fortran order": np.asfortranarray(np.arange(LARGE).reshape(100, -1)),
    "with gaps": np.arange(LARGE)[::3],
    "backwards": np.arange(LARGE)[::-1],
    "transposed": np.arange(LARGE).reshape(10, 100, 100).transpose(1, 2, 0),
    "repeated by strides": np.broadcast_to(np.arange(100), (200, 100)),
    "masked": np.ma.masked_array(np.arange(LARGE), np.arange(LARGE) % 2 == 0),
}


@pytest.mark.copying
@pytest.mark.parametrize("name", ARRAYS)
def test_c13_arrays_of_every_kind_arrive_equal(make, name):
    ch, sent = make(1), ARRAYS[name]
    ch.put(sent)
    arrived = ch.get()
    assert type(arrived) is type(sent)
    assert arrived.dtype == sent.dtype
    assert arrived.shape == sent.shape
    assert np.array_equal(arrived, sent)
    if type(sent) is np.ndarray and not sent.dtype.hasobject:
        assert not arrived.flags.writeable
        assert arrived.copy().flags.writeable


@pytest.mark.copying
@pytest.mark.parametrize("name", TENSORS)
def test_c13_tensors_of_every_kind_arrive_equal(make, name):
    ch, sent = make(1), TENSORS[name]
    ch.put(sent)
    arrived = ch.get()
    assert type(arrived) is type(sent)
    assert (arrived.dtype, arrived.shape, arrived.device) == (sent.dtype, sent.shape, sent.device)
    assert (arrived.requires_grad, arrived.is_leaf) == (sent.requires_grad, sent.is_leaf)
    if name != "meta":
        assert torch.equal(arrived.detach().to_dense(), sent.detach().to_dense())
    if name in ("transposed", "channels last"):
        assert arrived.stride() == sent.stride()


@pytest.mark.copying
def test_c13_a_tensor_within_an_autograd_graph_raises(make):
    """The graph cannot be sent. The error names the remedy, and the channel stays unchanged."""
    ch = make(1)
    with pytest.raises(TypeError, match=r"autograd graph.*send tensor\.detach\(\)"):
        ch.put({"loss": torch.ones(3, requires_grad=True) * 2})
    assert len(ch) == 0
    ch.put("the next one")
    assert ch.get() == "the next one"


def test_nested_arrays_and_tensors_arrive(make):
    ch = make(1)
    array, tensor = np.arange(LARGE), torch.arange(LARGE)
    ch.put({"sample": Sample(array, 3), "rest": (tensor, [memoryview(array)])})
    arrived = ch.get()
    assert np.array_equal(arrived["sample"].image, array)
    assert arrived["sample"].label == 3
    assert torch.equal(arrived["rest"][0], tensor)
    view = arrived["rest"][1][0]
    assert (view.format, view.shape) == (memoryview(array).format, (LARGE,))
    assert view == memoryview(array)


@pytest.mark.copying
@pytest.mark.parametrize(
    "bytes_like", [b"x" * LARGE, bytearray(b"x" * LARGE), memoryview(b"x" * LARGE), memoryview(b"")]
)
def test_bytes_like_objects_keep_their_type(make, bytes_like):
    """Bytes own their memory, so they are copied; a memory view of bytes is read in place."""
    ch = make(1)
    ch.put(bytes_like)
    arrived = ch.get()
    assert type(arrived) is type(bytes_like)
    assert arrived == bytes_like
    assert bool(ch.stats().holders) == (type(arrived) is memoryview and len(arrived) > 0)


FORMATS = {
    "bytes": memoryview(b"abc"),
    "numbers": memoryview(np.arange(12.0).reshape(3, 4)),
    "of ctypes": memoryview((ctypes.c_int * 5)(1, 2, 3)),
    "with gaps": memoryview(np.arange(20))[::2],
    "empty": memoryview(np.empty(0, "f4")),
}


@pytest.mark.copying
@pytest.mark.parametrize("name", FORMATS)
def test_memory_views_arrive_with_their_format(make, name):
    ch, sent = make(1), FORMATS[name]
    ch.put(sent)
    arrived = ch.get()
    assert (arrived.format, arrived.shape) == (sent.format.lstrip("<"), sent.shape)
    assert arrived.tobytes() == sent.tobytes()


@pytest.mark.copying
@pytest.mark.parametrize("dtype", [">i4", "f2", "c16", [("a", "i4")]])
def test_c13_memory_view_with_unsupported_format_raises(make, dtype):
    ch = make(1)
    with pytest.raises(TypeError, match=r"format of a memoryview .* send view\.cast\('B'\)"):
        ch.put(memoryview(np.zeros(3, dtype)))
    assert len(ch) == 0


@pytest.mark.copying
def test_c13_a_memory_view_of_pairs_raises(make):
    """Each letter of the format alone is supported, but not the combination."""
    ch = make(1)
    pairs = pytest.importorskip("_testbuffer").ndarray([(1, 2), (3, 4)], shape=[2], format="bB")
    with pytest.raises(TypeError, match=r"format of a memoryview .* got 'bB'"):
        ch.put(memoryview(pairs))
    assert len(ch) == 0


def _freed() -> torch.Tensor:
    tensor = torch.ones(LARGE)
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.copying
@pytest.mark.parametrize(
    "make_tensor", [_freed, lambda: torch._efficientzerotensor(LARGE)], ids=["freed", "never there"]
)
def test_tensor_without_memory_arrives_or_raises(make, make_tensor):
    """The tensor must arrive as with pickle, or raise."""
    ch = make(2)
    with contextlib.suppress(TypeError, NotImplementedError, RuntimeError):
        ch.put(make_tensor())
        ch.get()
    ch.put("the next one")
    assert ch.get() == "the next one"


@pytest.mark.copying
def test_array_used_twice_in_an_item_arrives_as_one_object(make):
    ch = make(1)
    array, tensor = np.arange(LARGE), torch.arange(LARGE)
    ch.put([array, array, tensor, tensor])
    first, second, third, fourth = ch.get()
    assert first is second
    assert third is fourth


def test_in_place_change_is_visible_in_both_threads():
    ch = Channel(1)
    sent = [np.zeros(LARGE), torch.zeros(LARGE)]
    ch.put(sent)
    arrived = ch.get()
    arrived[0][0] = arrived[1][0] = 5
    assert sent[0][0] == sent[1][0] == 5


# --- Writes by the receiver, and how blocks return ---


@pytest.mark.copying
def test_writes_to_a_received_tensor_stay_private(make):
    """C11: if a leased item was changed and returned, the next reader gets the original data."""
    ch = make(2)
    ch.put(torch.zeros(LARGE))
    reader = ch.reader()
    tensor = reader.get()
    tensor += 7
    keeper = ch.reader()
    reader._give_up()
    again = keeper.get()
    assert torch.equal(again, torch.zeros(LARGE))
    assert torch.equal(tensor, torch.full((LARGE,), 7.0))
    again += 1
    assert torch.equal(tensor, torch.full((LARGE,), 7.0))
    keeper.close()


@pytest.mark.copying
def test_memory_block_is_freed_with_its_last_view(make):
    """A slice of the array, or a second array that shares its memory, also keeps the block."""
    ch = make(1)
    ch.put((np.arange(LARGE), torch.arange(LARGE)))
    arrived = ch.get()
    (holder,) = ch.stats().holders
    assert (holder.pid, holder.blocks) == (os.getpid(), 1)
    assert holder.bytes >= 16 * LARGE
    part = arrived[0][5:7]
    del arrived
    assert ch.stats().holders == (holder,)
    assert part.tolist() == [5, 6]
    del part
    assert ch.stats().holders == ()


@pytest.mark.copying
def test_blocks_are_reused_for_later_items(make):
    """C2: a long stream of large items needs no more memory than a few of them."""
    ch = make(1, max_bytes=3 * 8 * LARGE)
    for number in range(100):
        ch.put(np.full(LARGE, number))
        arrived = ch.get()
        assert (arrived == number).all()


@pytest.mark.copying
def test_views_stay_valid_after_port_and_channel_are_gone(make):
    """The data of a finished item that a reader keeps does not change."""
    ch = make(4)
    kept = []
    with ch.writer() as out, ch.reader() as reader:
        for number in range(10):
            out.put(np.full(LARGE, number))
            kept.append(reader.get())
    assert ch.closed
    del ch, out, reader
    gc.collect()
    assert [array[0] for array in kept] == list(range(10))
    assert all((array == array[0]).all() for array in kept)


@pytest.mark.copying
def test_reader_that_keeps_all_arrays_does_not_block_writers(make):
    """Before the kept arrays fill the memory, new arrays arrive as copies."""
    ch = make(4, max_bytes=4 * 8 * LARGE)
    kept = []
    for number in range(30):
        ch.put(np.full(LARGE, number), timeout=0)
        kept.append(ch.get())
    (holder,) = ch.stats().holders
    assert 1 <= holder.blocks <= 4
    assert [int(array[0]) for array in kept] == list(range(30))
    assert all((array == array[0]).all() for array in kept)


@pytest.mark.copying
def test_items_of_different_sizes_fit_between_blocks_in_use(make):
    """Free memory is divided into blocks again, even between blocks that are still in use.

    The channel always has room for the largest item.
    """
    ch = make(64, max_bytes=2_000_000)
    kept = []
    for size in [20_000, 30_000, 50_000, 90_000, 200_000, 500_000, 900_000, 1_900_000] * 3:
        count = min(64, 2_000_000 // (size + 1000))
        for number in range(count):
            ch.put(np.full(size, number % 100, "uint8"), timeout=0)
        for number in range(count):
            arrived = ch.get()
            assert (arrived == number % 100).all()
        kept.append(arrived)
    assert all((array == array[0]).all() for array in kept)


@pytest.mark.copying
def test_put_without_room_names_the_processes_that_hold_memory(make):
    """The error reports what fills the channel, and which processes keep blocks."""
    ch = make(2, max_bytes=10 * 8 * LARGE)
    ch.put(np.zeros(LARGE))
    kept = ch.get()
    ch.put_many([np.zeros(LARGE)] * 2)
    message = (
        rf"2 of 2 items inside, 1\.6 MB of max_bytes=8\.0 MB; process {os.getpid()} holds 1 block, 800\.2 KB"
    )
    with pytest.raises(Full, match=message):
        ch.put(np.zeros(LARGE), timeout=0.01)
    assert len(kept) == LARGE


@pytest.mark.other_process
@pytest.mark.parametrize("port", [False, True])
@pytest.mark.one_machine("a remote process has its own rings and blocks")
def test_c11_memory_blocks_of_a_killed_process_are_freed(make, spawn_peer, port):
    ch, taken = make(4), make(4)
    ch.put_many([np.zeros(LARGE)] * 3)
    peer = spawn_peer(_keep_two, ch, taken, port)
    pid = taken.get()
    assert [holder.pid for holder in ch.stats().holders] == [pid]
    peer.kill()
    peer.join()
    ch.close()
    items = list(ch)  # with a port, includes the item of the dead process
    assert len(items) == (2 if port else 1)
    del items
    wait_until(lambda: ch.stats().holders == (), what=ch.stats)


def _keep_two(ch: Channel, taken: Channel, port: bool) -> None:
    source = ch.reader() if port else ch
    kept = [source.get(), source.get()]
    taken.put(os.getpid())
    never = Channel(1)
    never.get()
    del kept


def _fork_and_end(ch: Channel, requests: Channel, answers: Channel) -> None:
    """Pass the received item to a child that outlives this process."""
    array = ch.get()
    if os.fork() == 0:
        _read_again(array, requests, answers)
    os._exit(0)


@pytest.mark.other_process
def test_forked_child_keeps_views_after_its_parent_has_ended(make, spawn_peer):
    ch, requests, answers = make(1), make(1), make(1)
    before = psutil.Process().children(recursive=True)
    ch.put(np.full(LARGE, 5))
    parent = spawn_peer(_fork_and_end, ch, requests, answers)
    assert answers.get() == 5 * LARGE
    assert parent.join() == 0
    ch.stats()  # detects the dead process
    for _ in range(10):
        ch.put(np.full(LARGE, 6))
        assert ch.get()[0] == 6
    requests.put(None)
    assert answers.get() == 5 * LARGE
    wait_until(lambda: psutil.Process().children(recursive=True) == before)


@pytest.mark.other_process
def test_forked_child_keeps_the_views_of_its_parent(make, spawn_peer):
    """The child's view must not change, even after the parent releases its view and the channel continues."""
    ch, requests, answers = make(1), make(1), make(1)
    ch.put(np.full(LARGE, 5))
    arrived = ch.get()
    peer = spawn_peer(_read_again, arrived, requests, answers)
    assert answers.get() == 5 * LARGE
    del arrived
    for _ in range(10):
        ch.put(np.full(LARGE, 6))
        assert ch.get()[0] == 6
    requests.put(None)
    assert answers.get() == 5 * LARGE
    peer.result()


def _read_again(array: Any, requests: Channel, answers: Channel) -> None:
    answers.put(int(array.sum()))
    requests.get()
    answers.put(int(array.sum()))
    answers.flush()


def _put_tensors(ch: Channel, count: int) -> None:
    for number in range(count):
        ch.put(torch.full((LARGE,), number))
    ch.flush()
    os._exit(0)  # exits without cleanup


@pytest.mark.other_process
def test_c12_producer_that_exits_after_its_put_loses_no_item(make, spawn_peer):
    ch = make(4)
    peer = spawn_peer(_put_tensors, ch, 4)
    assert peer.join() == 0
    assert [int(ch.get()[0]) for _ in range(4)] == [0, 1, 2, 3]


def _get_one(ch: Channel) -> int:
    return int(ch.get()[0])


@pytest.mark.other_process
def test_c12_consumer_that_exits_early_loses_no_item(make, spawn_peer):
    ch = make(4)
    for number in range(4):
        ch.put(torch.full((LARGE,), number))
    assert spawn_peer(_get_one, ch).result() == 0
    assert [int(ch.get()[0]) for _ in range(3)] == [1, 2, 3]
