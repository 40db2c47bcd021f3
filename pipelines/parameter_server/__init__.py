"""Share tensors between many workers, through parameter servers and published model weights."""

from flowchan.pipelines.parameter_server.encoded import gathered
from flowchan.pipelines.parameter_server.parameter_client import ParameterClient, PullHandle
from flowchan.pipelines.parameter_server.parameter_server import ParameterServer, ParameterServerStats
from flowchan.pipelines.parameter_server.rows import RowOptimizer
from flowchan.pipelines.parameter_server.server_connection import PushHandle
from flowchan.pipelines.parameter_server.weights import Weights, WeightsReader, WeightsStats

__all__ = [
    "ParameterClient",
    "ParameterServer",
    "ParameterServerStats",
    "PullHandle",
    "PushHandle",
    "RowOptimizer",
    "Weights",
    "WeightsReader",
    "WeightsStats",
    "gathered",
]
