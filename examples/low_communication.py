"""Train networks on handwritten digits with four low-communication algorithms over a parameter server.

    python examples/low_communication.py [--workers N] [--steps N] [--curves FILE] [ALGORITHM …]
    flowchan run examples/low_communication.py [-- ALGORITHM WORKERS STEPS]
    flowchan viz examples/low_communication.py -o low_communication.svg

In each graph, a source distributes batches of scikit-learn's digits to worker processes. Each worker trains
its own network and exchanges parameters with the server, which is a stage of the graph. Another stage
regularly pulls the server's parameters and tests them on held-out digits. With ``--curves``, the program
plots the error rates of these tests and of plain SGD in one process. The example needs torch and
scikit-learn.
"""

from __future__ import annotations

import argparse
import functools
import math
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from flowchan import Graph, In, Out, Stream
from flowchan.pipelines import AsySGInCon, DiLoCo, Downpour, ElasticAveraging, ParameterServer

BATCH, HELD_OUT, LR = 32, 400, 0.1
MEASURE_EVERY = 5  # steps per worker between two tests
Batch = tuple[Tensor, Tensor]
Curve = list[tuple[int, float]]
"""Pairs of the number of steps per worker and the error rate."""

ALGORITHMS = ("Downpour", "ElasticAveraging", "DiLoCo", "AsySGInCon")


@functools.cache
def digits() -> Batch:
    """Return 1,797 shuffled images of 8 × 8 pixels, with values from 0 to 1, and their labels."""
    from sklearn.datasets import load_digits

    data = load_digits()
    order = torch.randperm(len(data.images), generator=torch.Generator().manual_seed(0))
    return torch.tensor(data.data, dtype=torch.float32)[order] / 16, torch.tensor(data.target)[order]


def batches(count: int) -> Iterator[Batch]:
    images, labels = digits()
    numbers = torch.Generator().manual_seed(1)
    for _ in range(count):
        places = torch.randint(HELD_OUT, len(images), (BATCH,), generator=numbers)
        yield images[places], labels[places]


def network() -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def error(model: nn.Module) -> float:
    """Return the fraction of held-out digits that a network misclassifies."""
    images, labels = digits()
    with torch.no_grad():
        return (model(images[:HELD_OUT]).argmax(1) != labels[:HELD_OUT]).double().mean().item()


def server_for(algorithm: str, workers: int, graph: Graph) -> ParameterServer:
    if algorithm == "DiLoCo":
        return ParameterServer(DiLoCo.tensors(network()), graph=graph)
    if algorithm == "AsySGInCon":
        # One step sums the gradients of all workers, so divide the learning rate by the number of workers.
        sgd = AsySGInCon.optimizer(lambda p: torch.optim.SGD(p, lr=LR / workers), gradients=workers)
        return ParameterServer(network().state_dict(), optimizer=sgd, graph=graph)
    return ParameterServer(network().state_dict(), graph=graph)


def started(algorithm: str, client: Any, model: nn.Module, workers: int) -> tuple[Any, Any]:
    """Return the algorithm of one worker, and the worker's own optimizer or None."""
    if algorithm == "Downpour":
        return Downpour(client, model, lr=LR / workers, push_every=5, pull_every=5), None
    if algorithm == "AsySGInCon":
        return AsySGInCon(client, model), None
    if algorithm == "ElasticAveraging":
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        return ElasticAveraging(client, model, every=10, alpha=0.9 / workers), optimizer
    adam = torch.optim.AdamW(model.parameters(), lr=3e-3)
    return DiLoCo(client, model, every=20, workers=workers, quorum=1, grace=5), adam


def training(algorithm: str, workers: int, steps: int) -> tuple[Graph, Stream[tuple[int, float]]]:
    """Return the graph that trains with one algorithm, and the stream of its error rates."""
    graph = Graph(algorithm)
    server = server_for(algorithm, workers, graph)
    client, watching = server.client(), server.client()

    def train(given: In[Batch], done: Out[int]) -> None:
        torch.set_num_threads(1)
        model = network()
        algorithm_of_worker, optimizer = started(algorithm, client, model, workers)
        for images, labels in given:
            model.zero_grad()
            cross_entropy(model(images), labels).backward()
            if optimizer is not None:
                optimizer.step()
            algorithm_of_worker.step()
            done.put(1)
        algorithm_of_worker.finish()

    def test(done: In[int], curve: Out[tuple[int, float]]) -> None:
        model, count = network(), 0
        names = [name for name, _ in model.named_parameters()]
        for _ in done:
            if count % (MEASURE_EVERY * workers) == 0:
                model.load_state_dict(watching.pull(names=names))
                curve.put((count // workers, error(model)))
            count += 1
        model.load_state_dict(watching.pull(names=names))
        curve.put((count // workers, error(model)))

    read = graph.source(batches, steps * workers, capacity=workers)
    done = graph.stage(train, read, on="process", workers=workers)
    return graph, graph.stage(test, done)


def show(point: tuple[int, float]) -> None:
    print(f"step {point[0]}: {point[1]:.1%} of the held-out digits are misclassified")


def graph(algorithm: str = "DiLoCo", workers: int = 4, steps: int = 200) -> Graph:
    found, curve = training(algorithm, int(workers), int(steps))
    curve.sink(show)
    return found


def plain_sgd(steps: int) -> Curve:
    """Train one network in this process, without a server."""
    model, curve = network(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for step, (images, labels) in enumerate(batches(steps)):
        if step % MEASURE_EVERY == 0:
            curve.append((step, error(model)))
        optimizer.zero_grad()
        cross_entropy(model(images), labels).backward()
        optimizer.step()
    return [*curve, (steps, error(model))]


COLOURS = ("#5b6570", "#2e6cb8", "#8064aa", "#c53030", "#2f855a")
WIDTH, HEIGHT, LEFT, TOP = 640, 300, 70, 50


def drawing(curves: dict[str, Curve], title: str) -> str:
    """Return an SVG plot of the curves, with a logarithmic error axis."""
    most = max(step for curve in curves.values() for step, _ in curve) or 1

    def x(step: float) -> float:
        return LEFT + WIDTH * step / most

    def y(share: float) -> float:
        return TOP - HEIGHT * math.log10(max(share, 0.01)) / 2  # the axis covers 1 % to 100 %

    parts = [text(LEFT, 24, title, "start", 'font-size="16" font-weight="bold"')]
    for share in (1, 0.5, 0.2, 0.1, 0.05, 0.02, 0.01):
        parts += [
            line(LEFT, y(share), LEFT + WIDTH, y(share)),
            text(LEFT - 8, y(share) + 4, f"{share:.0%}", "end"),
        ]
    for step in (most * part // 4 for part in range(5)):
        parts += [
            line(x(step), TOP, x(step), TOP + HEIGHT),
            text(x(step), TOP + HEIGHT + 18, str(step), "middle"),
        ]
    parts.append(text(LEFT + WIDTH / 2, TOP + HEIGHT + 40, "steps per worker", "middle"))
    for number, (name, curve) in enumerate(curves.items()):
        colour = COLOURS[number % len(COLOURS)]
        points = " ".join(f"{x(step):.1f},{y(share):.1f}" for step, share in curve)
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(text(LEFT + WIDTH - 8, TOP + 18 + 18 * number, name, "end", f'fill="{colour}"'))
    width, height = LEFT + WIDTH + 30, TOP + HEIGHT + 60
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" font-family="Helvetica, Arial, sans-serif" font-size="12" fill="#22272e">'
    )
    return "\n".join(
        [head, f'<rect width="{width}" height="{height}" fill="#ffffff"/>', *parts, "</svg>", ""]
    )


def line(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="#d9dee4"/>'


def text(x: float, y: float, content: str, anchor: str, style: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {style}>{escape(content)}</text>'


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description="Train on handwritten digits with low-communication algorithms."
    )
    parser.add_argument("algorithms", nargs="*", metavar="ALGORITHM", help=", ".join(ALGORITHMS))
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=200, help="number of steps per worker")
    parser.add_argument("--curves", type=Path, help="SVG file for a plot of the error rates")
    arguments = parser.parse_args(words)
    curves = {"plain SGD, one process": plain_sgd(arguments.steps)}
    for algorithm in arguments.algorithms or ALGORITHMS:
        declared, curve = training(algorithm, arguments.workers, arguments.steps)
        points = curve.collect()
        curves[algorithm] = list(declared.run(seed=0)[points])
    for name, curve in curves.items():
        step, share = curve[-1]
        print(f"{name}: {share:.1%} of the held-out digits are misclassified after {step} steps")
    if arguments.curves:
        title = f"Error rates on held-out digits, with {arguments.workers} workers"
        arguments.curves.write_text(drawing(curves, title))
        print(f"wrote the curves to {arguments.curves}")


if __name__ == "__main__":
    main()
