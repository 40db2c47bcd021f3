"""Test ``tls=True``: a proxy process encrypts the connection, which is bound to the secret, and ends with
it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from ends import OTHER, SECRET, connected, meet_in_thread, met
from support.peers import ThreadPeer, wait_for_the_end_of
from support.sockets import receive
from support.waiting import wait_until

import flowchan
from flowchan.transport import authentication, tcp, tls
from flowchan.transport.authentication import GREETING, PROOF
from flowchan.transport.listener import AuthenticatedListener


@pytest.fixture(autouse=True)
def _certificates(request: pytest.FixtureRequest) -> None:
    if "without_cryptography" not in request.node.name:
        pytest.importorskip("cryptography")


@contextlib.contextmanager
def encrypted() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Yield the plain sockets of both ends."""
    with connected() as (dialled, listens):
        peer = meet_in_thread(listens, tls=True)
        own_sock, hello = met(dialled, tls=True)
        peer_sock, peer_hello = peer.result()
        assert (hello, peer_hello) == ({"dialled": False}, {"dialled": True})
        with own_sock, peer_sock:
            yield own_sock, peer_sock


def relays() -> list[psutil.Process]:
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):  # the proxy has already ended
            found += [child] if str(tls.PROGRAM) in child.cmdline() else []
    return found


def refusal(peer: ThreadPeer) -> str:
    with pytest.raises(flowchan.Refused) as raised:
        peer.result()
    return str(raised.value)


def test_bytes_are_sent_in_both_directions_at_once() -> None:
    data = os.urandom(3_000_000)
    with encrypted() as (own_sock, peer_sock):
        outgoing, back = ThreadPeer(own_sock.sendall, data), ThreadPeer(peer_sock.sendall, data[::-1])
        got = ThreadPeer(receive, own_sock, len(data))
        assert receive(peer_sock, len(data)) == data
        assert got.result() == data[::-1]
        outgoing.result()
        back.result()


@pytest.mark.parametrize("ending", [0, 1])
def test_bytes_sent_before_close_arrive(ending: int) -> None:
    """The bytes must arrive even while the other end is still sending."""
    data = os.urandom(5_000_000)
    with encrypted() as ends:
        first, last = ends[ending], ends[1 - ending]
        last.sendall(b"never read")
        sender = ThreadPeer(first.sendall, data)
        assert receive(last, 1000) == data[:1000]
        rest = ThreadPeer(receive, last, len(data))
        sender.result()
        first.close()
        assert rest.result() == data[1000:]


@pytest.mark.parametrize("ending", [0, 1])
def test_closing_one_side_ends_the_connection(ending: int) -> None:
    with encrypted() as ends:
        processes = relays()
        assert len(processes) == 2
        ends[ending].close()
        assert receive(ends[1 - ending], 1) == b""
        wait_until(lambda: not relays())


def test_proxy_exits_even_if_its_peer_stops_reading() -> None:
    """Bytes for a peer that does not read must not delay the proxy's exit for long."""
    with encrypted() as (own_sock, peer_sock):
        own_sock.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                own_sock.send(bytes(100_000))
        own_sock.close()
        assert peer_sock.recv(1) == b"\0"
        wait_until(lambda: len(relays()) < 2)


@pytest.mark.parametrize("killed", [0, 1])
def test_killed_proxy_ends_the_connection(killed: int) -> None:
    with encrypted() as ends:
        relays()[killed].kill()
        for end in ends:
            assert receive(end, 1) == b""


def test_ctrl_c_does_not_reach_the_proxy() -> None:
    with encrypted() as (own_sock, peer_sock):
        for process in relays():
            assert os.getsid(process.pid) == process.pid  # a terminal sends signals only to its own session
            process.send_signal(signal.SIGINT)
        own_sock.sendall(b"still here")
        assert receive(peer_sock, 10) == b"still here"


PROGRAM = f"""
import os, sys
sys.path[:0] = {[str(Path(__file__).parent), str(Path(__file__).parents[1])]}
import test_tls
with test_tls.encrypted() as ends:
    if os.fork() == 0:
        sys.stdin.read()  # keeps copies of both ends
        os._exit(0)
    print(*(process.pid for process in test_tls.relays()), flush=True)
    os.kill(os.getpid(), 9)
"""


def test_proxy_exits_when_its_parent_is_killed() -> None:
    """The proxy must exit even if a child of the dead process has inherited the descriptors."""
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as program:
        assert program.stdout is not None
        pids = [int(pid) for pid in program.stdout.readline().split()]
        assert len(pids) == 2
        for pid in pids:
            wait_for_the_end_of(pid)


def test_proxy_exits_silently_if_its_parent_has_died() -> None:
    with subprocess.Popen(["true"]) as process:
        process.wait()
    for settings in (b"", b'{"parent": %d, "parent_fd": null}\n' % process.pid):
        proxy = subprocess.run(
            [sys.executable, "-I", "-S", str(tls.PROGRAM)], input=settings, capture_output=True
        )
        assert (proxy.returncode, proxy.stdout, proxy.stderr) == (1, b"", b"")


def test_secret_is_not_visible_to_other_processes() -> None:
    with encrypted():
        for process in relays():
            settings = " ".join(process.cmdline()) + str(process.environ())
            assert process.cmdline()[1:] == ["-I", "-S", str(tls.PROGRAM)]
            for secret in (SECRET.decode(), SECRET.hex(), "PRIVATE KEY", tls.certificate().fingerprint.hex()):
                assert secret not in settings


def test_a_wrong_secret_is_refused_before_tls_begins() -> None:
    with connected() as (dialled, listens):
        peer = meet_in_thread(listens, tls=True)
        with pytest.raises(flowchan.Refused, match="perhaps the secrets differ"):
            met(dialled, OTHER, tls=True)
        assert "does not know the secret" in refusal(peer)
        assert not relays()


@pytest.mark.parametrize("here", [True, False])
def test_tls_on_one_side_only_is_refused(here: bool) -> None:
    with connected() as (dialled, listens):
        peer = meet_in_thread(listens, tls=not here)
        with pytest.raises(flowchan.Refused, match="TLS is on here" if here else "TLS is off here"):
            met(dialled, tls=here)
        assert "pass tls=True on both sides" in refusal(peer)


def passed_on(source: socket.socket, target: socket.socket, size: int) -> bytes:
    message = receive(source, size)
    target.sendall(message)
    return message


def test_observer_sees_only_encrypted_bytes() -> None:
    seen = b""
    with connected() as (dialled, his_listens), connected() as (his_dialled, listens):

        def relay_and_record() -> None:
            nonlocal seen
            sources = {his_listens: his_dialled, his_dialled: his_listens}
            with contextlib.suppress(OSError):
                while True:
                    for source, target in sources.items():
                        source.settimeout(0.01)
                        with contextlib.suppress(TimeoutError):
                            came = source.recv(9999)
                            if not came:
                                return
                            seen += came
                            target.sendall(came)

        message = b"sent after the handshake"
        between = ThreadPeer(relay_and_record)
        peer = meet_in_thread(listens, tls=True)
        own_sock, _ = met(dialled, tls=True)
        peer_sock, _ = peer.result()
        with own_sock, peer_sock:
            own_sock.sendall(message)
            assert receive(peer_sock, len(message)) == message
        between.join()
    assert authentication.PREAMBLE in seen
    assert message not in seen
    assert b'{"dialled"' not in seen


def test_tls_interceptor_is_detected() -> None:
    """The interceptor forwards the proofs, but presents a different certificate, so both ends must refuse."""
    with connected() as (dialled, his_listens), connected() as (his_dialled, listens):
        one = meet_in_thread(dialled, dialled=True, tls=True)
        two = meet_in_thread(listens, tls=True)
        passed_on(his_listens, his_dialled, GREETING)
        right = passed_on(his_dialled, his_listens, GREETING)[-32:]
        passed_on(his_listens, his_dialled, PROOF)
        passed_on(his_dialled, his_listens, PROOF)
        his = tls.certificate.__wrapped__()
        to_dialled = tls.TlsProxy(his_listens, his, b"", 30)
        to_listens = tls.TlsProxy(his_dialled, None, right, 30)
        to_listens.end.sendall(bytes(9999))
        assert "its certificate is not the certificate that it authenticated" in refusal(one)
        assert "it does not know the secret" in refusal(two)
        for own_sock in (to_dialled, to_listens):
            own_sock.forget()
            own_sock.end.close()


def test_changed_certificate_fingerprint_invalidates_the_proofs() -> None:
    with connected() as (dialled, his_listens), connected() as (his_dialled, listens):
        one = meet_in_thread(dialled, dialled=True, tls=True)
        two = meet_in_thread(listens, tls=True)
        passed_on(his_listens, his_dialled, GREETING)
        his_listens.sendall(receive(his_dialled, GREETING)[:-32] + tls.certificate().fingerprint[::-1])
        passed_on(his_listens, his_dialled, PROOF)
        assert "it does not know the secret" in refusal(two)
        his_listens.shutdown(socket.SHUT_WR)
        assert "perhaps the secrets differ" in refusal(one)


def test_changed_byte_ends_the_tls_connection() -> None:
    with connected() as (dialled, his_listens), connected() as (his_dialled, listens):
        one = meet_in_thread(dialled, dialled=True, tls=True)
        two = meet_in_thread(listens, tls=True)
        passed_on(his_listens, his_dialled, GREETING)
        passed_on(his_dialled, his_listens, GREETING)
        passed_on(his_listens, his_dialled, PROOF)
        passed_on(his_dialled, his_listens, PROOF)
        hello = his_listens.recv(99)
        his_dialled.sendall(hello[:-1] + bytes([hello[-1] ^ 1]) + bytes(9999))
        assert "TLS could not start" in refusal(two)
        his_listens.shutdown(socket.SHUT_WR)
        assert "it closed the connection at the start of TLS" in refusal(one)


def test_silent_tls_peer_is_refused_after_the_timeout() -> None:
    with connected() as (dialled, listens):
        peer = meet_in_thread(dialled, dialled=True, tls=True, timeout=1)
        foreign_peer = authentication.handshake(SECRET, {}, dialled=False, tls=True)
        listens.sendall(next(foreign_peer))  # type: ignore[arg-type]
        next(foreign_peer)
        foreign_peer.send(receive(listens, GREETING))
        listens.sendall(foreign_peer.send(receive(listens, PROOF)))  # type: ignore[arg-type]
        assert " was refused: " in refusal(peer)
        wait_until(lambda: not relays())


def test_listener_accepts_with_tls() -> None:
    with AuthenticatedListener(tcp.listen("127.0.0.1:0"), SECRET, {"listens": True}, tls=True) as listener:
        peers = [ThreadPeer(lambda: met(tcp.dial(listener.address, 30), tls=True)) for _ in range(3)]
        ends = [listener.accept(60) for _ in peers]
        for sock, hello in ends:
            assert hello == {"dialled": True}
            sock.sendall(b"hello")
            sock.close()
        for peer in peers:
            sock, _ = peer.result()
            with sock:
                assert receive(sock, 9) == b"hello"
        assert listener.refused == 0


def test_listener_drops_the_socket_of_a_tls_peer() -> None:
    with AuthenticatedListener(tcp.listen("127.0.0.1:0"), SECRET, {}, tls=True) as listener:
        peer = ThreadPeer(lambda: met(tcp.dial(listener.address, 30), tls=True))
        own_sock, _ = listener.accept(60)
        peer_sock, _ = peer.result()
        with own_sock, peer_sock:
            seen = Path(f"/proc/self/fdinfo/{listener.fileno()}").read_text()
            assert seen.count("tfd:") == 1  # the listener watches only its listening socket


def test_missing_cryptography_package_raises_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the listening end needs the package."""
    tls.certificate.cache_clear()
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with tcp.listen("127.0.0.1:0") as listener, pytest.raises(ImportError, match="needs the package crypto"):
        AuthenticatedListener(listener, SECRET, {}, tls=True)
    with connected() as (_, listens), pytest.raises(ImportError, match=r"pip install 'flowchan\[tls\]'"):
        met(listens, dialled=False, tls=True)
