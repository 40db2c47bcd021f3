"""Models, optimizers and a training loop that runs in the same way on any device."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

from support.optional_packages import optional

torch = optional("torch")
nn = torch.nn

BATCH = 6
STEPS = 20


class LastOutput(nn.Module):  # type: ignore[misc]
    """Recurrent layer, followed by a linear layer for the output of the last step."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.recurrent = getattr(nn, kind)(5, 7, num_layers=2, batch_first=True, dropout=0.3)
        self.head = nn.Linear(7, 3)

    def forward(self, x: Any) -> Any:
        return self.head(self.recurrent(x)[0][:, -1])


class Sentence(nn.Module):  # type: ignore[misc]
    """Embedding, one transformer layer, and a linear layer for the mean."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Any) -> Any:
        return self.head(self.layer(self.embedding(x)).mean(1))


def mlp() -> Any:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3))


def conv_net() -> Any:
    first = [nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()]
    return nn.Sequential(*first, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 3))


MODELS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "mlp": (mlp, lambda: torch.randn(BATCH, 4)),
    "conv": (conv_net, lambda: torch.randn(BATCH, 2, 6, 6)),
    "transformer": (Sentence, lambda: torch.randint(11, (BATCH, 5))),
    "lstm": (lambda: LastOutput("LSTM"), lambda: torch.randn(BATCH, 5, 5)),
    "gru": (lambda: LastOutput("GRU"), lambda: torch.randn(BATCH, 5, 5)),
}
"""For each name, a function that creates the model and a function that creates a batch."""
OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, 0.05, momentum=0.9, weight_decay=0.01),
    "adam": lambda parameters: torch.optim.Adam(parameters, 0.01, foreach=False),
    "adam-foreach": lambda parameters: torch.optim.Adam(parameters, 0.01, foreach=True),
    "adamw-fused": lambda parameters: torch.optim.AdamW(parameters, 0.01, fused=True),
}


def made(kind: str, seed: int = 0) -> tuple[Any, list[tuple[Any, Any]]]:
    """Return a model and its batches. All calls return equal values."""
    torch.manual_seed(seed)
    model, batch = MODELS[kind]
    return model(), [(batch(), torch.randint(3, (BATCH,))) for _ in range(STEPS)]


def train(
    model: Any,
    batches: list[Any],
    optimizer: Any,
    device: Any,
    after_step: Callable[[int], None] = lambda step: None,
) -> list[Any]:
    """Train ``model``, which is on ``device``, and return the loss of each step, on ``device``."""
    losses = []
    for step, (x, target) in enumerate(batches):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x.to(device)), target.to(device))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        after_step(step)
    return losses


def trained(kind: str, optimizer: str, device: Any, steps: Any = None) -> dict[str, Any]:
    """Train on ``device`` in the context ``steps``. Return losses, parameters, buffers and moments on the
    CPU."""
    model, batches = made(kind)
    model = copy.deepcopy(model).to(device)
    updates = OPTIMIZERS[optimizer](model.parameters())
    torch.manual_seed(1)
    after = getattr(steps, "after_step", lambda step: None)
    with steps or contextlib.nullcontext():
        losses = train(model, batches, updates, device, after)
    result = {name: value.cpu() for name, value in model.state_dict().items()}
    for index, state in updates.state_dict()["state"].items():
        result |= {
            f"{name} of {index}": value.cpu() for name, value in state.items() if torch.is_tensor(value)
        }
    return result | {f"loss {step}": loss.cpu() for step, loss in enumerate(losses)}


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Assert that both dicts contain the same tensors, bit for bit."""
    assert found.keys() == expected.keys()
    different = [name for name, value in expected.items() if not torch.equal(found[name], value)]
    assert not different, different
