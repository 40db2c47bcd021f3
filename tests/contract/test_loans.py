"""Loans: a writer fills memory of the channel in place and then puts it."""

from __future__ import annotations

import gc
import os
import threading

import numpy as np
import pytest
from support.optional_packages import optional
from support.waiting import wait_until

from flowchan import Channel, ChannelError, Closed, Full

torch = optional("torch")

pytestmark = pytest.mark.usefixtures("one_compute_thread")

LARGE = 100_000


@pytest.mark.copying
def test_loan_put_by_two_threads_is_put_once(make):
    ch = make(1)
    ch.put("in the way")
    array = ch.loan(LARGE, "uint8")
    array[:] = 1
    outcomes: list[str] = []

    def put() -> None:
        try:
            ch.put(array)
            outcomes.append("put")
        except ChannelError:
            outcomes.append("refused")

    threads = [threading.Thread(target=put) for _ in range(2)]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(outcomes) == 1 and ch.stats().waiting_writers == 1, what=ch.stats)
    assert ch.get() == "in the way"
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["put", "refused"]
    assert (ch.get() == 1).all()
    assert len(ch) == 0


def test_a_loan_is_filled_in_place_and_put(make):
    ch = make(2)
    array = ch.loan((100, 1000), "float32")
    assert (array.shape, array.dtype, array.flags.writeable) == ((100, 1000), np.float32, True)
    array[:] = 3
    ch.put({"array": array, "label": 7})
    arrived = ch.get()
    assert arrived["label"] == 7
    assert arrived["array"].sum() == 300_000


@pytest.mark.copying
def test_a_loan_is_not_copied(make):
    """The reader sees the very memory that the writer filled."""
    ch = make(2)
    array = ch.loan(LARGE, "uint8")
    array[:] = 1
    at = array.ctypes.data
    ch.put(array)
    assert ch.get().ctypes.data == at


def test_a_loan_with_a_torch_type_is_a_tensor(make):
    ch = make(2)
    tensor = ch.loan((4, 5), torch.bfloat16)
    assert (type(tensor), tensor.shape, tensor.dtype) == (torch.Tensor, (4, 5), torch.bfloat16)
    tensor.fill_(2)
    ch.put(tensor)
    assert torch.equal(ch.get(), torch.full((4, 5), 2, dtype=torch.bfloat16))


@pytest.mark.copying
def test_a_loan_cannot_be_changed_after_its_put(make):
    ch = make(2)
    array = ch.loan(LARGE, "uint8")
    array[:] = 1
    ch.put(array)
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 2
    with pytest.raises(ChannelError, match=r"was on loan from .* and has already been put"):
        ch.put(array)
    assert len(ch) == 1


@pytest.mark.copying
def test_several_loans_and_a_slice_of_a_loan_arrive(make):
    """Only one loan in each item is used in place. The item's other arrays are copied."""
    ch = make(2)
    first, second = ch.loan(LARGE, "uint8"), ch.loan(LARGE, "uint8")
    first[:], second[:] = 1, 2
    ch.put((first[10:20], second, np.arange(LARGE)))
    part, whole, other = ch.get()
    assert part.tolist() == [1] * 10
    assert (whole == 2).all()
    assert np.array_equal(other, np.arange(LARGE))


@pytest.mark.copying
def test_dropping_a_loan_returns_its_memory(make):
    ch = make(2, max_bytes=200_000)
    for _ in range(50):
        array = ch.loan(150_000, "uint8")
        assert [holder.blocks for holder in ch.stats().holders] == [1]
        del array
    assert ch.stats().holders == ()


def test_loan_uses_no_capacity_and_does_not_delay_drained(make):
    """C2, C3, C4: only a put counts, so a loan that is never put keeps no reader waiting."""
    ch = make(1)
    array = ch.loan(LARGE, "uint8")
    ch.put("first")
    with pytest.raises(Full):
        ch.put(array, timeout=0.01)
    assert ch.get() == "first"
    ch.close()
    assert ch.drained
    with pytest.raises(Closed):
        ch.put(array)
    with pytest.raises(Closed):
        ch.loan(LARGE, "uint8")


@pytest.mark.copying
def test_a_loan_outlives_its_channel(make):
    ch = make(1)
    with ch.writer() as out:
        array = out.loan(LARGE, "uint8")
    del ch, out
    gc.collect()
    array[:] = 9
    assert (array == 9).all()


@pytest.mark.copying
def test_c7_a_loan_waits_for_memory(make):
    ch = make(8, max_bytes=100_000)
    kept = [ch.loan(90_000, "uint8")]
    with pytest.raises(Full, match=rf"process {os.getpid()} holds \d+ blocks"):
        kept.extend(ch.loan(90_000, "uint8", timeout=0.01) for _ in range(100))
    del kept[0]
    kept.append(ch.loan(90_000, "uint8", timeout=0.01))


@pytest.mark.copying
@pytest.mark.parametrize("shape", [10**7, 2**63, 2**64 - 1, (2**33, 2**33)])
def test_c13_loan_larger_than_max_bytes_raises(make, shape):
    with pytest.raises(ValueError, match="at most max_bytes=1000000 bytes"):
        make(1, max_bytes=10**6).loan(shape, "uint8")


@pytest.mark.copying
def test_c13_loan_larger_than_any_block_raises(make):
    ch = make(1, max_bytes=10**15)
    with pytest.raises(ValueError, match=f"at most max_bytes={ch.max_bytes} bytes"):
        ch.loan(2 * 10**12, "uint8")


@pytest.mark.parametrize(
    ("shape", "dtype", "error", "message"),
    [
        (-1, "uint8", ValueError, "shape must contain only non-negative ints"),
        ((3, 2.5), "uint8", ValueError, "shape must contain only non-negative ints"),
        (3, object, TypeError, "dtype must not contain Python objects"),
        (3, "no such type", TypeError, "no such type"),
    ],
)
def test_c13_invalid_loan_arguments_raise(make, shape, dtype, error, message):
    with pytest.raises(error, match=message):
        make(1).loan(shape, dtype)


@pytest.mark.copying
def test_loan_put_for_a_leased_item_is_copied_and_reusable(make):
    """An output for a leased item is copied, so the loan can be used again."""
    source, target = make(2), make(2)
    source.put(1)
    with source.reader() as reader, target.writer() as out:
        out._follow(reader, True, True)
        array = out.loan(LARGE, "uint8")
        array[:] = reader.get()
        out.put(array)
        array[:] = 9  # the program still owns the loan
        assert (target.get() == 1).all()


@pytest.mark.copying
def test_two_views_of_one_array_arrive_as_two_arrays(make):
    ch = make(1)
    array, tensor = np.arange(LARGE), torch.arange(LARGE)
    ch.put((array[:50_000], array[:50_000], tensor[:50_000], tensor[:50_000]))
    first, second, third, fourth = ch.get()
    assert np.array_equal(first, second)
    third[0] = 5
    assert fourth[0] == 0


@pytest.mark.other_process
@pytest.mark.one_machine("a remote process does not borrow the channel's memory")
def test_c11_memory_lent_to_a_killed_process_is_freed(make, spawn_peer):
    ch, taken = make(4), make(4)
    peer = spawn_peer(_borrow, ch, taken)
    taken.get()
    assert [holder.blocks for holder in ch.stats().holders] == [2]
    peer.kill()
    peer.join()
    ch.close()
    with pytest.raises(Closed):
        ch.get()
    with ch.reader():  # detects dead processes
        wait_until(lambda: ch.stats().holders == (), what=ch.stats)


def _borrow(ch: Channel, taken: Channel) -> None:
    kept = [ch.loan(LARGE, "uint8"), ch.loan(LARGE, "uint8")]
    taken.put(os.getpid())
    Channel(1).get()
    del kept
