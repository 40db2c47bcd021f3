"""What workers on hosts log. Their records go to the program, whose loggers handle them as their own: there
is one configuration, that of the program. ``processName`` says graph, stage and number, as for a worker
process here, and the host."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

from flowchan.errors import Broken, Closed
from flowchan.hosts.messages import Logged

_PLAIN = (str, int, float, bool, type(None))


def send_logs(level: int, put: Callable[[Logged], None]) -> None:
    """In the agent: from now on ``put`` gets what its workers log, which are forked from it, from ``level``
    on."""
    root = logging.getLogger()
    root.setLevel(level)
    root.addHandler(_Sending(put))


class _Sending(logging.Handler):
    def __init__(self, put: Callable[[Logged], None]) -> None:
        super().__init__()
        self._put = put
        self._agent = os.getpid()

    def emit(self, record: logging.LogRecord) -> None:
        """Never raises, as of any handler."""
        if os.getpid() == self._agent:
            return
        try:
            self._put(Logged(_plain(record)))
        except (Closed, Broken):
            pass  # the run is over
        except Exception:
            self.handleError(record)


def _plain(record: logging.LogRecord) -> dict[str, Any]:
    """The record as it can be sent: with its message and its traceback as text, and without what else is not
    plain."""
    found = {name: value for name, value in vars(record).items() if isinstance(value, _PLAIN)}
    if record.exc_info and not record.exc_text:
        found["exc_text"] = logging.Formatter().formatException(record.exc_info)
    return {**found, "msg": record.getMessage(), "args": None, "exc_info": None}


def log_here(logged: Logged, host: str) -> None:
    """In the program: does with it what is done with records of this process."""
    attributes = {**logged.attributes, "host": host}
    attributes["processName"] = f"{attributes.get('processName')} on {host}"
    record = logging.makeLogRecord(attributes)
    logger = logging.getLogger(record.name)
    if logger.isEnabledFor(record.levelno):
        logger.handle(record)
