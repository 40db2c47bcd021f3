"""A program that is started apart and runs one function, which comes by its standard input, as another host
would: nothing of the process that asks for it is inherited, but for the gates at which tests meet. What the
function returned or raised goes to a pipe."""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable

import cloudpickle

PR_SET_PDEATHSIG = 1
kept: list[tuple[Callable[..., object], tuple[object, ...]]] = []
"""What the function holds on to is not let go of before the program ends."""


def main() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # never outlives a test run that was killed
    path, answer = pickle.load(sys.stdin.buffer)
    sys.path[:] = path
    said: tuple[bool, object]
    try:
        kept.append(pickle.load(sys.stdin.buffer))
        function, args = kept[0]
        said = False, function(*args)
    except BaseException as error:
        error.add_note(f"in the program apart: {traceback.format_exc()}")
        said = True, error
    try:
        data = cloudpickle.dumps(said)
    except Exception as error:
        data = cloudpickle.dumps((True, AssertionError(f"the answer {said!r} cannot be sent: {error}")))
    del said
    with os.fdopen(answer, "wb") as pipe:
        pipe.write(data)


if __name__ == "__main__":
    main()
