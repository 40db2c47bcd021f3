"""Damage in a channel's shared memory breaks the channel, and never crashes or blocks its users.

Other processes write to this memory, and any of these processes may have a stray pointer. Each case runs in a
forked child. The child first uses every part of the channel. It leaves items in the channel, leased items,
parked items, open ports and a recorded cause. The child then damages the memory and makes more calls. A call
may raise ``Broken`` or any other error, time out, or succeed, but no signal may kill the child. After a
while, the child calls ``abort``, as a user who gives up on the channel would. After that, every call must
end.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import pickle
import random
import signal
import struct
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from flowchan import Broken, Channel, ChannelError, Drained, In, Out, _core, select
from flowchan.channel.channel import _arrive
from flowchan.transport.descriptors import Borrowed

CASES, FEW = 400, 25  # number of cases with --long, and without
BATCH = 25  # children per test; two run at a time
MUTEX, COUNTS = 128, 192  # header offsets of the lock and of the fields that the lock protects
RECORDS, RECORD = 1_856, 448  # offset of the first redo record, and the distance between two records
RECORDS_END = RECORDS + 16 * RECORD
SLOT = 128
OWNER_DIED = 0x4000_0000
ERRORS = (
    ChannelError,
    ValueError,
    TypeError,
    LookupError,
    OSError,
    EOFError,
    ImportError,
    AttributeError,
    ArithmeticError,
    MemoryError,
    NameError,
    RuntimeError,
    pickle.PickleError,
)
"""Errors that a call may raise: the channel's own errors, and errors from unpickling damaged content."""


class Memory:
    """A channel's memory, which tests damage as a stray pointer would."""

    def __init__(self, channel: Channel[Any]) -> None:
        self.map = mmap.mmap(channel._fd, 0)
        self.length, _, self.groups_at, self.blocks_at = (self.word(at) for at in (32, 40, 48, 56))

    def word(self, at: int) -> int:
        return int(struct.unpack_from("<Q", self.map, at)[0])

    def set(self, at: int, value: int) -> None:
        struct.pack_into("<Q", self.map, at, value % 2**64)

    def sessions(self) -> list[int]:
        """Return the offsets of this process's session records. The second word of a record is the pid."""
        return [at - 8 for at in range(COUNTS, self.groups_at, 8) if self.word(at) == os.getpid()]

    def slots(self) -> int:
        """Return the offset of the last slots; the channel uses these slots first."""
        return self.length - 24 * SLOT


class Use:
    """A channel with every part in use, and the calls to make after the damage."""

    def __init__(self) -> None:
        self.ch: Channel[Any] = Channel(24, across="processes", max_bytes=1 << 18)
        before: Channel[int] = Channel(8, across="processes")
        self.reader, self.writer = self.ch.reader(), self.ch.writer()
        for item in (1, None, "text", b"x" * 300, b"y" * 20_000, {"a": [1, 2]}, b"z" * 3_000):
            self.ch.put(item)
        self.reader.get()
        self.reader.get_more()
        self.ch.get()  # leaves a free slot
        # two workers of an ordered stage; the second worker works ahead of its turn
        before.put_many(range(6))
        self.inputs = [before.reader() for _ in range(2)]
        self.outputs = [self.ch.writer() for _ in range(2)]
        for into, out in zip(self.inputs, self.outputs, strict=True):
            out._follow(into, True, False)
            into.get()
        self.outputs[1].put("ahead")
        self.outputs[1].put(b"far ahead" * 1_000)

    def calls(self) -> Iterator[Callable[[], Any]]:
        ch, soon = self.ch, 0.01
        yield from (
            lambda: ch.put(2, soon),
            lambda: ch.put(b"w" * 30_000, soon),
            lambda: ch.put({"b": 1}, soon),
        )
        yield from (ch.stats, lambda: len(ch), lambda: ch.closed, lambda: ch.drained, lambda: repr(ch))
        yield from (lambda: self.reader.get_more(soon), lambda: self.reader.get(soon), lambda: ch.get(soon))
        yield lambda: _core._deaths_over([self.reader])
        yield from (lambda: self.outputs[0].put("in turn", soon), lambda: self.inputs[0].get(soon))
        yield from (lambda: self.inputs[1].get(soon), lambda: self.outputs[1].put(b"v" * 10_000, soon))
        yield from (lambda: select([ch], puts=[(ch, 3)], timeout=soon), lambda: ch.get_many(5, soon))
        yield from (
            lambda: self.reader.get_many(9, soon),
            lambda: self.writer.put_many([1, b"u" * 9_000], soon),
        )
        yield from (
            lambda: _core._take_up([], [self.outputs[1]], []),
            self.reader._give_up,
            lambda: self.other_port(ch.reader()),
        )
        yield from (lambda: self.other_port(ch.writer()), self.writer.close, self.outputs[0].close, ch.close)
        yield from (
            lambda: ch.get_many(50, soon),
            lambda: ch.abort(KeyError("cause")),
            lambda: ch.get(soon),
            ch.stats,
        )

    def other_port(self, port: In[Any] | Out[Any]) -> None:
        with contextlib.closing(port):
            port.get(0.01) if isinstance(port, In) else port.put(4, 0.01)

    def go_on(self) -> None:
        give_up = threading.Timer(1.5, self.ch.abort)
        give_up.daemon = True
        give_up.start()
        for call in self.calls():
            with contextlib.suppress(*ERRORS):
                call()
        give_up.cancel()


def some_value(chance: random.Random, memory: Memory) -> int:
    """Return a meaningful word (such as an offset, a count or a flag) or a random word."""
    place = chance.randrange(memory.length)
    return chance.choice(
        [
            0,
            1,
            2,
            3,
            7,
            255,
            2**31,
            2**32 - 1,
            2**63,
            2**64 - 1,
            2**64 - 128,
            chance.getrandbits(64),
            chance.getrandbits(32),
            chance.randrange(64),
            place,
            place // 8 * 8,
            place // 128 * 128,
            memory.length,
            memory.length - 128,
            memory.length - 64,
            memory.slots() + chance.randrange(24) * SLOT,
            memory.blocks_at,
            memory.groups_at,
            memory.length + 4_096,
        ]
    )


def damage_words(chance: random.Random, memory: Memory) -> None:
    for _ in range(chance.choice([1, 1, 1, 2, 4])):
        session = chance.choice(memory.sessions())
        begin, end = chance.choice(
            [
                (0, MUTEX),
                (MUTEX, COUNTS),
                (COUNTS, COUNTS + 128),
                (COUNTS, 1_000),
                (1_000, RECORDS),
                (RECORDS, RECORDS_END),
                (session, session + 128),
                (memory.groups_at, memory.groups_at + 128),
                (memory.groups_at, memory.blocks_at),
                (memory.slots(), memory.length),
                (memory.slots(), memory.length),
                (memory.blocks_at, memory.blocks_at + 40_000),
            ]
        )
        memory.set(chance.randrange(begin // 8, end // 8) * 8, some_value(chance, memory))


def damage_slot(chance: random.Random, memory: Memory) -> None:
    """Damage the fields of one or more slots: next, state, size, number, kind and class, or block."""
    for _ in range(chance.choice([1, 1, 3])):
        slot = memory.length - SLOT * chance.randrange(1, 14)
        memory.set(slot + 8 * chance.randrange(6), some_value(chance, memory))


def damage_bytes(chance: random.Random, memory: Memory) -> None:
    """Write random bytes to a random range of the memory."""
    session = chance.choice(memory.sessions())
    begin = chance.choice([0, MUTEX, COUNTS, session, memory.groups_at, memory.slots(), memory.blocks_at])
    at = begin + chance.randrange(2_000)
    content = chance.randbytes(chance.randrange(1, 80))
    memory.map[at : at + len(content)] = content[: memory.length - at]


def damage_record(chance: random.Random, memory: Memory) -> None:
    """Make the lock's owner seem dead, and leave a random redo record."""
    record = RECORDS + RECORD * chance.randrange(16)
    memory.set(record, chance.choice([1, 3, 24, 25, 2**40]))
    for entry in range(24):
        memory.set(record + 8 + 16 * entry, some_value(chance, memory))
        memory.set(record + 16 + 16 * entry, some_value(chance, memory))
    memory.set(MUTEX, OWNER_DIED)


def damage_lock(chance: random.Random, memory: Memory) -> None:
    """Damage the lock. Set its owner to none, this thread or an invalid thread, or change the lock's type."""
    memory.set(
        MUTEX + 8 * chance.randrange(5),
        chance.choice(
            [
                threading.get_native_id(),
                1,
                2**22 + chance.getrandbits(20),
                2**31,
                OWNER_DIED,
                chance.getrandbits(64),
                2**31 - 2,
                chance.getrandbits(8) << 32,
                chance.getrandbits(8),
            ]
        ),
    )


KINDS = (damage_words, damage_slot, damage_bytes, damage_record, damage_lock)


def one_case(number: int) -> None:
    """Run one case, in a child."""
    chance = random.Random(number)
    use = Use()
    memory = Memory(use.ch)
    KINDS[number % len(KINDS)](chance, memory)
    use.go_on()


def start_child(number: int) -> tuple[int, int]:
    """Fork a child for one case. Return its pid and the descriptor for its errors."""
    answer, write = os.pipe()
    pid = os.fork()
    if pid:
        os.close(write)
        return pid, answer
    code = 1
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(30)  # kills the child if it hangs
        one_case(number)
        code = 0
    except BaseException:
        os.write(write, traceback.format_exc().encode()[-4_000:])
    finally:
        os._exit(code)


def outcome(number: int, pid: int, answer: int) -> str:
    """Return what was wrong with the child's exit, or an empty string if it was right."""
    with open(answer, "rb") as reported:
        text = reported.read().decode()
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code == 0:
        return ""
    how = f"died by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
    return f"case {number} ({KINDS[number % len(KINDS)].__name__}) {how}\n{text}"


@pytest.mark.parametrize(
    "first",
    [
        *range(0, FEW, BATCH),
        *(pytest.param(first, marks=pytest.mark.long) for first in range(FEW, CASES, BATCH)),
    ],
)
def test_damage_breaks_the_channel_but_never_crashes_its_users(first: int) -> None:
    wrong, running = [], []
    for number in range(first, first + BATCH):
        running.append((number, *start_child(number)))
        if len(running) == 2:
            wrong.append(outcome(*running.pop(0)))
    wrong.extend(outcome(*child) for child in running)
    assert not [text for text in wrong if text], "\n".join(text for text in wrong if text)


# damage that every user detects


def damaged(change: Callable[[Memory], None]) -> Channel[Any]:
    ch: Channel[Any] = Channel(8, across="processes")
    ch.put_many([1, 2, b"x" * 10_000])
    memory = Memory(ch)
    change(memory)
    memory.map.close()
    return ch


@pytest.mark.parametrize("offset", [8, 2**63, 128 * 3])
def test_first_item_offset_outside_the_slots_breaks_the_channel(offset: int) -> None:
    ch = damaged(lambda memory: memory.set(COUNTS, offset))
    for call in (ch.get, lambda: ch.put(1), ch.get):
        with pytest.raises(Broken, match="shared memory is damaged"):
            call()
    assert ch.broken


def test_circular_list_of_items_breaks_the_channel() -> None:
    ch = damaged(lambda memory: memory.set(memory.length - SLOT, memory.length - SLOT))
    assert ch.get() == 1
    with pytest.raises(Broken, match="damaged"):
        ch.get()


@pytest.mark.parametrize(("word", "value"), [(2, 10**9), (4, 3 + (200 << 32)), (5, 64), (5, 2**62)])
def test_payload_outside_the_memory_breaks_the_channel(word: int, value: int) -> None:
    ch = damaged(lambda memory: memory.set(memory.length - 3 * SLOT + 8 * word, value))
    assert [ch.get(), ch.get()] == [1, 2]
    with pytest.raises(Broken, match="damaged"):
        ch.get()


@pytest.mark.parametrize(("word", "value"), [(4, 77), (4, 2**31), (6, 0xFF)])
def test_item_with_unknown_kind_raises_in_the_reader(word: int, value: int) -> None:
    ch = damaged(lambda memory: memory.set(memory.length - SLOT + 8 * word, value))
    with pytest.raises(Broken):
        ch.get()


@pytest.mark.parametrize("record", [0, 7, 15])
@pytest.mark.parametrize("length", [1, 25])
def test_invalid_redo_record_breaks_the_channel(record: int, length: int) -> None:
    def change(memory: Memory) -> None:
        memory.set(RECORDS + RECORD * record, length)
        memory.set(RECORDS + RECORD * record + 8, 3)
        memory.set(MUTEX, OWNER_DIED)

    ch = damaged(change)
    with pytest.raises(Broken, match="damaged"):
        ch.get()


def test_two_open_redo_records_break_the_channel() -> None:
    def change(memory: Memory) -> None:
        for record in range(2):
            memory.set(RECORDS + RECORD * record, 1)
            memory.set(RECORDS + RECORD * record + 8, COUNTS)
            memory.set(RECORDS + RECORD * record + 16, memory.word(COUNTS))
        memory.set(MUTEX, OWNER_DIED)

    ch = damaged(change)
    with pytest.raises(Broken, match="damaged"):
        ch.get()


def test_lock_with_wrong_type_breaks_the_channel() -> None:
    ch = damaged(lambda memory: memory.set(MUTEX + 16, 5))
    with pytest.raises(Broken, match="damaged"):
        ch.get()


@pytest.mark.parametrize("owner", [1, 2**22 + 1, threading.get_native_id()], ids=["1", "none", "mine"])
def test_lock_with_wrong_owner_breaks_the_channel(owner: int) -> None:
    ch = damaged(lambda memory: memory.set(MUTEX, owner))
    with pytest.raises(Broken, match="damaged"):
        ch.put(1)


def test_waiting_call_raises_when_the_channel_is_damaged() -> None:
    """One user sleeps in a call while another detects the damage."""
    ch: Channel[int] = Channel(1, across="processes")
    ch.put(1)
    result: list[BaseException] = []

    def wait() -> None:
        with pytest.raises(Broken) as caught:
            ch.put(2)
        result.append(caught.value)

    waiting = threading.Thread(target=wait)
    waiting.start()
    while not ch.stats().waiting_writers:
        pass
    Memory(ch).set(COUNTS, 8)
    with pytest.raises(Broken):
        ch.get()
    waiting.join()
    assert "damaged" in str(result[0])


# attaching to the memory


CONSTANTS = ("magic", "version", "capacity", "max_bytes", "length", "groups", "groups_at", "blocks_at")


@pytest.mark.parametrize("word", range(8), ids=CONSTANTS)
def test_invalid_header_is_rejected(word: int) -> None:
    ch = damaged(lambda memory: memory.set(8 * word, memory.word(8 * word) + 2**40))
    copy = os.dup(ch._fd)
    with pytest.raises(OSError, match="not the memory of a channel"):
        _core.Channel.__init__(Channel.__new__(Channel), fd=copy, socket=-1, name="")
    os.close(copy)
    assert ch.get() == 1  # a user that has already mapped the memory has a copy of the constants


def test_file_of_a_different_type_is_rejected() -> None:
    fd = os.memfd_create("other")
    os.ftruncate(fd, 1 << 20)
    with pytest.raises(OSError, match="not the memory of a channel"):
        _arrive(Borrowed(os.getpid(), fd, -1, os.fstat(fd).st_ino), "other")
    os.close(fd)


def test_channel_memory_cannot_be_truncated() -> None:
    """If the memory could be truncated, all of its users would get SIGBUS."""
    ch: Channel[int] = Channel(4, across="processes")
    with pytest.raises(PermissionError):
        os.ftruncate(ch._fd, 4_096)
    ch.close()
    with pytest.raises(Drained):
        ch.get()
