"""Create tensors of every kind, for tests of transfers."""

from __future__ import annotations

from support.optional_packages import optional

torch = optional("torch")

LARGE = 100_000

TENSORS = (
    {}
    if not torch
    else {
        "plain": torch.arange(LARGE),
        "small": torch.arange(5),
        "0-d": torch.tensor(2.5),
        "of size zero": torch.empty(0, 3),
        "bool": torch.arange(LARGE) % 3 == 0,
        "complex": torch.arange(LARGE) * (1 + 2j),
        "bfloat16": torch.arange(LARGE).bfloat16(),
        "half": torch.arange(2000).half(),
        "transposed": torch.arange(LARGE).reshape(100, -1).t(),
        "channels last": torch.arange(LARGE).reshape(10, 10, 10, 100).to(memory_format=torch.channels_last),
        "with gaps": torch.arange(LARGE)[::3],
        "a part of a larger one": torch.arange(LARGE)[500:900],
        "expanded": torch.arange(100).expand(200, 100),
        "conjugated": (torch.arange(LARGE) * 1j).conj(),
        "a leaf with a gradient to come": torch.ones(LARGE, requires_grad=True),
        "a parameter": torch.nn.Parameter(torch.ones(LARGE)),
        "sparse": torch.eye(100).to_sparse(),
        "meta": torch.empty(5, 6, device="meta"),
    }
)
