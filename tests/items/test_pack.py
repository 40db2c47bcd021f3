"""Test ``pack`` and ``unpack``: a packed value travels with other data and is not unpacked on the way."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pickle import UnpicklingError
from typing import Any

import numpy as np
import pytest
from support.optional_packages import optional

from flowchan import Channel, pack, unpack

torch = optional("torch")

pytestmark = pytest.mark.usefixtures("one_compute_thread")


def crossed(item: Any) -> Any:
    channel = Channel[Any](across="processes")
    channel.put(item)
    return channel.get()


@pytest.mark.parametrize("value", [None, 7, "text", {"a": [1, (2,)]}, abs], ids=repr)
def test_unpack_returns_an_equal_value(value: Any) -> None:
    assert unpack(pack(value)) == value
    number, packed = crossed((7, pack(value)))
    assert (number, unpack(packed)) == (7, value)


def test_local_functions_can_be_packed() -> None:
    factor = 3
    assert unpack(crossed(pack(lambda number: factor * number)))(14) == 42


def test_arrays_in_a_packed_value_are_read_in_place() -> None:
    value = {"array": np.arange(100_000.0), "tensor": torch.arange(100_000), "view": memoryview(b"abc")}
    packed = crossed(pack(value))
    first, second = unpack(packed), unpack(packed)
    assert np.array_equal(first["array"], value["array"])
    assert not first["array"].flags.writeable
    assert np.shares_memory(first["array"], second["array"])
    assert torch.equal(first["tensor"], value["tensor"])
    assert first["view"] == value["view"]


def test_packed_value_passes_through_channels_without_being_unpickled() -> None:
    value = [np.arange(100_000.0), torch.arange(1000)]
    arrived = unpack(crossed(crossed(pack(value))))
    assert np.array_equal(arrived[0], value[0])
    assert torch.equal(arrived[1], value[1])


class Made:
    """A value that calls a function when it is unpacked."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.made_by = function, args

    def __reduce__(self) -> Any:
        return self.made_by


def refuse() -> None:
    raise UnpicklingError("not here")


def test_unpickling_error_is_raised_only_by_unpack() -> None:
    for made, error in ((Made(refuse), UnpicklingError), (Made(sys.exit, 3), SystemExit)):
        number, packed = crossed((7, pack(made)))
        assert number == 7
        with pytest.raises(error):
            unpack(packed)
    number, _ = crossed((7, pack(Made(os.kill, os.getpid(), signal.SIGKILL))))
    assert number == 7


def test_pack_error_names_the_part_that_cannot_be_pickled() -> None:
    with pytest.raises(TypeError, match=r"its item 'lock' .*can't be pickled"):
        pack({"lock": threading.Lock()})
