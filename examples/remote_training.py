"""Train a network whose two halves are on different nodes.

    python examples/remote_training.py [--epochs N] [--device cpu|cuda]
    flowchan viz examples/remote_training.py -o nodes.svg

Each node is a process. The program runs an ordinary training loop for scikit-learn's digits, and each layer
runs on the node that has the layer's parameters. Hidden activations move directly from node to node. At the
end, the program prints where each layer ran. It also trains the same network locally, and checks that the
parameters are equal. The example needs torch and scikit-learn.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from flowchan.pipelines import RemoteNodes

BATCH, HELD_OUT, RATE = 64, 400, 0.1
Batch = tuple[Tensor, Tensor]


def digits() -> Batch:
    """Return 1,797 shuffled images of 8 × 8 pixels, with values from 0 to 1, and their labels."""
    from sklearn.datasets import load_digits

    data = load_digits()
    order = torch.randperm(len(data.images), generator=torch.Generator().manual_seed(0))
    return torch.tensor(data.data, dtype=torch.float32)[order] / 16, torch.tensor(data.target)[order]


def batches(images: Tensor, labels: Tensor, epochs: int) -> Iterator[Iterator[Batch]]:
    """Yield the batches of each epoch, in the same order for every caller."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(epochs):
        order = torch.randperm(len(images), generator=generator)
        yield ((images[places], labels[places]) for places in order.split(BATCH))


class Network(nn.Module):
    """A network in two halves, which may be on different devices."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU())
        self.second = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x.to(self.first[0].weight.device))
        return self.second(hidden.to(self.second[0].weight.device))


def note_devices(network: nn.Module) -> dict[str, set[torch.device]]:
    """Record on which devices each layer runs from now on, and return the record."""
    ran: dict[str, set[torch.device]] = {}

    def note(name: str, output: Tensor) -> None:
        ran.setdefault(name, set()).add(output.device)

    def listen(name: str, layer: nn.Module) -> None:
        layer.register_forward_hook(lambda _layer, _inputs, output: note(f"{name} {layer}", output))

    for name, layer in network.named_modules():
        if not list(layer.children()):
            listen(name, layer)
    return ran


def train(network: Network, epochs: int, images: Tensor, labels: Tensor) -> None:
    optimizer = torch.optim.SGD(network.parameters(), lr=RATE, momentum=0.9)
    last = network.second[0].weight.device
    for epoch, data in enumerate(batches(images, labels, epochs), 1):
        for x, target in data:
            optimizer.zero_grad()
            loss = cross_entropy(network(x), target.to(last))
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch}: loss {loss.item():.3f}")  # only this line waits for the nodes


def nodes(device: Any = "cpu") -> RemoteNodes:
    return RemoteNodes(2, device=device)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a network on two nodes.")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--device", default="cpu", help="device of each node, such as cuda")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    images, labels = digits()
    local, data = Network(), (arguments.epochs, images[HELD_OUT:], labels[HELD_OUT:])
    network = copy.deepcopy(local)

    with nodes(arguments.device) as started:
        network.first.to(started[0])
        network.second.to(started[1])
        ran = note_devices(network)
        train(network, *data)
        with torch.no_grad():
            right = (network(images[:HELD_OUT]).argmax(1).cpu() == labels[:HELD_OUT]).double().mean().item()
        for layer, devices in ran.items():
            print(f"{layer} ran on {', '.join(map(str, devices))}")
        for number, node in enumerate(started.stats()):
            print(f"node {number}: {node.commands} commands, {node.waits} waits")
        trained = {name: value.cpu() for name, value in network.state_dict().items()}
    print(f"{right:.1%} of the held-out digits are correct")

    train(local, *data)
    if arguments.device == "cpu":
        assert all(value.equal(trained[name]) for name, value in local.state_dict().items())
        print("the parameters are equal to those of local training")


if __name__ == "__main__":
    main()
