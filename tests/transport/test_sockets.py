"""Test ``flowchan.transport``: authenticated sockets between programs."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from typing import Any

import pytest
from ends import OTHER, SECRET
from support.optional_packages import optional
from support.peers import ThreadPeer
from support.sockets import receive

import flowchan.transport as transport
from flowchan import HostError

cryptography = optional("cryptography")


def echo(listener: transport.SocketListener) -> None:
    """Accept one peer, and send the received bytes back until the peer shuts down its side."""
    with listener.accept(60) as peer:
        while data := peer.recv(4096):
            peer.sendall(data)


@pytest.mark.parametrize("tls", [False, True])
def test_connected_sockets_carry_bytes_both_ways(tls: bool) -> None:
    if tls:
        cryptography.__name__  # noqa: B018  # skips the test if the package is missing
    message = bytes(range(256)) * 1000
    with transport.listen("127.0.0.1:0", SECRET, tls=tls) as listener:
        peer = ThreadPeer(echo, listener)
        with transport.connect(listener.address, SECRET, timeout=60, tls=tls) as sock:
            assert isinstance(sock, socket.socket)
            assert sock.gettimeout() is None
            writer = ThreadPeer(sock.sendall, message)
            assert receive(sock, len(message)) == message
            writer.result()
        peer.result()


def test_program_in_another_process_connects() -> None:
    """The program may start earlier than the listener, because ``connect`` retries."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    program = (
        "import sys\nfrom flowchan.transport import connect\n"
        "with connect(sys.argv[1], bytes.fromhex(sys.argv[2]), timeout=120) as sock:\n"
        "    sock.sendall(b'hello')\n"
    )
    arguments = [sys.executable, "-c", program, address, SECRET.hex()]
    with subprocess.Popen(arguments) as child, transport.listen(address, SECRET) as listener:
        with listener.accept(120) as peer:
            assert receive(peer, 5) == b"hello"
        assert child.wait() == 0


def test_connect_with_another_secret_raises_host_error() -> None:
    with transport.listen("127.0.0.1:0", SECRET) as listener:

        def serve() -> None:
            with contextlib.suppress(TimeoutError):
                listener.accept(1).close()
                raise AssertionError("a peer without the secret was accepted")

        peer = ThreadPeer(serve)
        with pytest.raises(HostError, match="perhaps the secrets differ") as caught:
            transport.connect(listener.address, OTHER, timeout=0.5)
        peer.result()
    assert caught.value.host == listener.address


def test_connect_without_a_listener_names_address_and_reason() -> None:
    with transport.listen("127.0.0.1:0", SECRET) as listener:
        pass
    with pytest.raises(HostError, match=f"Connection refused at {listener.address} for 0.05 s"):
        transport.connect(listener.address, SECRET, timeout=0.05)


def test_accept_without_a_peer_times_out() -> None:
    with (
        transport.listen("127.0.0.1:0", SECRET) as listener,
        pytest.raises(TimeoutError, match=f"no peer with the right secret connected to {listener.address}"),
    ):
        listener.accept(timeout=0.01)


def test_failed_listen_keeps_no_descriptor_open() -> None:
    with transport.listen("127.0.0.1:0", SECRET) as listener:
        with pytest.raises(OSError, match=f"can't listen on {listener.address}"):
            transport.listen(listener.address, SECRET)
        address = listener.address
    transport.listen(address, SECRET).close()


WRONG: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
    (transport.connect, {"address": 1}, TypeError, "connect: address must be a string, got 1"),
    (transport.connect, {"address": "host"}, ValueError, "'host' is not an address"),
    (transport.connect, {"secret": b"short"}, ValueError, "connect: secret must have at least 16 bytes, got"),
    (transport.connect, {"secret": "text"}, TypeError, "connect: secret must be a bytes object"),
    (transport.connect, {"timeout": 0}, ValueError, "connect: timeout must be"),
    (transport.connect, {"tls": 1}, TypeError, "connect: tls must be"),
    (
        transport.connect,
        {"timeuot": 1},
        TypeError,
        "connect: unknown option 'timeuot'; did you mean 'timeout'",
    ),
    (transport.listen, {"secret": b"short"}, ValueError, "listen: secret must have at least 16 bytes, got 5"),
    (transport.listen, {"address": "host"}, ValueError, "'host' is not an address"),
    (transport.listen, {"tls": "yes"}, TypeError, "listen: tls must be"),
    (transport.listen, {"tsl": True}, TypeError, "listen: unknown option 'tsl'; did you mean 'tls'"),
]


@pytest.mark.parametrize(("call", "wrong", "error", "message"), WRONG)
def test_wrong_argument_raises_before_anything_opens(
    call: Any, wrong: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"^{message}"):
        call(**{"address": "127.0.0.1:0", "secret": SECRET} | wrong)


def test_public_names_load_only_when_they_are_used() -> None:
    code = (
        "import sys, flowchan, flowchan.transport\n"
        "assert 'flowchan.transport.sockets' not in sys.modules\n"
        "assert 'flowchan.transport.listener' not in sys.modules\n"
        "assert flowchan.transport.listen.__name__ == 'listen'\n"
        "try:\n    flowchan.transport.nothing\n"
        "except AttributeError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "module 'flowchan.transport' has no attribute 'nothing'\n"
