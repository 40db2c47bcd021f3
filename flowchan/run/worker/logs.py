"""What worker processes log, on this machine and on hosts. Their records go to the program, whose loggers
handle them as their own: there is one configuration, that of the program, under every start method.

Such a record has the attributes ``stage``, ``number`` and ``host`` of its worker, and ``processName`` says
the same in words."""

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
    """A worker has logged something: the attributes of the record."""

    attributes: Mapping[str, Any]


def levels() -> dict[str, int]:
    """From which level on loggers of this process want records, by name, of those that have a level of their
    own; the root's name is empty."""
    own = {logger.name: logger.level for logger in _loggers() if logger.level}
    return {**own, "": logging.root.level}


def set_levels(levels: Mapping[str, int]) -> None:
    """Gives loggers of this process the levels that another's have."""
    for name, level in levels.items():
        logging.getLogger(name or None).setLevel(level)


def _loggers() -> Iterator[logging.Logger]:
    known = list(logging.root.manager.loggerDict.values())
    return (logger for logger in known if isinstance(logger, logging.Logger))


class Sending(logging.Handler):
    """In a worker's process: sends what is logged here to the program, while there is a run, and at the end
    of a process that lasts over runs."""

    def __init__(self) -> None:
        super().__init__()
        self._here: dict[str, Any] = {}
        self._put: Callable[[Logged], None] | None = None
        self._alone = False

    def begin(self, here: Worker, levels: Mapping[str, int], put: Callable[[Logged], None]) -> None:
        """From now on ``put`` gets what is logged, from the program's ``levels`` on."""
        self._here = {"stage": here.stage, "number": here.number, "host": here.host}
        self._put = put
        if not self._alone:
            self._take_over()
        set_levels(levels)

    def _take_over(self) -> None:
        """What a fork has copied of the program's handlers and filters, or a main script has set up that was
        imported once more, goes: else a record would be handled twice."""
        for logger in [logging.root, *_loggers()]:
            logger.handlers.clear()
            logger.filters.clear()
            logger.propagate = True
        logging.root.addHandler(self)
        self._alone = True

    def rest(self) -> None:
        """The run is over."""
        self._put = None

    def end(self, put: Callable[[Logged], None]) -> None:
        """No other run follows. ``put`` gets what is logged until the process has ended."""
        self._put = put

    def emit(self, record: logging.LogRecord) -> None:
        """Never raises, as of any handler."""
        put = self._put
        try:
            if put is not None:
                put(Logged({**self._here, **_plain(record)}))
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


def log_here(logged: Logged) -> None:
    """In the program: does with it what is done with records of this process. Never raises: what a filter of
    the program's raises is shown as what a handler raises."""
    record = logging.makeLogRecord(dict(logged.attributes))
    if host := vars(record).get("host"):
        record.processName = f"{record.processName} on {host}"
    logger = logging.getLogger(record.name)
    try:
        if logger.isEnabledFor(record.levelno):
            logger.handle(record)
    except Exception:
        logging.Handler().handleError(record)
