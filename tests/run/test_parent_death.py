"""Test that children die with their parent."""

from __future__ import annotations

import os

from flowchan.run.crew.at_exit import die_with


def test_child_of_a_dead_parent_ends() -> None:
    """The kernel does not send a signal if the parent has already died."""
    ended = []
    for parent in (os.getpid(), os.getpid() + 1):
        if (pid := os.fork()) == 0:
            die_with(parent)
            os._exit(7)
        ended.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    assert ended == [7, 1]
