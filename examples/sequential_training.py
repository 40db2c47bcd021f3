"""Train a convolutional network on handwritten digits, first as a plain module and then in two parts.

    python examples/sequential_training.py [--parts N] [--on thread|process]
        [--schedule gpipe|1f1b] [--epochs N]
    flowchan viz examples/sequential_training.py -o training.svg

The two parts run at the same time. The plain module and the parts start with the same weights and use the
same batches of scikit-learn's digits, so their losses are the same. The parts add up gradients in a different
order, and training amplifies rounding differences, so the program computes with double precision. It holds
out a quarter of the digits for a test at the end. The plain module and each part compute with one thread. If
you pass ``--picture FILE``, the program draws the last steps of each part. The example needs torch and
scikit-learn.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from flowchan.pipelines import Sequential

BATCH, CHUNKS = 64, 4
sgd = partial(torch.optim.SGD, lr=0.05, momentum=0.9)


def network() -> nn.Sequential:
    return nn.Sequential(
        *(nn.Conv2d(1, 24, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(24, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 48, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(192, 64), nn.ReLU(), nn.Linear(64, 10)),
    )


def pipeline(module: nn.Sequential | None = None, parts: int = 2, on: Any = "process") -> Sequential:
    """Return the network, split into parts that take equally long for a typical batch."""
    module = network() if module is None else module
    return Sequential(module, parts, on=on, chunks=CHUNKS, balance="time", sample=torch.rand(BATCH, 1, 8, 8))


def digits() -> tuple[Tensor, Tensor]:
    """Return 1,797 shuffled images of 8 × 8 pixels, with values from 0 to 1, and their labels."""
    from sklearn.datasets import load_digits

    data = load_digits()
    order = torch.randperm(len(data.images), generator=torch.Generator().manual_seed(0))
    return torch.tensor(data.images)[order, None] / 16, torch.tensor(data.target)[order]


def epochs(count: int, images: Tensor, labels: Tensor) -> Iterator[Iterator[tuple[Tensor, Tensor]]]:
    """Yield the batches of each epoch, in the same order for every caller."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        order = torch.randperm(len(images), generator=generator)
        yield ((images[places], labels[places]) for places in order.split(BATCH))


def curve(
    step: Callable[[Tensor, Tensor], Tensor], count: int, images: Tensor, labels: Tensor
) -> list[float]:
    """Call ``step`` with each batch, and return the mean loss of each epoch."""
    found = []
    for batches in epochs(count, images, labels):
        losses = [float(step(x, target)) for x, target in batches]
        found.append(sum(losses) / len(losses))
    return found


def plain_step(module: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, target: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = cross_entropy(module(x), target)
    loss.backward()
    optimizer.step()
    return loss.detach()


def right(module: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Return the share of images that the module classifies correctly."""
    with torch.no_grad():
        return float((module(images).argmax(1) == labels).double().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description="Train on digits with and without a pipeline.")
    parser.add_argument("--parts", type=int, default=2)
    parser.add_argument("--on", choices=["thread", "process"], default="process")
    parser.add_argument("--schedule", choices=["gpipe", "1f1b"], default="1f1b")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument(
        "--picture", help="file for the timeline of the last steps (.svg, or .json for Perfetto)"
    )
    arguments = parser.parse_args()

    torch.manual_seed(0)
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    images, labels = digits()
    held_out = len(images) // 4
    data = arguments.epochs, images[held_out:], labels[held_out:]
    plain = network()
    module = copy.deepcopy(plain)

    begin = time.perf_counter()
    plainly = curve(partial(plain_step, plain, sgd(plain.parameters())), *data)
    plain_seconds, begin = time.perf_counter() - begin, time.perf_counter()
    pipe = pipeline(module, arguments.parts, arguments.on)
    with pipe.trainer(loss=cross_entropy, optimizer=sgd, schedule=arguments.schedule) as training:
        in_parts = curve(training.step, *data)
    seconds = time.perf_counter() - begin

    print("epoch  plain loss  in parts")
    for epoch, (one, other) in enumerate(zip(plainly, in_parts, strict=True), 1):
        print(f"{epoch:>5}  {one:>10.3f}  {other:>8.3f}")
    for name, trained, took in (("plain", plain, plain_seconds), ("in parts", module, seconds)):
        print(
            f"{name}: {right(trained, images[:held_out], labels[:held_out]):.1%} of the "
            f"held-out digits, {took:.1f} s"
        )
    torch.testing.assert_close(torch.tensor(in_parts), torch.tensor(plainly), rtol=1e-3, atol=1e-6)
    print(f"the same curve from {pipe}")
    if arguments.picture:
        print(f"{training.timeline().save(arguments.picture)} shows the last steps")


if __name__ == "__main__":
    main()
