"""Run an ``nn.Sequential`` with pipeline parallelism."""

from flowchan.pipelines.sequential.pipe import Sequential
from flowchan.pipelines.sequential.skip import Pop, Stash
from flowchan.pipelines.sequential.training import Training

__all__ = ["Pop", "Sequential", "Stash", "Training"]

# Make error messages, tracebacks and pickles show the module that users import.
for _name in __all__:
    globals()[_name].__module__ = "flowchan.pipelines"
del _name
