"""A child that is to die with its parent."""

from __future__ import annotations

import os

from flowchan.run.crew.at_exit import die_with


def test_a_child_whose_parent_has_died_already_ends() -> None:
    """The kernel would not kill it any more."""
    ended = []
    for parent in (os.getpid(), os.getpid() + 1):
        if (pid := os.fork()) == 0:
            die_with(parent)
            os._exit(7)
        ended.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    assert ended == [7, 1]
