"""Train two replicas of a network together, each split into two parts.

    python examples/replicas.py [--replicas N] [--epochs N]
    flowchan run examples/replicas.py [-- REPLICAS EPOCHS]
    flowchan viz examples/replicas.py -o replicas.svg

A single graph contains the data pipeline, both replicas, and an allreduce over their losses. Two processes
add noise to batches of scikit-learn's digits. Each batch goes to the next free replica.

The replicas are a gang: each one is a process and a member of a group. The group averages their gradients, so
the replicas stay bit-identical even if one gets a batch more than the other. The graph's allreduce averages
the losses of each step. When the source ends, or after Ctrl-C, the run finishes all batches in flight and
ends. The example needs torch and scikit-learn.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from flowchan import Graph, In, Out, Reduced
from flowchan.collective import Group
from flowchan.collective.training.gradients import AllReduceSGD, check_equal, synchronize
from flowchan.pipelines import Sequential

BATCH, HELD_OUT = 32, 400
Batch = tuple[Tensor, Tensor]
State = dict[str, Tensor]


def digits() -> Batch:
    """Return 1,797 shuffled images of 8 × 8 pixels, with values from 0 to 1, and their labels."""
    from sklearn.datasets import load_digits

    data = load_digits()
    order = torch.randperm(len(data.images), generator=torch.Generator().manual_seed(0))
    return torch.tensor(data.images, dtype=torch.float32)[order, None] / 16, torch.tensor(data.target)[order]


def batches(epochs: int) -> Iterator[Batch]:
    images, labels = digits()
    for _ in range(epochs):
        order = torch.randperm(len(images) - HELD_OUT) + HELD_OUT
        for places in order.split(BATCH):
            yield images[places], labels[places]


def noisy(batch: Batch) -> Batch:
    """Add noise, so that the network never sees the same image twice."""
    images, labels = batch
    return images + 0.1 * torch.randn(images.shape), labels


def network() -> nn.Sequential:
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10)),
    )


def train(batches: In[Batch], group: Group, losses: Out[float], trained: Out[State]) -> None:
    """Train one replica in two parts that run at the same time."""
    torch.set_num_threads(1)
    with Sequential(network(), parts=[3, 7], chunks=2) as replica:
        synchronize(replica, group)
        optimizer = torch.optim.Adam(replica.parameters(), lr=5e-3)
        together = AllReduceSGD(replica, optimizer, group)
        for images, labels in batches:
            optimizer.zero_grad()
            loss = cross_entropy(replica(images), labels)
            loss.backward()
            together.step()
            losses.put(loss.item())
        together.join()
        check_equal(replica, group)
        if group.rank == 0:
            trained.put(replica.state_dict())


def show(step: Reduced) -> None:
    if step.round % 20 == 0:
        print(f"step {step.round}: loss {step.value:.3f}, the mean of {step.contributors} replicas")


def score(state: State) -> None:
    model = network()
    model.load_state_dict(state)
    images, labels = digits()
    with torch.no_grad():
        right = (model(images[:HELD_OUT]).argmax(1) == labels[:HELD_OUT]).double().mean().item()
    print(f"{right:.1%} of the digits that were held out")


def replicas(count: int = 2, epochs: int = 6) -> Graph:
    graph = Graph("replicas")
    read = graph.source(batches, int(epochs), capacity=8)
    prepared = read.map(noisy, on="process", workers=2, capacity=8)
    losses, trained = graph.stage(train, prepared, on="process", workers=int(count))
    losses.allreduce("mean").sink(show)
    trained.sink(score)
    return graph


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Train several replicas of a network on digits, in one graph."
    )
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=6)
    arguments = parser.parse_args()
    replicas(arguments.replicas, arguments.epochs).run(seed=0)


if __name__ == "__main__":
    main()
