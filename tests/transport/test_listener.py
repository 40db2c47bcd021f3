"""The listener accepts peers that know the secret, no matter how many others connect."""

from __future__ import annotations

import contextlib
import errno
import select
import socket
import struct
from typing import Any

import pytest
from ends import OTHER, SECRET, ctrl_c, met
from support.peers import ThreadPeer
from support.sockets import receive
from support.waiting import wait_until

import flowchan
from flowchan.transport import authentication, tcp
from flowchan.transport.listener import AT_ONCE, AuthenticatedListener


def opened(**more: Any) -> AuthenticatedListener:
    return AuthenticatedListener(tcp.listen("127.0.0.1:0"), SECRET, {"listens": True}, **more)


def dialled(door: AuthenticatedListener, secret: bytes = SECRET) -> Any:
    """Dial the listener with the secret, and return its hello."""
    with met(tcp.dial(door.address, 30), secret)[0] as sock:
        return receive(sock, 5)


def serve_until_one_is_refused(door: AuthenticatedListener) -> None:
    while not door.refused:
        with contextlib.suppress(TimeoutError):
            door.accept(0.05)


def test_peer_with_the_secret_is_accepted() -> None:
    with opened() as door:
        peers = [ThreadPeer(dialled, door) for _ in range(3)]
        for _ in peers:
            sock, hello = door.accept(30)
            with sock:
                assert hello == {"dialled": True}
                assert sock.gettimeout() is None
                sock.sendall(b"hello")
        assert [peer.result() for peer in peers] == [b"hello"] * 3
        assert door.refused == 0


def test_listener_accept_without_a_peer_times_out() -> None:
    with (
        opened() as door,
        pytest.raises(TimeoutError, match=r"no peer has proved the secret at 127\.0\.0\.1:"),
    ):
        door.accept(0.01)


def test_proved_peer_is_accepted_after_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peer sends nothing while it waits for the last message, so a polling program asks the listener."""
    end = authentication.PendingHandshake._end
    with opened() as door:

        def interrupted(pending: authentication.PendingHandshake, last: Any) -> None:
            if pending in door._pending:
                raise KeyboardInterrupt
            end(pending, last)

        peer = ThreadPeer(dialled, door)
        with monkeypatch.context() as planted:
            planted.setattr(authentication.PendingHandshake, "_end", interrupted)
            with pytest.raises(KeyboardInterrupt):
                door.accept(30)
        assert door.has_proved_peer()
        sock, _ = door.accept(30)
        with sock:
            sock.sendall(b"hello")
        assert peer.result() == b"hello"
        assert not door.has_proved_peer()


def test_refused_peer_is_counted_and_named() -> None:
    with opened() as door:
        peer = ThreadPeer(lambda: dialled(door, OTHER))
        serve_until_one_is_refused(door)
        with pytest.raises(flowchan.Refused):
            peer.result()
        assert door.refused == 1
        assert door.last_refused.startswith("127.0.0.1:")
        assert "it does not know the secret" in door.last_refused


def test_silent_peers_do_not_block_a_peer_with_the_secret() -> None:
    """Open more connections than may be pending, and more than fit in the backlog."""
    with opened() as door:
        silent: list[socket.socket] = []
        outside = ThreadPeer(lambda: door.accept(60))
        try:
            for _ in range(AT_ONCE + 300):
                silent.append(tcp.dial(door.address, 30))
            peer = ThreadPeer(dialled, door)
            sock, _ = outside.result()
            with sock:
                sock.sendall(b"hello")
            assert peer.result() == b"hello"
            assert door.refused >= 300
            assert f"more than {AT_ONCE} handshakes were going on at once" in door.last_refused
        finally:
            for one in silent:
                one.close()


def test_oldest_pending_peer_is_refused_even_if_readable() -> None:
    with opened() as door, contextlib.ExitStack() as open_ones:
        silent = []
        for _ in range(AT_ONCE):
            silent.append(open_ones.enter_context(tcp.dial(door.address, 30)))
            with pytest.raises(TimeoutError):
                door.accept(0)
        open_ones.enter_context(tcp.dial(door.address, 30))
        silent[0].sendall(authentication.SPOKEN)
        while not door.refused:
            with pytest.raises(TimeoutError):
                door.accept(0)
        assert f"more than {AT_ONCE} handshakes were going on at once" in door.last_refused


def test_silent_peers_are_refused_after_the_timeout() -> None:
    with opened(handshake_timeout=0.05) as door, tcp.dial(door.address, 30) as silent:
        serve_until_one_is_refused(door)
        assert "it sent nothing" in door.last_refused
        assert len(receive(silent, 9999)) == authentication.GREETING  # after that, the connection ends


HOSTILE = [
    b"",
    b"\x80\x04\x95" * 99,
    b"GET / HTTP/1.0\r\n\r\n",
    authentication.SPOKEN,
    authentication.greeting(authentication.LISTENS),
    authentication.greeting(authentication.DIALLED) + bytes(999),
    authentication.greeting(authentication.DIALLED)[:50],
]


def test_listener_survives_thousands_of_hostile_connections(long_walk: bool) -> None:
    """Connections are reset or closed at any message; afterwards a peer with the secret must be accepted."""
    number = 30_000 if long_walk else 600
    with opened(handshake_timeout=1) as door:

        def attack() -> None:
            for n in range(number):
                with tcp.dial(door.address, 30) as sock:
                    sock.sendall(HOSTILE[n % len(HOSTILE)])
                    if n % 3 == 0:
                        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            with met(tcp.dial(door.address, 30))[0] as sock:
                sock.sendall(b"after")

        attacker = ThreadPeer(attack)
        sock, _ = door.accept(600)
        with sock:
            assert receive(sock, 5) == b"after"
        attacker.result()
        assert door.refused > number // 2


def test_listener_recovers_from_a_shortage_of_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    """The listener must not fail because of the shortage; the peer waits in the backlog."""
    with opened() as door:
        tried: list[int] = []
        accept = tcp.Listener.accept_now

        def short(self: tcp.Listener) -> socket.socket | None:
            tried.append(1)
            if len(tried) < 3:
                raise OSError(errno.EMFILE, "Too many open files")
            return accept(self)

        monkeypatch.setattr(tcp.Listener, "accept_now", short)
        peer = ThreadPeer(dialled, door)
        sock, _ = door.accept(30)
        with sock:
            sock.sendall(b"hello")
        assert peer.result() == b"hello"
        assert len(tried) >= 3


def test_listener_can_be_polled() -> None:
    with opened() as door:
        assert select.select([door], [], [], 0)[0] == []
        with tcp.dial(door.address, 30):
            wait_until(lambda: select.select([door], [], [], 0)[0] == [door])


def test_close_refuses_pending_handshakes() -> None:
    door = opened()
    with tcp.dial(door.address, 30) as waiting:
        with pytest.raises(TimeoutError):
            door.accept(0.05)
        door.close()
        receive(waiting, 9999)  # the connection has ended
        with pytest.raises(ConnectionRefusedError):
            tcp.dial(door.address, 30)


def test_ctrl_c_ends_the_accept() -> None:
    with opened() as door, ctrl_c():
        door.accept(None)
