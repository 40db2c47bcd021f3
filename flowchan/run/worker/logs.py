"""Forward log records from workers, local or remote, to the program.

The program's loggers handle these records like the program's own. The logging configuration of the program
therefore applies under every start method. Each record has the attributes ``stage``, ``number`` and ``host``
of the worker. ``processName`` contains the same information.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from flowchan.errors import Broken, Closed
from flowchan.run.policy.seeds import Worker

_PLAIN = (str, int, float, bool, type(None))


@dataclass(frozen=True, slots=True)
class Logged:
    """Log record on its way to the program, as a mapping of the record's attributes."""

    attributes: Mapping[str, Any]


def levels() -> dict[str, int]:
    """Return the levels that are set for loggers in this process, by the loggers' names.

    The root logger has the empty name.
    """
    own = {logger.name: logger.level for logger in _loggers() if logger.level}
    return {**own, "": logging.root.level}


def set_levels(levels: Mapping[str, int]) -> None:
    """Set the levels of loggers in this process, by name."""
    for name, level in levels.items():
        logging.getLogger(name or None).setLevel(level)


def _loggers() -> Iterator[logging.Logger]:
    known = list(logging.root.manager.loggerDict.values())
    return (logger for logger in known if isinstance(logger, logging.Logger))


class Sending(logging.Handler):
    """Log handler that sends a worker process's records to the program.

    The handler sends records during runs. In the process of a pool, it also sends records while the process
    is ending.
    """

    def __init__(self) -> None:
        super().__init__()
        self._worker_attributes: dict[str, Any] = {}
        self._put: Callable[[Logged], None] | None = None
        self._installed = False

    def begin(self, info: Worker, levels: Mapping[str, int], put: Callable[[Logged], None]) -> None:
        """Send records to ``put`` from now on, and adopt the program's ``levels``."""
        self._worker_attributes = {"stage": info.stage, "number": info.number, "host": info.host}
        self._put = put
        if not self._installed:
            self._take_over()
        set_levels(levels)

    def _take_over(self) -> None:
        """Remove the handlers and filters that came from a fork or from the re-imported main script.

        Otherwise, they would handle each record a second time.
        """
        for logger in [logging.root, *_loggers()]:
            logger.handlers.clear()
            logger.filters.clear()
            logger.propagate = True
        logging.root.addHandler(self)
        self._installed = True

    def rest(self) -> None:
        """Stop sending records until the next run, because the current run has ended."""
        self._put = None

    def end(self, put: Callable[[Logged], None]) -> None:
        """Send records to ``put`` until the process ends, because no run follows."""
        self._put = put

    def emit(self, record: logging.LogRecord) -> None:
        """Send a record. Like other log handlers, never raise an exception."""
        put = self._put
        try:
            if put is not None:
                put(Logged({**self._worker_attributes, **_plain(record)}))
        except (Closed, Broken):
            pass  # the run has ended
        except Exception:
            self.handleError(record)


def _plain(record: logging.LogRecord) -> dict[str, Any]:
    """Return the attributes of a record that any process can unpickle, with message and traceback as text."""
    found = {name: value for name, value in vars(record).items() if isinstance(value, _PLAIN)}
    if record.exc_info and not record.exc_text:
        found["exc_text"] = logging.Formatter().formatException(record.exc_info)
    return {**found, "msg": record.getMessage(), "args": None, "exc_info": None}


def log_locally(logged: Logged) -> None:
    """Let the program's loggers handle a worker's record.

    This function never raises. If a filter raises, ``logging`` reports the error like a handler's error.
    """
    record = logging.makeLogRecord(dict(logged.attributes))
    if host := vars(record).get("host"):
        record.processName = f"{record.processName} on {host}"
    logger = logging.getLogger(record.name)
    try:
        if logger.isEnabledFor(record.levelno):
            logger.handle(record)
    except Exception:
        logging.Handler().handleError(record)
