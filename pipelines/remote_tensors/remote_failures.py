"""Handle failures of remote operations: nodes store them, and clients raise them."""

from __future__ import annotations

import pickle
import sys
import traceback
from types import CodeType, FrameType
from typing import Any, NamedTuple

from flowchan.pipelines.remote_tensors.remote_errors import RemoteError

SITES = 1 << 16
"""Number of recent commands for which the client remembers the line in the program."""
_MASK = SITES - 1


class RemoteFailure(NamedTuple):
    """Root cause of a failed command.

    A node stores this object instead of each tensor that depends on the command.

    Attributes:
        node: Number of the node in its ``RemoteNodes``.
        client: Client that issued the command.
        number: Number of the command.
        operation: Name of the operator.
        error: Pickled exception.
        text: The node's traceback.
        died: True if the node has died; ``error`` then contains a ``NodeDied``.
    """

    node: int
    client: str
    number: int
    operation: str
    error: bytes
    text: str
    died: bool = False

    @classmethod
    def of(cls, node: int, client: str, number: int, operation: str, error: BaseException) -> RemoteFailure:
        """Describe an exception that a command raised."""
        text = "".join(traceback.format_exception(error))
        try:
            data = pickle.dumps(error)
            pickle.loads(data)
        except BaseException:
            data = pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}"))
        return cls(node, client, number, operation, data, text)

    def raised(self, site: str) -> RemoteError:
        """Return the exception to raise in the program."""
        try:
            cause = pickle.loads(self.error)
        except Exception:  # this process cannot import the exception's class
            cause = RuntimeError(self.text.rstrip().rpartition("\n")[2])
        if self.died and isinstance(cause, RemoteError):
            return cause
        text = (
            f"{self.operation} on node {self.node}: {type(cause).__name__}: {cause}\n"
            f"issued at {site}\n\nTraceback on the node:\n{self.text}"
        )
        error = RemoteError(text, operation=self.operation, node=self.node)
        error.__cause__ = cause
        return error


class CallSites:
    """Record the lines that issued the most recent commands, as code objects and instruction offsets."""

    def __init__(self) -> None:
        self.codes: list[CodeType | None] = [None] * SITES
        self.offsets = [0] * SITES
        self.numbers = [0] * SITES

    def note(self, number: int, frame: FrameType | None) -> None:
        """Record the program's innermost frame as the origin of a command.

        Args:
            number: Number of the command.
            frame: The innermost frame that may be the program's.
        """
        while frame is not None and id(frame.f_code) not in program_codes and is_library_code(frame.f_code):
            frame = frame.f_back
        place = number & _MASK
        self.numbers[place] = number
        if frame is None:
            self.codes[place] = None
        else:
            self.codes[place] = frame.f_code
            self.offsets[place] = frame.f_lasti

    def line_of(self, number: int) -> str:
        """Return the file, line and function that issued a command."""
        place = number % SITES
        code = self.codes[place]
        if self.numbers[place] != number:
            return f"an unknown line (more than {SITES} commands ago)"
        if code is None:
            return "a thread without Python frames (a backward pass)"
        offset, line = self.offsets[place], code.co_firstlineno
        for start, end, found in code.co_lines():
            if start <= offset < end and found is not None:
                line = found
        return f"{code.co_filename}:{line} in {code.co_qualname}"


program_codes: dict[int, CodeType] = {}
"""Code objects of the program, keyed by identity, because hashing a code object reads all its
instructions."""
_library_codes: dict[int, CodeType] = {}
"""Code objects of torch and of this package, keyed by identity."""


def is_library_code(code: CodeType) -> bool:
    """Return whether the code belongs to torch or to this package."""
    if id(code) in _library_codes:
        return True
    library = code.co_filename.startswith(_LIBRARIES)
    (_library_codes if library else program_codes)[id(code)] = code
    return library


def users_line() -> tuple[CodeType, int]:
    """Return the innermost code and line of this thread outside torch and this package."""
    frame: FrameType | None = sys._getframe(1)
    last = sys._getframe(1)
    while frame is not None:
        last = frame
        if not is_library_code(frame.f_code):
            break
        frame = frame.f_back
    return last.f_code, last.f_lineno


def _folders() -> tuple[str, ...]:
    torch: Any = sys.modules["torch"]
    return torch.__file__.removesuffix("__init__.py"), __file__.removesuffix("remote_failures.py"), "<"


_LIBRARIES = _folders()
