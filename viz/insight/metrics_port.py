"""Open a port that serves a run's metrics to Prometheus.

The port is bound before the run starts. If the port is in use, the call therefore fails before anything has
started. The server thread starts after the workers have been forked. Each forked worker closes its copy of
the socket.
"""

from __future__ import annotations

from collections.abc import Callable

from flowchan.items.text import shown
from flowchan.run.policy.stats import RunStats
from flowchan.viz.insight.metrics import KIND, PrometheusMetrics
from flowchan.viz.insight.server import LOOPBACK, HttpReply, LocalServer, Route

PATH = "metrics"
MOST_PORT = 65535


class MetricsPort:
    """Metrics port of one run.

    Args:
        metrics: The argument ``metrics`` of ``graph.start()``.

    Raises:
        TypeError: The argument has the wrong type.
        ValueError: The argument is not a port.
        OSError: The port is in use, or the address does not belong to this machine.
    """

    def __init__(self, metrics: int | str) -> None:
        host, port = host_and_port(metrics)
        self._routes: dict[str, Route] = {}
        try:
            self._server = LocalServer(
                "flowchan metrics", self._routes, port=port, with_token=False, host=host, start=False
            )
        except OSError as error:
            raise OSError(
                error.errno,
                f"run: metrics must be a free port on this machine, got {shown(metrics)}: {error.strerror}; "
                "choose another port, or 0 for any free port",
            ) from None

    @property
    def address(self) -> str:
        """Return the URL of the metrics."""
        return self._server.address + PATH

    def serve(self, stats: Callable[[], RunStats]) -> None:
        """Start answering requests with the run's current statistics."""
        self._routes[PATH] = metrics_route(stats)
        self._server.start()

    def close(self) -> None:
        """Close the port."""
        self._server.close()


def metrics_route(stats: Callable[[], RunStats]) -> Route:
    """Return a server route that replies with the metrics of a run."""
    metrics = PrometheusMetrics(stats)
    return lambda _: HttpReply(metrics.text().encode(errors="backslashreplace"), KIND)


def host_and_port(metrics: int | str) -> tuple[str, int]:
    """Return the host and the port that the argument ``metrics`` specifies."""
    if isinstance(metrics, bool) or not isinstance(metrics, int | str):
        raise TypeError(f'run: metrics must be a port or "HOST:PORT", got {shown(metrics)}')
    host, colon, port = metrics.rpartition(":") if isinstance(metrics, str) else (LOOPBACK, ":", str(metrics))
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not (host and colon and port.isascii() and port.isdigit() and int(port) <= MOST_PORT):
        raise ValueError(
            f'run: metrics must be a port from 0 to {MOST_PORT} or "HOST:PORT", got {shown(metrics)}'
        )
    return host, int(port)
