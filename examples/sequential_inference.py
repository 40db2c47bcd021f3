"""Recognise handwritten digits with a plain module, and then with its parts in two processes.

    python examples/sequential_inference.py [--parts N] [--on thread|process] [--batches N]
    flowchan viz examples/sequential_inference.py -o sequential.svg

The program trains a convolutional network on half of scikit-learn's digits, for a second or two. The network
then classifies the other half, which the program repeats to get the given number of batches. The plain module
and each part compute with one thread. The example needs torch and scikit-learn.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional

from flowchan.pipelines import Sequential

BATCH, CHUNKS = 512, 4


def block(channels: int, more: int) -> tuple[nn.Module, ...]:
    return nn.Conv2d(channels, more, 3, padding=1), nn.BatchNorm2d(more), nn.ReLU(inplace=True)


def network() -> nn.Sequential:
    return nn.Sequential(
        *(*block(1, 32), *block(32, 32), *block(32, 32), nn.MaxPool2d(2)),
        *(*block(32, 64), *block(64, 64), *block(64, 64), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Dropout(), nn.Linear(256, 10)),
    )


def digits() -> tuple[Tensor, Tensor]:
    """Return 1,797 images of 8 × 8 pixels, with values from 0 to 1, and their labels."""
    from sklearn.datasets import load_digits

    data = load_digits()
    return torch.tensor(data.images, dtype=torch.float32)[:, None] / 16, torch.tensor(data.target)


def learn(module: nn.Sequential, images: Tensor, labels: Tensor, rounds: int = 5) -> None:
    optimiser = torch.optim.Adam(module.parameters(), lr=3e-3)
    module.train()
    for _ in range(rounds):
        for places in torch.randperm(len(images)).split(64):
            optimiser.zero_grad()
            functional.cross_entropy(module(images[places]), labels[places]).backward()
            optimiser.step()
    module.eval()


def pipeline(module: nn.Sequential | None = None, parts: int = 2, on: str = "process") -> Sequential:
    """Return the network, split into parts that take equally long for a typical batch."""
    module = network().eval() if module is None else module
    sample = torch.rand(BATCH, 1, 8, 8)
    return Sequential(module, parts, on=on, chunks=CHUNKS, balance="time", sample=sample)  # type: ignore[arg-type]


def timed(outputs: Iterable[Tensor]) -> tuple[Tensor, float]:
    begin = time.perf_counter()
    found = torch.cat(list(outputs))
    return found, time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description="Recognise digits with and without a pipeline.")
    parser.add_argument("--parts", type=int, default=2)
    parser.add_argument("--on", choices=["thread", "process"], default="process")
    parser.add_argument("--batches", type=int, default=24)
    arguments = parser.parse_args()

    torch.manual_seed(0)
    torch.set_num_threads(1)
    images, labels = digits()
    module = network()
    learn(module, images[::2], labels[::2])
    batches = list(itertools.islice(itertools.cycle(images[1::2].split(BATCH)), arguments.batches))
    answers = list(itertools.islice(itertools.cycle(labels[1::2].split(BATCH)), arguments.batches))
    truth = torch.cat(answers)

    with torch.no_grad():
        plain, plain_seconds = timed(module(batch) for batch in batches)
    with pipeline(module, arguments.parts, arguments.on) as pipe:
        pipe(batches[0])  # the workers start when the first batch arrives
        piped, piped_seconds = timed(pipe.stream(batches))
    print(f"{len(truth):,} images in {len(batches)} batches")
    for name, found, seconds in (("sequential", plain, plain_seconds), ("pipelined", piped, piped_seconds)):
        print(f"{name:<10} {(found.argmax(1) == truth).double().mean():.2%} right in {seconds:.2f} s")
    torch.testing.assert_close(piped, plain)
    print(f"the same answers from {pipe}")


if __name__ == "__main__":
    main()
