"""C11: a waiting call checks ten times a second whether the other processes are alive.

The check makes no read system call. The check needs one descriptor per process that uses the channel.
"""

from __future__ import annotations

import os
import resource
import threading
from pathlib import Path
from typing import Any

from support.peers import ProcessPeer, ThreadPeer
from support.waiting import wait_blocked, wait_until

from flowchan import Channel


class Waiting:
    """A thread that waits for an item."""

    def __init__(self, channel: Channel[Any]) -> None:
        self.ids: list[int] = []
        self.peer = ThreadPeer(self._get, channel)
        wait_blocked(channel, readers=1)
        self._of = Path(f"/proc/self/task/{self.ids[0]}")

    def _get(self, channel: Channel[Any]) -> Any:
        self.ids.append(threading.get_native_id())
        return channel.get()

    def checks_again(self, times: int) -> None:
        """Wait until the thread has fallen asleep ``times`` more times."""
        until = self._sleeps() + times
        wait_until(lambda: self._sleeps() >= until)

    def _sleeps(self) -> int:
        lines = (self._of / "status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt"))

    def reads(self) -> int:
        """Return the number of read system calls that the thread has made."""
        lines = (self._of / "io").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("syscr"))


def take_part(channels: list[Channel[Any]], leave: Channel[Any], end: Channel[Any]) -> None:
    """Keep a writer of each channel open until ``leave`` is closed. Return once ``end`` is closed."""
    writers = [channel.writer() for channel in channels]
    list(leave)
    for writer in writers:
        writer.close()
    list(end)


def pidfds() -> int:
    links = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    return sum(os.path.lexists(link) and "pidfd" in os.readlink(link) for link in links)


def test_waiter_checks_other_processes_without_read_system_calls() -> None:
    channel, leave, end = (Channel[Any](across="processes") for _ in range(3))
    process = ProcessPeer(take_part, [channel], leave, end)
    wait_until(lambda: channel.stats().writers == 1)
    waiting = Waiting(channel)
    waiting.checks_again(3)  # by now, the thread has opened a descriptor for the process
    before = waiting.reads()
    waiting.checks_again(5)
    assert waiting.reads() == before
    channel.put("item")
    assert waiting.peer.result() == "item"
    leave.close()
    end.close()
    process.result()


def test_each_process_is_watched_once_however_many_channels_it_uses() -> None:
    channels = [Channel[Any](across="processes") for _ in range(2)]
    leave, end = Channel[Any](across="processes"), Channel[Any](across="processes")
    own = [channel.writer() for channel in channels]
    process = ProcessPeer(take_part, channels, leave, end)
    wait_until(lambda: all(channel.stats().writers == 2 for channel in channels))
    both = [Waiting(channel) for channel in channels]
    for waiting in both:
        waiting.checks_again(3)
    assert pidfds() == 1
    assert ProcessPeer(pidfds).result() == 0  # a forked child inherits none of its parent's pidfds
    leave.close()
    wait_until(lambda: all(channel.stats().writers == 1 for channel in channels))
    for waiting in both:
        waiting.checks_again(4)
    assert pidfds() == 0
    for writer, waiting in zip(own, both, strict=True):
        writer.put("item")
        assert waiting.peer.result() == "item"
    end.close()
    process.result()


def looking_for_many(channel: Channel[Any], leave: Channel[Any], end: Channel[Any]) -> tuple[int, int]:
    """Return how many descriptors the checks use, and the descriptor limit of the process."""
    most = max(int(number) for number in os.listdir("/proc/self/fd")) + 16
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    children = []
    for _ in range(most // 4 + 1):
        if not (child := os.fork()):
            try:
                take_part([channel], leave, end)
            finally:
                os._exit(0)
        children.append(child)
    wait_until(lambda: channel.stats().writers == len(children))
    waiting = Waiting(channel)
    waiting.checks_again(4)
    found = pidfds()
    channel.put("item")
    waiting.peer.result()
    leave.close()
    end.close()
    for child in children:
        os.waitpid(child, 0)
    return found, most


def test_watching_many_processes_leaves_most_descriptors_free() -> None:
    found, most = ProcessPeer(
        looking_for_many, *(Channel[Any](across="processes") for _ in range(3))
    ).result()
    assert found == most // 4
