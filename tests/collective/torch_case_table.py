"""The table of the cases in ``torch_cases.py``, and the tensors that these cases share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

Case = Callable[[], Any]
FOLDER: list[str] = []  # prefix of the checkpoint folders
CASES: dict[str, Case] = {}
LACKS = "this backend lacks it"


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


def random_tensor(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(100 * seed + dist.get_rank()))


def random_tensor_of(other: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(other))
