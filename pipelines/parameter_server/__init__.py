"""Parameter servers: tensors that many workers push to and pull from."""

from flowchan.pipelines.parameter_server.encoded import gathered
from flowchan.pipelines.parameter_server.parameter_client import ParameterClient, PullHandle
from flowchan.pipelines.parameter_server.parameter_server import ParameterServer, ParameterServerStats
from flowchan.pipelines.parameter_server.rows import RowOptimizer
from flowchan.pipelines.parameter_server.server_connection import PushHandle

__all__ = [
    "ParameterClient",
    "ParameterServer",
    "ParameterServerStats",
    "PullHandle",
    "PushHandle",
    "RowOptimizer",
    "gathered",
]

for _name in __all__:
    globals()[_name].__module__ = "flowchan.pipelines"
del _name
