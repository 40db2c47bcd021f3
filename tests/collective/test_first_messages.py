"""Test that a member's first message to another member creates the channel for all later messages."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import pytest
from support.group_members import SECRET
from support.peers import ThreadPeer

from flowchan import GroupError, MemberDied
from flowchan.collective import connector, members, messages_remote
from flowchan.collective.connector import Connector
from flowchan.collective.messages_remote import RemotePeers
from flowchan.collective.point_to_point import Messages
from flowchan.transport.listener import AuthenticatedListener
from flowchan.transport.tcp import listen as listen_at

CONNECTOR = Connector(SECRET, "127.0.0.1")
Pair = tuple[Any, Any]


def near(stack: ExitStack) -> Pair:
    """Create the messages objects of two members on one host."""
    own, other = (stack.enter_context(member) for member in members(2))
    own._take_slot()
    other._take_slot()
    return own._messages, other._messages


def remote(stack: ExitStack) -> Pair:
    """Create the messages objects of two members on two hosts."""
    listeners = [CONNECTOR.listen({"rank": rank}) for rank in (0, 1)]
    both = [
        RemotePeers(rank, listeners[rank], [listener.address for listener in listeners], CONNECTOR)
        for rank in (0, 1)
    ]
    for one in both:
        stack.callback(one.close, wait=False)
    return Messages(0, 2, both[0].peer), Messages(1, 2, both[1].peer)


@pytest.fixture(params=[near, remote])
def pair(request: pytest.FixtureRequest) -> Iterator[Callable[[], Pair]]:
    with ExitStack() as stack:
        yield lambda: request.param(stack)


def test_first_messages_from_several_threads_arrive(pair: Callable[[], Pair]) -> None:
    for _ in range(10):
        own, other = pair()
        together = threading.Barrier(4)

        def send(number: int, own: Any = own, together: Any = together) -> None:
            together.wait()
            own.send(number, 1, None)

        threads = [ThreadPeer(send, number) for number in range(4)]
        for thread in threads:
            thread.result()
        assert sorted(other.receive(0, 20.0) for _ in threads) == [0, 1, 2, 3]


class Interrupted:
    """A member that is interrupted right before or right after its first attempt to publish a channel."""

    def __init__(self, member: Any, when: str) -> None:
        self._member, self._when = member, when

    def __getattr__(self, name: str) -> Any:
        return getattr(self._member, name)

    def _publish_channel(self, *channel: Any) -> None:
        when, self._when = self._when, ""
        if when != "before":
            self._member._publish_channel(*channel)
        if when:
            raise KeyboardInterrupt


@pytest.mark.parametrize("when", ["before", "after"])
def test_messages_arrive_after_ctrl_c_in_first_send(when: str) -> None:
    with ExitStack() as stack:
        own, other = near(stack)
        peer = own.peer(1)
        peer._member = Interrupted(peer._member, when)
        with pytest.raises(KeyboardInterrupt):
            own.send("cut off", 1, None)
        own.send("next", 1, None)
        assert other.receive(0, 20.0) == "next"


def test_remote_messages_arrive_after_ctrl_c_in_first_send(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The sender must not connect twice, because the receiver might read only the second connection."""
    begun = messages_remote.start

    def cut_off(what: str, *given: Any) -> Any:
        thread = begun(what, *given)
        if what == "send":
            monkeypatch.undo()
            raise KeyboardInterrupt
        return thread

    with ExitStack() as stack:
        own, other = remote(stack)
        monkeypatch.setattr(messages_remote, "start", cut_off)
        with pytest.raises(KeyboardInterrupt):
            own.send("cut off", 1, None)
        own.send("next", 1, None)
        own.send("last", 1, None)
        assert [other.receive(0, 20.0) for _ in range(2)] == ["next", "last"]


def test_send_to_another_host_raises_after_close() -> None:
    with ExitStack() as stack:
        listeners = [CONNECTOR.listen({"rank": rank}) for rank in (0, 1)]
        peers = RemotePeers(0, listeners[0], [listener.address for listener in listeners], CONNECTOR)
        own = Messages(0, 2, peers.peer)
        stack.callback(listeners[1].close)
        own.send("before", 1, None)
        peers.close(wait=False)
        with pytest.raises(GroupError, match="send failed: this member has left"):
            own.send("after", 1, None)


@contextmanager
def foreign_peer() -> Iterator[AuthenticatedListener]:
    """Run another program with a different secret on a port of this host."""
    over = threading.Event()

    def listen() -> None:
        while not over.is_set():
            with suppress(TimeoutError):
                listener.accept(0.02)

    with AuthenticatedListener(listen_at("127.0.0.1:0"), b"of another program", {}) as listener:
        dialling = ThreadPeer(listen)
        try:
            yield listener
        finally:
            over.set()
            dialling.result()


def test_close_ignores_another_program_at_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other program uses the port of a member that has already ended."""
    monkeypatch.setattr(connector, "REJECTION_TIMEOUT_S", 0.0)
    with foreign_peer() as remote:
        own = RemotePeers(0, CONNECTOR.listen({}), ["", remote.address], CONNECTOR)
        own.peer(1).send("in vain", None)
        ThreadPeer(own.close).result()
    assert remote.refused


@pytest.mark.parametrize("call", ["receive", "receive_any"])
def test_receive_raises_if_another_program_has_the_address(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connector, "REJECTION_TIMEOUT_S", 0.0)
    with foreign_peer() as remote:
        own = RemotePeers(0, CONNECTOR.listen({}), ["", remote.address], CONNECTOR)
        messages = Messages(0, 2, own.peer)
        receive = messages.receive_any if call == "receive_any" else lambda _: messages.receive(1, None)
        with pytest.raises(MemberDied, match=r"rank 1, on another host, (died|has left)"):
            ThreadPeer(receive, None).result()
        own.close()
