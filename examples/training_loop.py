"""A training loop fed by a graph: handwritten digits, turned by chance in two processes while a model learns.

    python examples/training_loop.py [--epochs N] [--workers N] [--seed N]

The digits are those of scikit-learn. Each epoch is a run of the graph: others come first, and are turned
otherwise. The same seed gives the same epochs again, however many workers there are.
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

from flowchan import Graph, worker
from flowchan.pipelines import dataset

Sample = tuple[np.ndarray, int]


def shuffled(images: np.ndarray, labels: np.ndarray) -> Iterator[tuple[int, np.ndarray, int]]:
    """All digits in another order for each epoch, each with a number to draw by."""
    chance = random.Random(worker().seed)
    for place in chance.sample(range(len(images)), len(images)):
        yield chance.getrandbits(32), images[place], int(labels[place])


def augmented(item: tuple[int, np.ndarray, int]) -> Sample:
    """Turned by up to 15 degrees and moved by up to a pixel."""
    seed, image, label = item
    chance = np.random.default_rng(seed)
    angle, shift = np.radians(chance.uniform(-15, 15)), chance.uniform(-1, 1, 2)
    turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    middle = np.array([3.5, 3.5])
    return affine_transform(image, turn, middle - turn @ middle + shift, order=1), label


def stacked(samples: list[Sample]) -> tuple[torch.Tensor, torch.Tensor]:
    images, labels = zip(*samples, strict=True)
    return torch.from_numpy(np.stack(images)).float() / 16, torch.tensor(labels)


def main() -> None:
    parser = argparse.ArgumentParser(description="Learns digits from a graph.")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    digits = load_digits()
    images, labels = digits.images, digits.target
    test_images, test_labels = stacked(list(zip(images[1500:], labels[1500:], strict=True)))

    graph = Graph("digits")
    turned = graph.source(shuffled, images[:1500], labels[:1500]).map(
        augmented, on="process", workers=args.workers
    )
    data = dataset(turned.batch(50).map(stacked), seed=args.seed)

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
