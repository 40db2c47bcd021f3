"""Test that the values that decisions, observers and the feed share cannot be changed."""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

import pytest

MODULES = (
    "actions", "autoscale", "deadlock", "decisions", "events", "failures", "health", "plan", "scaling",
    "seeds", "stats", "transitions",
)  # fmt: skip
"""Modules of ``run/policy`` with values that several threads share, such as listeners of the feed."""


def values_of(module: str) -> list[type[Any]]:
    found = vars(importlib.import_module(f"flowchan.run.policy.{module}")).values()
    return [one for one in found if isinstance(one, type) and dataclasses.is_dataclass(one)]


@pytest.mark.parametrize("module", MODULES)
def test_value_that_threads_share_cannot_be_changed(module: str) -> None:
    kinds = values_of(module)
    assert kinds
    for kind in kinds:
        value = object.__new__(kind)
        for field in dataclasses.fields(kind):
            with pytest.raises(dataclasses.FrozenInstanceError):
                setattr(value, field.name, None)
