"""Test how operators classify callables: async, a class to instantiate, with state, and by name."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import AsyncIterator
from typing import Any

import pytest

from flowchan.declare.callables import class_with_state, is_async, is_callable_class, name_of


def plain(item: int) -> int:
    return item


async def later(item: int) -> int:
    return item


async def many(item: int) -> AsyncIterator[int]:
    yield item


class Model:
    def __call__(self, item: int) -> int:
        return item

    def method(self, item: int) -> int:
        return item

    @classmethod
    def of_class(cls, item: int) -> int:
        return item

    @staticmethod
    def static(item: int) -> int:
        return item


class AsyncModel:
    async def __call__(self, item: int) -> int:
        return item


class Inherits(Model):
    pass


class Item:
    """A class without ``__call__``, so the class itself is called."""

    def __init__(self, item: int) -> None: ...


class Meta(type):
    def __call__(cls, *args: Any) -> Any:
        return super().__call__(*args)


class OfMeta(metaclass=Meta):
    pass


@dataclasses.dataclass(frozen=True)
class Frozen:
    by: int = 1

    def __call__(self, item: int) -> int:
        return item + self.by


@dataclasses.dataclass(eq=False)
class Mutable:
    by: int = 1

    def __call__(self, item: int) -> int:
        return item + self.by


def bound(function: Any) -> Any:
    return functools.partial(functools.partial(function))


KINDS: dict[Any, tuple[bool, bool, str, str]] = {
    plain: (False, False, "", "plain"),
    later: (True, False, "", "later"),
    many: (True, False, "", "many"),
    bound(plain): (False, False, "", "plain"),
    bound(later): (True, False, "", "later"),
    Model: (False, True, "Model", "Model"),
    Model(): (False, False, "Model", "Model"),
    Model().method: (False, False, "Model", "method"),
    Model.of_class: (False, False, "", "of_class"),
    Model.static: (False, False, "", "static"),
    bound(Model): (False, True, "Model", "Model"),
    bound(Model()): (False, False, "Model", "Model"),
    Inherits: (False, True, "Inherits", "Inherits"),
    AsyncModel: (True, True, "AsyncModel", "AsyncModel"),
    AsyncModel(): (True, False, "AsyncModel", "AsyncModel"),
    bound(AsyncModel): (True, True, "AsyncModel", "AsyncModel"),
    Item: (False, False, "", "Item"),
    int: (False, False, "", "int"),
    OfMeta: (False, False, "", "OfMeta"),
    Meta: (False, False, "", "Meta"),
    Frozen: (False, True, "", "Frozen"),
    Frozen(): (False, False, "", "Frozen"),
    Mutable: (False, True, "Mutable", "Mutable"),
    len: (False, False, "", "len"),
    "a".join: (False, False, "", "join"),
    operator.itemgetter(0): (False, False, "", "itemgetter"),
}


@pytest.mark.parametrize("number", range(len(KINDS)))
def test_kind_of_a_callable_is_known(number: int) -> None:
    function, expected = list(KINDS.items())[number]
    found = is_async(function), is_callable_class(function), class_with_state(function), name_of(function)
    assert found == expected, function
