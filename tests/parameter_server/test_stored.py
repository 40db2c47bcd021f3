"""Test that a server's state can be saved to a file and loaded."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from shard_blocks import bits
from support.optional_packages import optional

from flowchan.pipelines.parameter_server.stored import StoredState, check_slots, load_state, save_state

pytestmark = pytest.mark.usefixtures("one_compute_thread")

safetensors = optional("safetensors.torch", "safetensors")
safetensors.save_file  # noqa: B018  # skips the file if the package is not installed

TENSORS = {
    "half": torch.randn(3, 2).bfloat16(),
    "scalar": torch.tensor(2.5, dtype=torch.float64),
    "transposed": torch.arange(6).reshape(2, 3).t(),
    "empty": torch.zeros(0, 4),
    "array": np.arange(4, dtype=np.int32),
}
SLOTS = {"optimizer/half/step": torch.tensor(3.0), "optimizer/state": np.arange(5, dtype=np.uint8)}


def test_loaded_state_equals_the_saved_state(tmp_path: Path) -> None:
    path = tmp_path / "state.safetensors"
    save_state(path, StoredState(41, dict(TENSORS), dict(SLOTS)))
    found = load_state(path)
    assert found.version == 41
    assert not found.single
    for stored, original in ((found.tensors, TENSORS), (found.slots, SLOTS)):
        assert stored.keys() == original.keys()
        for name, value in original.items():
            assert type(stored[name]) is type(value)
            assert stored[name].dtype == value.dtype
            assert stored[name].shape == value.shape
            assert bits(stored[name]) == bits(value)
    assert [file.name for file in tmp_path.iterdir()] == ["state.safetensors"]


def test_arrays_are_saved_without_torch(tmp_path: Path) -> None:
    save_state(tmp_path / "a", StoredState(1, {"": np.ones(2)}, {}, single=True))
    found = load_state(tmp_path / "a")
    assert isinstance(found.given, np.ndarray)
    assert found.single


def test_file_from_another_program_loads_as_version_zero(tmp_path: Path) -> None:
    safetensors.save_file({"w": torch.ones(2)}, tmp_path / "model")
    found = load_state(tmp_path / "model")
    assert (found.version, found.slots) == (0, {})
    assert torch.equal(found.tensors["w"], torch.ones(2))


def test_failed_save_keeps_the_old_file(tmp_path: Path) -> None:
    save_state(tmp_path / "a", StoredState(1, {"x": np.ones(2)}, {}))
    with pytest.raises(Exception, match="dtype"):
        save_state(tmp_path / "a", StoredState(2, {"x": np.array(["text"])}, {}))
    assert load_state(tmp_path / "a").version == 1
    assert [file.name for file in tmp_path.iterdir()] == ["a"]


def test_optimizer_that_differs_from_the_saved_one_is_rejected() -> None:
    check_slots(SLOTS, SLOTS)
    for wrong in (
        {},
        {"optimizer/half/step": torch.tensor(3.0)},
        {**SLOTS, "optimizer/state": np.zeros(9, np.uint8)},
    ):
        with pytest.raises(ValueError, match="optimizer and rows must be those of the saved server, got"):
            check_slots(SLOTS, wrong)


def test_save_names_the_missing_package_and_the_remedy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "safetensors"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(
        ImportError, match=r"ParameterServer.save needs safetensors: pip install 'flowchan\[safet"
    ):
        save_state(tmp_path / "a", StoredState(1, {"x": np.ones(2)}, {}))
