"""Measure epochs of decoded pictures from a graph and from torch's DataLoader, with two workers each."""

from __future__ import annotations

import io
import time
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from benchmarks.harness import Effort, Report, at_least, throughput
from flowchan import Graph
from flowchan.pipelines import dataset

ISOLATES = (
    "Pictures per second over one epoch, including its start and end. JPEG pictures of 320 × 240 pixels are "
    "decoded, halved in size and collected into batches of 32 float tensors. Both systems decode in two "
    "processes, which they fork for each epoch. The training loop only reads the shape of each batch."
)
WORKERS, BATCH = 2, 32


def picture() -> bytes:
    """Return a JPEG file that shows a wave pattern."""
    waves = np.sin(np.arange(240)[:, None, None] / 20 + np.arange(320)[None, :, None] / 30 + np.arange(3))
    out = io.BytesIO()
    Image.fromarray((127 * waves + 128).astype("uint8")).save(out, "JPEG", quality=90)
    return out.getvalue()


PICTURE = picture()


def decoded(_: int) -> torch.Tensor:
    with Image.open(io.BytesIO(PICTURE)) as image:
        small = np.asarray(image.convert("RGB").resize((160, 120)))
    return torch.from_numpy(small.transpose(2, 0, 1).astype("float32")) / 255


class Pictures(Dataset[torch.Tensor]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        return decoded(index)


def measure(effort: Effort) -> Report:
    report = Report()
    torch.set_num_threads(1)
    moves: dict[str, Any] = {"flowchan": _graph, "torch DataLoader": _loader}
    cases = [throughput(name, move, effort) for name, move in moves.items()]
    mine, loader = report.interleave("epoch of decoded pictures, 2 processes", cases, effort.rounds)
    report.rows.append(at_least(1, mine, loader))
    return report


def _graph(count: int) -> float:
    graph = Graph("pictures")
    samples = graph.source(range(count)).batch(BATCH).map(_batch, on="process", workers=WORKERS)
    return _epoch(dataset(samples), count)


def _batch(indices: list[int]) -> torch.Tensor:
    return torch.stack([decoded(index) for index in indices])


def _loader(count: int) -> float:
    return _epoch(DataLoader(Pictures(count), batch_size=BATCH, num_workers=WORKERS), count)


def _epoch(data: Any, count: int) -> float:
    began = time.perf_counter()
    seen = sum(len(batch) for batch in data)
    took = time.perf_counter() - began
    assert seen == count
    return took
