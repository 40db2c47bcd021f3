"""An ``nn.Sequential`` whose parts work at the same time."""

from flowchan.pipelines.sequential.pipe import Sequential
from flowchan.pipelines.sequential.skip import Pop, Stash
from flowchan.pipelines.sequential.training import Training

__all__ = ["Pop", "Sequential", "Stash", "Training"]

# Messages, tracebacks and pickles name the place that users import from.
for _name in __all__:
    globals()[_name].__module__ = "flowchan.pipelines"
del _name
