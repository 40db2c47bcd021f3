"""Send CUDA tensors on a real device. ``test_device_tensors.py`` tests the protocol without a device.

Peers are spawned, because a forked process cannot use CUDA if its parent has used it.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.waiting import WAIT_LIMIT_S, wait_until

from flowchan import Channel, ChannelError

torch = pytest.importorskip("torch", reason="torch is not installed: pip install torch")
from flowchan.transport.device import transfer  # noqa: E402
from flowchan.transport.device.cuda import Driver  # noqa: E402

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no CUDA device: run the tests on a machine that has one"
)
two = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="no second CUDA device: run the tests on a machine that has two"
)

SPAWN = multiprocessing.get_context("spawn")
LARGE = 100_000
A_WHILE = 500_000_000  # clock cycles that keep a device's stream busy for a few tenths of a second


@pytest.fixture(autouse=True)
def no_leftovers() -> None:
    """Replace the check for leftovers: once the driver has been used, it keeps threads and descriptors."""


def channel(capacity: int = 64) -> Channel[Any]:
    return Channel(capacity, across="processes")


@pytest.fixture
def start() -> Iterator[Callable[..., Any]]:
    """Yield ``start(function, *args)``, which runs the function in a new process."""
    started = []

    def begin(function: Callable[..., Any], *args: Any) -> Any:
        process = SPAWN.Process(target=function, args=args, daemon=True)
        process.start()
        started.append(process)
        return process

    yield begin
    for process in started:
        process.join(WAIT_LIMIT_S)
        if process.exitcode is None:
            process.kill()
            process.join()


def kept() -> int:
    transfer._state.sweep()
    return sum(len(kept.blocks) for kept in transfer._state.kept.values())


TENSORS = {
    "plain": lambda: torch.arange(LARGE),
    "small": lambda: torch.arange(5),
    "0-d": lambda: torch.tensor(2.5),
    "of size zero": lambda: torch.empty(0, 3),
    "bool": lambda: torch.arange(LARGE) % 3 == 0,
    "complex": lambda: torch.arange(LARGE) * (1 + 2j),
    "bfloat16": lambda: torch.arange(LARGE).bfloat16(),
    "transposed": lambda: torch.arange(LARGE).reshape(100, -1).t(),
    "channels last": lambda: (
        torch.arange(LARGE).reshape(10, 10, 10, 100).to(memory_format=torch.channels_last)
    ),
    "with gaps": lambda: torch.arange(LARGE)[::3],
    "a part of a larger one": lambda: torch.arange(LARGE)[500:900],
    "expanded": lambda: torch.arange(100).expand(200, 100),
    "conjugated": lambda: (torch.arange(LARGE) * 1j).conj(),
    "a leaf with a gradient to come": lambda: torch.ones(LARGE, requires_grad=True),
    "a parameter": lambda: torch.nn.Parameter(torch.ones(LARGE, device="cuda")),
    "sparse": lambda: torch.eye(100).to_sparse(),
}


def _echo(ch: Channel, returned: Channel) -> None:
    for item in ch:
        returned.put(item)


@pytest.mark.parametrize("switch", ["1", "0"])
def test_every_kind_of_tensor_arrives_equal(start, monkeypatch, switch):
    """Send tensors to another process and back, within this process, and in the form used for another
    host."""
    monkeypatch.setenv(transfer.SWITCH, switch)
    requests, returned, replies, remote = channel(), channel(), channel(), Channel(across="hosts")
    start(_echo, requests, returned)
    for name, make in TENSORS.items():
        sent = make()
        if not isinstance(sent, torch.nn.Parameter):
            sent = sent.detach().cuda().requires_grad_(sent.requires_grad)
        requests.put(sent)
        replies.put(sent)
        remote.put(sent)
        for arrived in (returned.get(), replies.get(), remote.get()):
            assert type(arrived) is type(sent), name
            assert (arrived.dtype, arrived.shape, arrived.device) == (sent.dtype, sent.shape, sent.device), (
                name
            )
            assert (arrived.requires_grad, arrived.is_leaf) == (sent.requires_grad, sent.is_leaf), name
            assert torch.equal(arrived.detach().to_dense(), sent.detach().to_dense()), name
            if name in ("transposed", "channels last"):
                assert arrived.stride() == sent.stride()
    requests.close()


def test_receiver_does_not_see_writes_after_the_put():
    ch = channel()
    tensor = torch.zeros(LARGE, device="cuda")
    torch.cuda._sleep(A_WHILE)
    ch.put(tensor)
    tensor.fill_(9)
    assert ch.get().sum() == 0


def test_sender_does_not_see_writes_by_the_receiver():
    ch = channel()
    ch.put(torch.zeros(LARGE, device="cuda"))
    reader, keeper = ch.reader(), ch.reader()
    first = reader.get()
    first += 7
    reader._give_up()
    assert keeper.get().sum() == 0
    assert first.sum() == 7 * LARGE
    keeper.close()


def _put_late(ch: Channel) -> None:
    tensor = torch.zeros(LARGE, device="cuda")
    ch.put(tensor.fill_(4))  # the first put of a process allocates memory, so it waits for the device
    torch.cuda.synchronize()
    torch.cuda._sleep(A_WHILE)
    ch.put(tensor.fill_(5))
    event = torch.cuda.Event()
    event.record()
    ch.put(event.query())


def test_receiver_stream_waits_for_the_senders_event(start):
    """The put must not wait for the device.

    The receiver's stream must wait until the contents are complete.
    """
    ch = channel()
    start(_put_late, ch)
    assert ch.get().sum() == 4 * LARGE
    tensor = ch.get()
    assert ch.get() is False
    assert tensor.sum() == 5 * LARGE


def test_transfer_uses_the_current_stream(start):
    ch, returned = channel(), channel()
    start(_echo, ch, returned)
    streams = [torch.cuda.Stream() for _ in range(3)]
    for number in range(60):
        with torch.cuda.stream(streams[number % 3]):
            torch.cuda._sleep(A_WHILE // 100)
            ch.put(torch.full((LARGE,), number, device="cuda"))
            assert (returned.get() == number).all()
    ch.close()


def _count_opens(ch: Channel, answers: Channel) -> None:
    counts: Counter[str] = Counter()
    for name in ("open", "close"):
        inner = getattr(Driver, name)

        def counted(*args: Any, name: str = name, inner: Any = inner) -> Any:
            counts[name] += 1
            return inner(*args)

        setattr(Driver, name, counted)
    total = sum(int(item[0]) for item in ch)
    answers.put((total, dict(counts)))


def test_receiver_opens_memory_once_for_many_tensors(start):
    ch, answers = channel(8), channel()
    start(_count_opens, ch, answers)
    for number in range(1000):
        ch.put(torch.full((LARGE,), number, device="cuda"))
    ch.close()
    assert answers.get() == (999 * 500, {"open": 1})
    wait_until(lambda: kept() == 0)


def _put_some(ch: Channel, count: int) -> None:
    for number in range(count):
        ch.put(torch.full((LARGE,), number, device="cuda"))


def test_items_survive_a_producer_that_exits_after_its_put(start):
    ch = channel()
    process = start(_put_some, ch, 20)
    wait_until(lambda: len(ch) == 20)
    assert [int(ch.get()[-1]) for _ in range(20)] == list(range(20))
    process.join(WAIT_LIMIT_S)
    assert process.exitcode == 0


def _put_and_stay(ch: Channel, count: int) -> None:
    _put_some(ch, count)
    channel().get()


@pytest.mark.parametrize("opened", [False, True])
def test_error_for_item_from_killed_producer_names_the_producer(start, opened):
    ch = channel()
    process = start(_put_and_stay, ch, 3)
    wait_until(lambda: len(ch) == 3)
    arrived = ch.get() if opened else None
    process.kill()
    process.join()
    with pytest.raises(ChannelError, match=rf"process {process.pid} put.*{transfer.SWITCH}=0"):
        ch.get()
    if arrived is not None:
        assert arrived.sum() == 0  # the received tensor belongs to the receiver


def _take_and_stay(ch: Channel, taken: Channel) -> None:
    reader = ch.reader()
    item = reader.get()
    item.fill_(-1)
    taken.put(os.getpid())
    channel().get()


def test_item_leased_by_a_killed_receiver_is_returned(start):
    ch, taken = channel(), channel()
    ch.put(torch.full((LARGE,), 3, device="cuda"))
    start(_take_and_stay, ch, taken)
    os.kill(taken.get(), signal.SIGKILL)
    ch.close()
    assert [int(item.sum()) for item in ch] == [3 * LARGE]
    wait_until(lambda: kept() == 0)


EXPANDABLE = """
import torch
from flowchan import Channel
from flowchan.transport.device import transfer as crossing
tensors = [torch.full((3_000_000,), number, device="cuda") for number in range(5)]
assert any(segment["is_expandable"] for segment in torch.cuda.memory_snapshot())
channel = Channel(across="processes")
channel.put_many(tensors)
crossing._state.pools["cuda"]
assert [int(channel.get()[-1]) for _ in range(5)] == list(range(5))
"""


def test_tensors_in_expandable_segments_are_transferred():
    allocator = {
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
    }
    subprocess.run([sys.executable, "-c", EXPANDABLE], env={**os.environ, **allocator}, check=True)


def _name_devices(ch: Channel, returned: Channel) -> None:
    for item in ch:
        returned.put((int(item.sum()), item.device.index))


@two
def test_devices_are_matched_by_identity_not_by_number(start, monkeypatch):
    """The receiver sees only the second device, as its first device."""
    ch, returned = channel(), channel()
    second = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")[1]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", second)
    start(_name_devices, ch, returned)
    ch.put(torch.ones(LARGE, device="cuda:1"))
    assert returned.get() == (LARGE, 0)
    ch.close()


@two
def test_item_with_tensors_on_two_devices_arrives(start):
    ch, returned = channel(), channel()
    start(_echo, ch, returned)
    ch.put([torch.full((LARGE,), number, device=f"cuda:{number}") for number in range(2)])
    for number, tensor in enumerate(returned.get()):
        assert tensor.device.index == number
        assert (tensor.to("cuda:0") == number).all()
    ch.close()


def _answer_with_the_error(ch: Channel, answers: Channel) -> None:
    try:
        ch.get()
    except ChannelError as error:
        answers.put(str(error))


@pytest.mark.parametrize("switch", ["1", "0"])
def test_error_names_a_device_that_the_receiver_cannot_see(start, monkeypatch, switch):
    monkeypatch.setenv(transfer.SWITCH, switch)
    ch, answers = channel(), channel()
    ch.put(torch.ones(LARGE, device="cuda"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    start(_answer_with_the_error, ch, answers)
    message = answers.get()
    assert f"of process {os.getpid()}" in message
    assert "can use only: none" in message
    assert "tensor.cpu()" in message


def test_put_while_a_cuda_graph_is_captured_raises():
    """The capture must continue.

    The test pickles the tensor itself: a failed put formats the tensor for its error, and this ends a
    capture.
    """
    tensor = torch.ones(LARGE, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tensor.add_(1)
        with pytest.raises(RuntimeError, match="CUDA graph is being captured"):
            transfer.reduce(
                tensor, (tensor.dtype, tuple(tensor.shape), tensor.stride(), False), tensor.nbytes, "cuda"
            )
    graph.replay()
    assert tensor.sum() == 2 * LARGE
