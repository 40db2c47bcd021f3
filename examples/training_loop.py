"""Train a model on batches from a graph, in which two processes rotate handwritten digits.

    python examples/training_loop.py [--epochs N] [--workers N] [--seed N]
    flowchan viz examples/training_loop.py -o digits.svg

Each epoch is a run of the graph. The seed makes epochs repeatable. The example needs torch and scikit-learn.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator

import numpy as np
import torch
from scipy.ndimage import affine_transform
from sklearn.datasets import load_digits
from torch import nn

from flowchan import Graph, Stream, worker
from flowchan.pipelines import dataset


def shuffled(images: np.ndarray, labels: np.ndarray) -> Iterator[tuple[int, np.ndarray, int]]:
    chance = random.Random(worker().seed)
    for place in chance.sample(range(len(images)), len(images)):
        yield chance.getrandbits(32), images[place], int(labels[place])


def augmented(item: tuple[int, np.ndarray, int]) -> tuple[np.ndarray, int]:
    seed, image, label = item
    chance = np.random.default_rng(seed)
    angle, shift = np.radians(chance.uniform(-15, 15)), chance.uniform(-1, 1, 2)
    turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    return affine_transform(image, turn, 3.5 - turn @ [3.5, 3.5] + shift, order=1), label


def stacked(samples: list[tuple]) -> tuple[torch.Tensor, torch.Tensor]:
    images, labels = zip(*samples, strict=True)
    return torch.from_numpy(np.stack(images)).float() / 16, torch.tensor(labels)


def batches(images: np.ndarray, labels: np.ndarray, workers: int) -> Stream[tuple]:
    turned = Graph("digits").source(shuffled, images, labels).map(augmented, on="process", workers=workers)
    return turned.batch(50).map(stacked)


def digits(workers: int = 2) -> Graph:
    stream = batches(load_digits().images, load_digits().target, workers)
    stream.collect(name="epoch")
    return stream.graph


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a digit classifier on batches that a graph prepares.")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    images, labels = load_digits().images, load_digits().target
    test_images, test_labels = stacked(list(zip(images[1500:], labels[1500:], strict=True)))

    data = dataset(batches(images[:1500], labels[:1500], args.workers), seed=args.seed)
    torch.manual_seed(args.seed)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for epoch in range(1, args.epochs + 1):
        for x, y in data:
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        right = (model(test_images).argmax(1) == test_labels).float().mean()
        print(f"epoch {epoch}: loss {loss.item():.3f}, {100 * right:.1f} % of the unseen digits are right")


if __name__ == "__main__":
    main()
