"""Run an ``nn.Sequential`` with pipeline parallelism."""

from flowchan.pipelines.sequential.pipe import Sequential
from flowchan.pipelines.sequential.skip import Pop, Stash
from flowchan.pipelines.sequential.training import Training

__all__ = ["Pop", "Sequential", "Stash", "Training"]
