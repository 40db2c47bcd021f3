"""Test the short texts of items in a channel. These texts are made without the program's classes."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import decimal
import enum
import pathlib
import pickle
import subprocess
import sys
from typing import Any, NamedTuple

import pytest

from flowchan import Channel, Failed, Unreadable, Window, pack
from flowchan.items.codec import Opening
from flowchan.items.item_texts import SeenItem
from flowchan.items.sampled_item import SampledItem
from flowchan.run.worker.requests import Request


@dataclasses.dataclass
class Word:
    text: str
    number: int = 0

    def __setstate__(self, state: Any) -> None:
        raise AssertionError("the program's code runs")

    def __repr__(self) -> str:
        raise AssertionError("the program's code runs")


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    row: int
    column: int


class Point(NamedTuple):
    x: int
    y: Any


class Colour(enum.Enum):
    RED = 1


class Names(list[str]):
    pass


class Table(dict[str, int]):
    pass


class Reduced:
    def __reduce__(self) -> Any:
        return made, ("text",)


def made(text: str) -> Any:
    raise AssertionError("the program's code runs")


def text_of_sent(item: Any) -> str:
    """Return the text of an item in a channel between processes."""
    channel: Channel[Any] = Channel(1, across="processes")
    channel.put(item)
    ((*one,),) = channel._peek(0, 1, 1 << 20)
    return SeenItem(*one).text()


CYCLE: list[Any] = []
CYCLE.append(CYCLE)

TEXTS = [
    (Word("a"), "Word(text='a', number=0)"),
    ([Word("a", 1)], "[Word(text='a', number=1)]"),
    (Place(1, 2), "Place(1, 2)"),
    (Point(1, Place(2, 3)), "Point(1, Place(2, 3))"),
    (Colour.RED, "Colour(1)"),
    (Names(["a", "b"]), "Names('a', 'b')"),
    (Table(a=1), "Table(a=1)"),
    (Reduced(), "made('text')"),
    (made, "<class made>"),
    (Word, "<class Word>"),
    (CYCLE, "[[[[[[[...]]]]]]]"),
    (datetime.date(2026, 1, 2), "datetime.date(2026, 1, 2)"),
    (decimal.Decimal("1.5"), "Decimal('1.5')"),
    (pathlib.PurePosixPath("/a"), "PurePosixPath('/a')"),
    (collections.Counter("aab"), "Counter({'a': 2, 'b': 1})"),
    ({1, 2}, "{1, 2}"),
    (bytearray(b"a"), "bytearray(b'a')"),
    (range(3), "range(0, 3)"),
    (ValueError("wrong"), "ValueError('wrong')"),
    (Failed(1, ValueError("wrong"), 2), "Failed(item=1, error=ValueError('wrong'), attempts=2)"),
    (Window("k", 0, 2, [1]), "Window(key='k', start=0, end=2, items=[1])"),
    (Request(7, 5, "/board"), "5"),
    (Request(7, Word("a"), "/board"), "Word(text='a', number=0)"),
    (SampledItem("a", (1,)), "'a'"),
    ("long " * 100, "'long long long long long long long lo...ng long long long long long long long '"),
]  # fmt: skip


@pytest.mark.parametrize(("item", "text"), TEXTS)
def test_text_shows_contents_without_running_the_programs_code(item: Any, text: str) -> None:
    assert text_of_sent(item) == text


SCRIPT = """
from flowchan import Channel, pack
from flowchan.items.codec import Opening
from flowchan.items.item_texts import SeenItem

class Word:
    def __init__(self, text):
        self.text = text

class Other(Word):
    count = []

channel = Channel(2, across="processes")
channel.put_many([Word("a"), Other("b")])
for one in channel._peek(0, 2, 1 << 20):
    print(SeenItem(*one).text())
"""


def test_objects_of_the_script_appear_with_their_class_names() -> None:
    printed = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert printed.stdout == "Word(text='a')\nOther(text='b')\n"


def test_damaged_pickle_is_shown_with_the_error() -> None:
    data = pickle.dumps([1, 2, 3])[:-2]
    assert SeenItem(0, False, len(data), 3, data).text().startswith("<can't be shown: ")
    assert SeenItem(0, False, 4, 4, b"1234").text().startswith("<can't be shown: ")
    assert SeenItem(0, False, 10, 3, None).text() == "<an item of 10 bytes>"


def test_item_between_threads_appears_with_its_own_repr() -> None:
    assert SeenItem(0, False, 0, 0, Place(1, 2)).text() == "Place(row=1, column=2)"
    assert SeenItem(0, False, 0, 0, SampledItem(Place(1, 2), (1,))).text() == "Place(row=1, column=2)"
    assert "whose repr raises AssertionError" in SeenItem(0, False, 0, 0, Word("a")).text()
    assert SeenItem(0, False, 0, 0, "a\n" * 200).text().count("\n") == 0


def test_packed_value_is_shown_as_packed() -> None:
    assert text_of_sent(pack([1, 2])).startswith("b'")
    assert text_of_sent(Opening(pack([1, Word("a")]))) == "[1, Word(text='a', number=0)]"
    assert "Unreadable" in text_of_sent(Unreadable(b"data"))
