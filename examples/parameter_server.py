"""Train a network with a parameter server while a second graph makes predictions with the newest weights.

    python examples/parameter_server.py [--trainers N] [--epochs N]
    flowchan viz examples/parameter_server.py -o parameter_server.svg

Each trainer is a process. For each batch of scikit-learn's digits, the trainer pulls the newest parameters
from the server, computes gradients, and pushes them to the server. The trainers do not wait for each other.

Every 40 batches, the program publishes the parameters as weights. A second graph then classifies the held-out
images. The workers of this graph refresh their models without stopping the training. Halfway through the
training, the program kills a trainer, and a new one replaces it. The example needs torch and scikit-learn.
"""

from __future__ import annotations

import argparse
import os
import signal
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from flowchan import Graph, Input, Stream
from flowchan.pipelines import ParameterClient, ParameterServer, Weights, WeightsReader

BATCH, HELD_OUT, EVERY, RATE = 32, 400, 40, 0.1
Batch = tuple[Tensor, Tensor]


def digits() -> Batch:
    """Return 1,797 shuffled images of 8 × 8 pixels, with values from 0 to 1, and their labels."""
    from sklearn.datasets import load_digits

    data = load_digits()
    order = torch.randperm(len(data.images), generator=torch.Generator().manual_seed(0))
    return torch.tensor(data.images, dtype=torch.float32)[order] / 16, torch.tensor(data.target)[order]


def batches(epochs: int) -> Iterator[Batch]:
    images, labels = digits()
    for _ in range(epochs):
        order = torch.randperm(len(images) - HELD_OUT) + HELD_OUT
        for places in order.split(BATCH):
            yield images[places], labels[places]


def network() -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


class Trainer:
    """Model of one trainer. A call pulls the parameters and trains on one batch."""

    def __init__(self, client: ParameterClient) -> None:
        torch.set_num_threads(1)
        self.client, self.model = client, network()

    def __call__(self, batch: Batch) -> tuple[float, int]:
        images, labels = batch
        self.client.pull(out=self.model)
        self.model.zero_grad()
        loss = cross_entropy(self.model(images), labels)
        loss.backward()
        gradients = {name: parameter.grad for name, parameter in self.model.named_parameters()}
        self.client.push(gradients, rule="add", scale=-RATE).wait()
        return loss.item(), os.getpid()


class Answers:
    """Model of one inference worker. A call classifies images with the newest weights."""

    def __init__(self, reader: WeightsReader) -> None:
        torch.set_num_threads(1)
        self.reader, self.model = reader, network()

    def __call__(self, images: Tensor) -> tuple[Tensor, int]:
        self.reader.refresh(self.model)
        with torch.no_grad():
            return self.model(images).argmax(1), self.reader.version


def training(trainers: int = 2, epochs: int = 8) -> tuple[Stream[tuple[float, int]], ParameterServer]:
    graph = Graph("training")
    server = ParameterServer(network().state_dict(), graph=graph)
    read = graph.source(batches, epochs, capacity=8)
    model = partial(Trainer, server.client())
    return read.map(model, on="process", workers=trainers, name="train").collect(), server


def inference(weights: Weights) -> tuple[Input[Tensor], Stream[tuple[Tensor, int]]]:
    questions: Input[Tensor] = Graph("inference").input("questions")
    model = partial(Answers, weights.reader())
    return questions, questions.map(model, on="process", workers=2, name="answer").collect()


def parameter_server() -> Graph:
    return training()[0].graph


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Train on digits with a parameter server, and classify held-out images."
    )
    parser.add_argument("--trainers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=8)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    losses, server = training(arguments.trainers, arguments.epochs)
    images, labels = digits()
    model, client = network(), server.client()
    half = arguments.epochs * -(-(len(images) - HELD_OUT) // BATCH) // 2

    with Weights(model) as weights:
        questions, answers = inference(weights)
        with questions.graph.start() as answering, losses.graph.start(seed=0) as run:
            answered = answering.iter(answers)
            for number, (loss, pid) in enumerate(run.iter(losses), 1):
                if number == half:
                    os.kill(pid, signal.SIGKILL)
                    print("a trainer was killed")
                if number % EVERY == 0:
                    client.pull(out=model)
                    weights.publish(step=client.version)
                    answering[questions].put(images[:HELD_OUT])
                    found, version = next(answered)
                    right = (found == labels[:HELD_OUT]).double().mean().item()
                    print(f"loss {loss:.3f}, weights {version}: {right:.1%} of held-out digits are correct")
    stats = server.stats()
    print(f"{stats.pushes} pushes, at most {stats.max_staleness} versions late")


if __name__ == "__main__":
    main()
