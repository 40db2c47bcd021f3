"""Test that peers with the secret are accepted, and that all others are refused with a one-line error that
contains their address."""

from __future__ import annotations

import contextlib
import hmac
import pickle
import socket
import struct
import threading
from collections.abc import Callable
from typing import Any

import pytest
from ends import OTHER, SECRET, connected, ctrl_c, meet_in_thread, met
from support.peers import ThreadPeer
from support.sockets import receive

import flowchan
from flowchan.transport import authentication, tcp
from flowchan.transport.authentication import GREETING, HELLO, PROOF

SIZES = [GREETING, PROOF, HELLO + PROOF]
"""Sizes of the messages from each side."""
ROLES = (authentication.DIALLED, authentication.LISTENS)


def refused(sock: socket.socket, **more: Any) -> str:
    """Return the one-line error of ``meet``, which must contain the peer's address."""
    peer = tcp.joined(sock.getpeername())
    with pytest.raises(flowchan.Refused) as raised:
        met(sock, **more)
    line = str(raised.value)
    assert line.startswith(f"{peer} was refused: ")
    assert "\n" not in line
    assert sock.fileno() == -1
    return line


def test_handshake_returns_the_peers_hello_and_a_plain_socket() -> None:
    with connected() as (dialled, listens):
        peer = meet_in_thread(listens)
        own_sock, hello = met(dialled)
        peer_sock, peer_hello = peer.result()
        assert (hello, peer_hello) == ({"dialled": False}, {"dialled": True})
        assert (own_sock, peer_sock) == (dialled, listens)
        assert own_sock.gettimeout() is None
        own_sock.sendall(b"one")
        peer_sock.sendall(b"two")
        assert (receive(peer_sock, 3), receive(own_sock, 3)) == (b"one", b"two")


def test_bytes_sent_after_the_handshake_stay_in_the_socket() -> None:
    with connected() as (dialled, listens):
        peer = ThreadPeer(lambda: met(listens, dialled=False)[0].sendall(b"x" * 9999))
        own_sock, _ = met(dialled)
        assert receive(own_sock, 9999) == b"x" * 9999
        peer.result()


def test_a_wrong_secret_is_refused_on_both_sides() -> None:
    with connected() as (dialled, listens):
        peer = ThreadPeer(lambda: refused(listens, dialled=False))
        assert "perhaps the secrets differ" in refused(dialled, secret=OTHER)
        assert "it does not know the secret" in peer.result()


def test_listener_with_a_wrong_secret_gets_no_hello() -> None:
    with connected() as (dialled, listens):
        peer = ThreadPeer(lambda: refused(dialled))
        receive(listens, GREETING)
        listens.sendall(authentication.greeting(authentication.LISTENS) + bytes(PROOF))
        assert "it does not know the secret" in peer.result()
        rest = receive(listens, 9999)
        assert len(rest) == PROOF  # the proof was made for these two greetings, and is invalid for others


@pytest.mark.parametrize("dialled", [True, False])
def test_silent_peer_is_refused_after_the_timeout(dialled: bool) -> None:
    with connected() as ends:
        assert "it sent nothing" in refused(ends[not dialled], dialled=dialled, timeout=0.05)


@pytest.mark.parametrize("dialled", [True, False])
def test_a_peer_that_stops_during_the_handshake_is_refused(dialled: bool) -> None:
    with connected() as ends:
        ends[dialled].sendall(authentication.PREAMBLE)
        assert f"only 16 of {GREETING} bytes" in refused(ends[not dialled], dialled=dialled, timeout=0.05)


def test_timeout_covers_the_whole_handshake() -> None:
    """A peer that sends a byte now and then must not prolong the handshake."""
    with connected() as (dialled, listens):
        over = threading.Event()

        def drip() -> None:
            while not over.wait(0.02):
                dialled.send(authentication.PREAMBLE[:1])

        peer = ThreadPeer(drip)
        line = refused(listens, dialled=False, timeout=0.3)
        over.set()
        peer.join()
        assert "in this step of the handshake, which may take 0.3 s in total" in line


@pytest.mark.parametrize("dialled", [True, False])
@pytest.mark.parametrize(
    "garbage", [b"GET / HTTP/1.1\r\n\r\n" * 99, b"\x00" * GREETING, b"flowchan link 0\n" * 99, b"\xff" * 999]
)
def test_invalid_bytes_are_refused(dialled: bool, garbage: bytes) -> None:
    with connected() as ends:
        ends[dialled].sendall(garbage)
        assert "does not use the protocol of this version of flowchan" in refused(
            ends[not dialled], dialled=dialled
        )


def test_a_peer_that_closes_the_connection_is_refused() -> None:
    with connected() as (dialled, listens):
        dialled.close()
        assert "it closed the connection without sending a message" in refused(listens, dialled=False)


def test_a_peer_that_stops_sending_is_refused() -> None:
    with connected() as (dialled, listens):
        dialled.shutdown(socket.SHUT_WR)
        assert "it closed the connection without sending a message" in refused(listens, dialled=False)


def test_peer_that_resets_the_connection_during_the_handshake_is_refused() -> None:
    with connected() as (dialled, listens):
        peer = ThreadPeer(lambda: refused(listens, dialled=False))
        receive(dialled, GREETING)
        dialled.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        dialled.close()
        assert "the connection ended during the handshake (Connection reset" in peer.result()


def test_peer_that_resets_the_connection_before_handshake_is_refused() -> None:
    with connected() as (dialled, listens):
        dialled.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        dialled.close()
        with pytest.raises(flowchan.Refused, match="a peer that has left was refused: the connection ended"):
            met(listens, dialled=False)


def outcome(sock: socket.socket, dialled: bool) -> str:
    """Return the outcome of the handshake for one end."""
    try:
        met(sock, dialled=dialled)
    except flowchan.Refused as refused:
        return str(refused)
    return "met"


def with_relay(change: Callable[[bool, int, bytes], bytes]) -> dict[bool, str]:
    """Return both outcomes of a handshake with an attacker between the ends.

    The attacker replaces each message with the result of ``change(dialled, number, message)``.
    """
    with connected() as (dialled, his_listens), connected() as (his_dialled, listens):

        def relay(source: socket.socket, target: socket.socket, from_dialled: bool) -> None:
            for number, size in enumerate(SIZES):
                message = receive(source, size)
                if len(message) < size:
                    break
                with contextlib.suppress(OSError):  # the peer has already refused the connection
                    target.sendall(change(from_dialled, number, message))
            with contextlib.suppress(OSError):
                target.shutdown(socket.SHUT_WR)

        ends = {True: ThreadPeer(outcome, dialled, True), False: ThreadPeer(outcome, listens, False)}
        relays = [
            ThreadPeer(relay, his_listens, his_dialled, True),
            ThreadPeer(relay, his_dialled, his_listens, False),
        ]
        results = {side: end.result() for side, end in ends.items()}
        dialled.close()
        listens.close()
        for thread in relays:
            thread.join()
        return results


def test_handshake_succeeds_through_a_passive_proxy() -> None:
    assert with_relay(lambda _dialled, _number, message: message) == {True: "met", False: "met"}


PLACEMENTS = [(number, place) for number, size in enumerate(SIZES) for place in range(size)]


def some_of(places: list[tuple[int, int]], every: bool) -> list[tuple[int, int]]:
    """Return all bytes of greetings and proofs, or a sample of them, and a sample of the hellos."""
    return [(n, at) for n, at in places if (every and SIZES[n] < HELLO) or at % 37 == 5 or at > SIZES[n] - 2][
        : None if every else 24
    ]


@pytest.mark.parametrize("from_dialled", [True, False])
def test_changed_byte_of_the_handshake_is_detected(from_dialled: bool, long_walk: bool) -> None:
    """The receiver of this message or of the next must detect the change. No changed hello is accepted."""
    for number, place in some_of(PLACEMENTS, long_walk):

        def change(dialled: bool, n: int, message: bytes, number: int = number, place: int = place) -> bytes:
            if (dialled, n) != (from_dialled, number):
                return message
            return message[:place] + bytes([message[place] ^ 1]) + message[place + 1 :]

        assert "was refused: " in with_relay(change)[not from_dialled], (number, place)


def record() -> dict[bool, bytes]:
    """Return the messages from both ends of a handshake."""
    results = {True: b"", False: b""}

    def listen_in(dialled: bool, _: int, message: bytes) -> bytes:
        results[dialled] += message
        return message

    assert with_relay(listen_in) == {True: "met", False: "met"}
    return results


@pytest.mark.parametrize("dialled", [True, False])
def test_replayed_handshake_is_refused(dialled: bool) -> None:
    recorded = record()
    with connected() as ends:
        ends[dialled].sendall(recorded[not dialled])
        assert "it does not know the secret" in refused(ends[not dialled], dialled=dialled)


@pytest.mark.parametrize("dialled", [True, False])
@pytest.mark.parametrize("disguised", [True, False])
def test_reflected_messages_are_refused(dialled: bool, disguised: bool) -> None:
    """A greeting with the other role must not make the reflected messages acceptable."""
    with connected() as ends:
        ours, his = ends[not dialled], ends[dialled]
        peer = ThreadPeer(lambda: refused(ours, dialled=dialled))
        own_sock = receive(his, GREETING)
        if disguised:
            own_sock = own_sock.replace(*ROLES[:: 1 if dialled else -1])
        his.sendall(own_sock)
        proof = receive(his, PROOF) if dialled else bytes(PROOF)  # the listening end sends its proof second
        with contextlib.suppress(OSError):  # the peer has already refused the connection
            his.sendall(proof)
        expected = "it does not know the secret" if disguised else "the same role as this side"
        assert expected in peer.result()


def test_two_dialling_ends_refuse_each_other_with_the_reason() -> None:
    with connected() as (one, other):
        peer = ThreadPeer(lambda: refused(other, dialled=True))
        assert "both connect, or both listen" in refused(one, dialled=True)
        assert "both connect, or both listen" in peer.result()


@pytest.mark.parametrize(
    "results", [b"[1]", b"\xff", b"", b"{", b"[" * HELLO, b"NaN", b'"' + b"x" * 99 + b'"']
)
def test_hello_other_than_a_json_object_is_refused(results: bytes) -> None:
    """Even a peer with the secret must be refused."""
    with connected() as (dialled, listens):
        peer = ThreadPeer(lambda: refused(listens, dialled=False))
        own_sock = authentication.greeting(authentication.DIALLED)
        dialled.sendall(own_sock)
        key = hmac.digest(SECRET, own_sock + receive(dialled, GREETING), "sha256")
        dialled.sendall(authentication.proof(key, authentication.DIALLED, b"proof"))
        receive(dialled, PROOF)
        hello = results.ljust(HELLO)
        dialled.sendall(hello + authentication.proof(key, authentication.DIALLED, b"hello", hello))
        assert "its hello is not a JSON object" in peer.result()


def test_invalid_hello_or_secret_is_refused() -> None:
    with connected() as (dialled, _), pytest.raises(ValueError, match="at most 4096 bytes of JSON, got 5011"):
        authentication.meet(dialled, SECRET, dialled=True, hello={"a": "x" * 5002}, timeout=1)
    with connected() as (dialled, _), pytest.raises(ValueError, match="at least 16 bytes, got 3"):
        authentication.meet(dialled, b"abc", dialled=True, hello={}, timeout=1)


def test_a_booby_trapped_pickle_is_never_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Send the pickle in place of every message and at every offset."""
    unpickled: list[bytes] = []

    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return unpickled.append, (b"sprung",)

    trap = pickle.dumps(Trap())
    for name in ("loads", "load", "Unpickler"):
        monkeypatch.setattr(pickle, name, lambda *_, name=name: unpickled.append(name))
    for before in (b"", authentication.greeting(authentication.DIALLED)):
        for padding in (b"", b"\0" * 8, len(trap).to_bytes(4, "big"), len(trap).to_bytes(8, "little")):
            with connected() as (dialled, listens):
                dialled.sendall((before + padding + trap).ljust(9999, b"\0"))
                refused(listens, dialled=False)
    assert not unpickled


def test_ctrl_c_ends_a_waiting_handshake() -> None:
    with connected() as (_, listens):
        with ctrl_c():
            met(listens, dialled=False, timeout=600)
        assert listens.fileno() == -1
