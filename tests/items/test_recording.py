"""Test the file format of recordings: whole, cut off, and damaged files."""

from __future__ import annotations

import itertools
import pickle
from pathlib import Path
from typing import Any

import pytest
from support.optional_packages import optional

from flowchan import Channel, Graph, Recording
from flowchan.items.recording import END, MAGIC, recording_options

numpy = optional("numpy")

ITEMS: list[Any] = [0, "one", b"", None, {"four": [4]}, (5, 5.0), bytes(100_000)]


def write(path: Path, items: list[Any], most: int = 1_000, max_bytes: int = 10**9) -> bytes:
    """Write a recording and return the contents of the file."""
    with recording_options(path, "graph", "channel", most, max_bytes).opened() as writer:
        for item in items:
            writer.write(item)
    return path.read_bytes()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "items.rec"


def test_recording_returns_the_written_items(path: Path) -> None:
    write(path, ITEMS)
    recording = Recording(path)
    assert (recording.graph, recording.channel) == ("graph", "channel")
    assert recording.complete
    assert not recording.stopped
    assert list(recording) == list(recording) == ITEMS
    assert [recording[number] for number in range(len(recording))] == ITEMS
    assert recording[-1] == ITEMS[-1]
    assert list(pickle.loads(pickle.dumps(recording))) == ITEMS


@pytest.mark.parametrize("number", [len(ITEMS), -len(ITEMS) - 1])
def test_recording_refuses_a_number_without_an_item(path: Path, number: int) -> None:
    write(path, ITEMS)
    with pytest.raises(IndexError, match="number must be between -7 and 6"):
        Recording(path)[number]


def test_arrays_in_items_keep_shape_type_and_contents(path: Path) -> None:
    arrays = [
        numpy.arange(12.0).reshape(3, 4),
        numpy.arange(12, dtype="i2").reshape(3, 4).T,
        numpy.zeros((0, 3), "f4"),
        numpy.array(7),
        numpy.array(["2026-11-28"], "M8[D]"),
        numpy.array(["a", {}], object),
    ]
    write(path, [arrays, arrays[0][:, ::2]])
    found, strided = Recording(path)
    for one, expected in zip([*found, strided], [*arrays, arrays[0][:, ::2]], strict=True):
        assert (one.dtype, one.shape) == (expected.dtype, expected.shape)
        assert (one == expected).all()
    assert all(one.ctypes.data % 16 == 0 for one in found[:2])


def test_truncated_file_still_has_its_complete_records(path: Path) -> None:
    items = [0, "one", [2, 2], numpy.arange(3)]
    data = write(path, items)
    lengths = []
    for length in range(data.index(b"}") + 1, len(data)):
        path.write_bytes(data[:length])
        recording = Recording(path)
        assert not recording.complete
        assert str(list(recording)) == str(items[: len(recording)])
        lengths.append(len(recording))
    assert [length for length, _ in itertools.groupby(lengths)] == [0, 1, 2, 3, 4]


def test_each_changed_byte_raises(path: Path) -> None:
    items = [0, "one", [2, 2], b"three"]
    data = write(path, items)
    end = data.rindex(b'{"items"')
    for place in range(end):
        path.write_bytes(data[:place] + bytes([data[place] ^ 0x41]) + data[place + 1 :])
        with pytest.raises(ValueError, match=r"items\.rec"):
            list(Recording(path))


def test_items_before_the_damage_are_read_first(path: Path) -> None:
    data = write(path, [0, "one", "two", "three"])
    path.write_bytes(data.replace(b"two", b"TWO"))
    recording = Recording(path)
    items = iter(recording)
    assert [next(items), next(items)] == [0, "one"]
    with pytest.raises(ValueError, match="is damaged at item 2; record the channel again"):
        next(items)
    assert recording[3] == "three"


@pytest.mark.parametrize("data", [b"", b"FLOW", b"import flowchan\n", bytes(100)])
def test_other_file_is_refused(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    with pytest.raises(ValueError, match="path must be a file that `flowchan record` has written"):
        Recording(path)


def test_other_version_is_refused(path: Path) -> None:
    data = write(path, ITEMS)
    assert data.startswith(MAGIC + b"\1\0\0\0")
    path.write_bytes(data.replace(MAGIC + b"\1", MAGIC + b"\2", 1))
    with pytest.raises(ValueError, match="must have format version 1, got 2"):
        Recording(path)


def test_limit_on_items_ends_the_recording(path: Path) -> None:
    write(path, ITEMS, most=3)
    recording = Recording(path)
    assert list(recording) == ITEMS[:3]
    assert recording.complete
    assert recording.stopped == "the limit of 3 items was reached"
    write(path, ITEMS, most=len(ITEMS))
    assert not Recording(path).stopped


def test_limit_on_bytes_bounds_the_size_of_the_file(path: Path) -> None:
    data = write(path, ITEMS, max_bytes=1_000)
    assert data.index(END.to_bytes(8, "little")) <= 1_000
    recording = Recording(path)
    assert list(recording) == ITEMS[:-1]
    assert recording.stopped == "the limit of 1,000 bytes was reached"


def test_item_that_cannot_be_pickled_ends_the_recording(path: Path) -> None:
    class Refusing:
        def __reduce__(self) -> Any:
            raise ValueError("not me")

    for refused, reason in [
        (Refusing(), "not me"),
        (Channel(across="processes"), "must not contain channels"),
    ]:
        write(path, [0, refused, 2])
        recording = Recording(path)
        assert list(recording) == [0]
        assert recording.stopped.startswith("item 1 can't be recorded: ")
        assert reason in recording.stopped


@pytest.mark.parametrize("option", ["most", "max_bytes"])
def test_record_refuses_wrong_arguments(path: Path, option: str) -> None:
    graph = Graph()
    graph.source(range(3), name="numbers").sink(abs)
    with pytest.raises(ValueError, match=f"record: {option} must be at least 1, got 0"):
        graph.record("numbers", path, **{option: 0})
    with pytest.raises(TypeError, match=f"record: {option} must be an int"):
        graph.record("numbers", path, **{option: 1.5})
    with pytest.raises(TypeError, match="record: path must be a path, got 7"):
        graph.record("numbers", 7)  # type: ignore[arg-type]
    for wrong in (path.parent, path.parent / "missing" / "items.rec"):
        with pytest.raises(ValueError, match="path must name a file in a folder that exists"):
            graph.record("numbers", wrong)
    assert not path.exists()
