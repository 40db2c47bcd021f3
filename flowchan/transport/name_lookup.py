"""Look up host names, with a time limit and in a way that interrupts can end."""

from __future__ import annotations

import contextlib
import errno
import queue
import socket
import threading

Resolved = tuple[int, int, int, str, tuple[str, int]]
"""An IP address of a host, as ``socket.getaddrinfo`` returns it."""


def resolve(host: str, port: int, requested: str, timeout: float | None = None) -> list[Resolved]:
    """Return the IP addresses of a host, in the order in which they should be tried.

    Args:
        host: Name or IP address of the host.
        port: Port, which is part of the result.
        requested: Text that the caller was given; it begins the error message.
        timeout: Seconds to wait (default: no limit).

    Returns:
        The addresses.

    Raises:
        OSError: The name can't be resolved in time. The errno is ``EADDRNOTAVAIL``.
    """
    with contextlib.suppress(OSError, UnicodeError):
        return _addresses(host, port, socket.AI_NUMERICHOST)
    found = _looked_up(host, port, timeout)
    if isinstance(found, list):
        return found
    of_it = "" if requested == host else f"{requested}: "
    raise OSError(errno.EADDRNOTAVAIL, f"{of_it}the host {host!r} can't be resolved ({found})")


def _looked_up(host: str, port: int, timeout: float | None) -> list[Resolved] | str:
    """Return the addresses of a name, or the reason why the lookup failed.

    The C library ignores signals during a lookup, which may take 10 s or more. A thread therefore makes the
    call. The thread is a daemon, so it does not delay the end of the program.
    """
    found: queue.SimpleQueue[list[Resolved] | str] = queue.SimpleQueue()

    def look_up() -> None:
        try:
            found.put(_addresses(host, port))
        except (OSError, UnicodeError) as error:
            found.put(str(getattr(error, "strerror", None) or error))

    threading.Thread(target=look_up, name=f"lookup of {host}", daemon=True).start()
    try:
        return found.get(timeout=timeout)
    except queue.Empty:
        return f"no answer within {timeout:.3g} s"


def _addresses(host: str, port: int, flags: int = 0) -> list[Resolved]:
    return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)  # type: ignore[return-value]
