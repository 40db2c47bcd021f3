"""Test that the listener accepts peers that know the secret, even if many others connect."""

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
from flowchan.transport import listener as listener_module
from flowchan.transport.listener import AT_ONCE, AuthenticatedListener


def opened(**more: Any) -> AuthenticatedListener:
    return AuthenticatedListener(tcp.listen("127.0.0.1:0"), SECRET, {"listens": True}, **more)


def dialled(listener: AuthenticatedListener, secret: bytes = SECRET) -> Any:
    """Dial the listener with the secret, and return the listener's hello."""
    with met(tcp.dial(listener.address, 30), secret)[0] as sock:
        return receive(sock, 5)


def serve_until_one_is_refused(listener: AuthenticatedListener) -> None:
    while not listener.refused:
        with contextlib.suppress(TimeoutError):
            listener.accept(0.05)


def test_peer_with_the_secret_is_accepted() -> None:
    with opened() as listener:
        peers = [ThreadPeer(dialled, listener) for _ in range(3)]
        for _ in peers:
            sock, hello = listener.accept(30)
            with sock:
                assert hello == {"dialled": True}
                assert sock.gettimeout() is None
                sock.sendall(b"hello")
        assert [peer.result() for peer in peers] == [b"hello"] * 3
        assert listener.refused == 0


def test_listener_accept_without_a_peer_times_out() -> None:
    with (
        opened() as listener,
        pytest.raises(TimeoutError, match=r"no peer with the right secret connected to 127\.0\.0\.1:"),
    ):
        listener.accept(0.01)


def test_authenticated_peer_is_accepted_after_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peer sends nothing while it waits for the last message."""
    end = authentication.PendingHandshake._end
    with opened() as listener:

        def interrupted(pending: authentication.PendingHandshake, last: Any) -> None:
            if pending in listener._pending:
                raise KeyboardInterrupt
            end(pending, last)

        peer = ThreadPeer(dialled, listener)
        with monkeypatch.context() as planted:
            planted.setattr(authentication.PendingHandshake, "_end", interrupted)
            with pytest.raises(KeyboardInterrupt):
                listener.accept(30)
        sock, _ = listener.accept(30)
        with sock:
            sock.sendall(b"hello")
        assert peer.result() == b"hello"


def test_refused_peer_is_counted_and_named() -> None:
    with opened() as listener:
        peer = ThreadPeer(lambda: dialled(listener, OTHER))
        serve_until_one_is_refused(listener)
        with pytest.raises(flowchan.Refused):
            peer.result()
        assert listener.refused == 1
        assert listener.last_refused.startswith("127.0.0.1:")
        assert "it does not know the secret" in listener.last_refused


def test_silent_peers_do_not_block_a_peer_with_the_secret() -> None:
    """Open more connections than may be pending, and more than fit in the backlog."""
    with opened() as listener:
        silent: list[socket.socket] = []
        outside = ThreadPeer(lambda: listener.accept(60))
        try:
            for _ in range(AT_ONCE + 300):
                silent.append(tcp.dial(listener.address, 30))
            peer = ThreadPeer(dialled, listener)
            sock, _ = outside.result()
            with sock:
                sock.sendall(b"hello")
            assert peer.result() == b"hello"
            assert listener.refused >= 300
            assert f"there were more than {AT_ONCE} handshakes at the same time" in listener.last_refused
        finally:
            for one in silent:
                one.close()


def test_readable_peer_is_refused_beyond_the_handshake_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener_module, "_chooser", First())
    with opened() as listener, contextlib.ExitStack() as open_ones:
        silent = []
        for _ in range(AT_ONCE):
            silent.append(open_ones.enter_context(tcp.dial(listener.address, 30)))
            with pytest.raises(TimeoutError):
                listener.accept(0)
        open_ones.enter_context(tcp.dial(listener.address, 30))
        silent[0].sendall(authentication.PREAMBLE)
        while not listener.refused:
            with pytest.raises(TimeoutError):
                listener.accept(0)
        assert f"there were more than {AT_ONCE} handshakes at the same time" in listener.last_refused


class First:
    def choice(self, candidates: list[Any]) -> Any:
        return candidates[0]


def crowd(listener: AuthenticatedListener, open_ones: contextlib.ExitStack, count: int) -> None:
    """Open silent connections one by one, until the listener has refused ``count`` peers."""
    while listener.refused < count:
        open_ones.enter_context(tcp.dial(listener.address, 30))
        with pytest.raises(TimeoutError):
            listener.accept(0)


def test_flood_of_silent_peers_leaves_a_peer_with_a_greeting() -> None:
    """The peer with the greeting is the oldest, so it would be refused if only age counted."""
    with opened() as listener, contextlib.ExitStack() as open_ones:
        steps = authentication.handshake(SECRET, {}, dialled=True)
        peer = authentication.PendingHandshake(tcp.dial(listener.address, 30), steps, 30)
        while not listener._pending or not listener._pending[0].messages:
            with pytest.raises(TimeoutError):
                listener.accept(0)
        crowd(listener, open_ones, 3 * AT_ONCE)
        accepted = ThreadPeer(lambda: listener.accept(30))
        while peer.hello is None:
            select.select([peer.sock], [], [], 30)
            peer.receive_step()
        accepted.result()[0].close()
        peer.close()


def test_flood_from_one_address_leaves_the_peers_of_other_addresses() -> None:
    with opened() as listener, contextlib.ExitStack() as open_ones:
        host, port = listener.address.rsplit(":", 1)
        sock = socket.create_connection((host, int(port)), 30, source_address=("127.0.0.2", 0))
        open_ones.enter_context(sock)
        while not listener._pending:
            with pytest.raises(TimeoutError):
                listener.accept(0)
        crowd(listener, open_ones, 3 * AT_ONCE)
        assert [pending.host for pending in listener._pending].count("127.0.0.2") == 1


def test_silent_peers_are_refused_after_the_timeout() -> None:
    with opened(handshake_timeout=0.05) as listener, tcp.dial(listener.address, 30) as silent:
        serve_until_one_is_refused(listener)
        assert "it sent nothing" in listener.last_refused
        assert len(receive(silent, 9999)) == authentication.GREETING  # then the connection ends


HOSTILE = [
    b"",
    b"\x80\x04\x95" * 99,
    b"GET / HTTP/1.0\r\n\r\n",
    authentication.PREAMBLE,
    authentication.greeting(authentication.LISTENS),
    authentication.greeting(authentication.DIALLED) + bytes(999),
    authentication.greeting(authentication.DIALLED)[:50],
]


def test_listener_survives_thousands_of_hostile_connections(long_walk: bool) -> None:
    """Connections are reset or closed at any message; afterwards a peer with the secret must be accepted."""
    number = 10_000 if long_walk else 600
    with opened(handshake_timeout=1) as listener:

        def attack() -> None:
            for n in range(number):
                with tcp.dial(listener.address, 30) as sock:
                    sock.sendall(HOSTILE[n % len(HOSTILE)])
                    if n % 3 == 0:
                        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            with met(tcp.dial(listener.address, 30))[0] as sock:
                sock.sendall(b"after")

        attacker = ThreadPeer(attack)
        sock, _ = listener.accept(600)
        with sock:
            assert receive(sock, 5) == b"after"
        attacker.result()
        assert listener.refused > number // 2


def test_listener_recovers_from_a_shortage_of_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    """The listener survives the shortage, and the peer waits in the backlog."""
    with opened() as listener:
        tried: list[int] = []
        accept = tcp.Listener.accept_now

        def short(self: tcp.Listener) -> socket.socket | None:
            tried.append(1)
            if len(tried) < 3:
                raise OSError(errno.EMFILE, "Too many open files")
            return accept(self)

        monkeypatch.setattr(tcp.Listener, "accept_now", short)
        peer = ThreadPeer(dialled, listener)
        sock, _ = listener.accept(30)
        with sock:
            sock.sendall(b"hello")
        assert peer.result() == b"hello"
        assert len(tried) >= 3


def test_listener_can_be_polled() -> None:
    with opened() as listener:
        assert select.select([listener], [], [], 0)[0] == []
        with tcp.dial(listener.address, 30):
            wait_until(lambda: select.select([listener], [], [], 0)[0] == [listener])


def test_close_refuses_pending_handshakes() -> None:
    listener = opened()
    with tcp.dial(listener.address, 30) as waiting:
        with pytest.raises(TimeoutError):
            listener.accept(0.05)
        listener.close()
        receive(waiting, 9999)  # the connection has ended
        with pytest.raises(ConnectionRefusedError):
            tcp.dial(listener.address, 30)


def test_ctrl_c_interrupts_accept() -> None:
    with opened() as listener, ctrl_c():
        listener.accept(None)
