"""Test which keys have the same bucket in every process."""

from __future__ import annotations

import datetime
import enum
import fractions
from typing import Any

import pytest

from flowchan.items.buckets import NotPortableError, bucket_of


class Color(enum.Enum):
    RED = 1


@pytest.mark.parametrize(
    "key",
    ["a", b"a", None, True, 2.5, fractions.Fraction(1, 3), Color.RED, (1, ("a", None)), frozenset("ab")],
)
def test_portable_bucket_equals_the_usual_bucket(key: Any) -> None:
    assert bucket_of(key, portable=True) == bucket_of(key)


@pytest.mark.parametrize(
    "key", [datetime.date.min, (1, datetime.date.min), frozenset([datetime.date.min]), int]
)
def test_key_with_salted_hash_has_no_portable_bucket(key: Any) -> None:
    assert isinstance(bucket_of(key), int)
    with pytest.raises(NotPortableError):
        bucket_of(key, portable=True)
