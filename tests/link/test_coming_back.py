"""After a break a link comes back by itself, and only to who knows its key (R10)."""

from __future__ import annotations

import contextlib
import hmac
import itertools
import os
import random
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sockets import receive

from benchmarks.far import cut
from flowchan import Channel, _core
from flowchan.transport.authentication import key_to_come_back
from flowchan.transport.link_events import LinkBroken, LinkClosed, next_event
from flowchan.transport.tcp import dial, joined, listen, split
from tests.link.linked import FarWorker, Linked, feeding
from tests.waiting import PATIENCE, wait_until

KEY, OTHER = secrets.token_bytes(32), secrets.token_bytes(32)
GREETING = b"flowchan back 1\n"
PING = struct.pack("<QQIHBBQQ", 0, 1, 0, 0, 7, 0, 0, 0)
"""A frame that any link answers."""
STRANGERS = 2_000


class Home:
    """A link whose connection has just ended, and where it is come back to."""

    def __init__(self) -> None:
        self.link = _core.Link(True)
        listener = listen("127.0.0.1:0")
        self.address = listener.address
        self.link.listen_again(listener.detach(), KEY)
        here, there = socket.socketpair()
        self.link.attach(here.detach())
        there.close()
        assert isinstance(next_event(self.link, PATIENCE), LinkBroken)

    def dial(self) -> socket.socket:
        sock = dial(self.address, PATIENCE)
        sock.settimeout(PATIENCE)
        return sock

    def is_connected(self) -> bool:
        return bool(self.link.state()["connected"])


@pytest.fixture
def home() -> Iterator[Home]:
    one = Home()
    yield one
    one.link.close()


def proof(role: bytes, both: bytes, key: bytes = KEY) -> bytes:
    return hmac.digest(key, role + b": back" + both, "sha256")


def greet(sock: socket.socket) -> bytes:
    """The fresh bytes of both, once home has proved the key."""
    ours = secrets.token_bytes(32)
    sock.sendall(GREETING + ours)
    answer = receive(sock, 64)
    assert answer[32:] == proof(b"listens", ours + answer[:32])
    return ours + answer[:32]


def is_sent_away(sock: socket.socket) -> bool:
    """Nothing comes before the end."""
    with sock:
        return receive(sock, 1) == b""


def test_who_proves_the_key_is_let_in_and_heard(home: Home) -> None:
    with home.dial() as sock:
        both = greet(sock)
        assert not home.is_connected()
        sock.sendall(proof(b"dialled", both))
        wait_until(home.is_connected)
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert receive(sock, 1)  # it pings


@pytest.mark.parametrize(
    "said",
    [
        lambda both: proof(b"dialled", both, OTHER),
        lambda both: proof(b"listens", both),
        lambda both: proof(b"dialled", both[32:] + both[:32]),
        lambda both: bytes(32),
        lambda both: PING * 8,
    ],
    ids=["another key", "another role", "the other way round", "zeroes", "frames"],
)
def test_who_does_not_prove_the_key_is_sent_away_and_not_heard(
    home: Home, said: Callable[[bytes], bytes]
) -> None:
    sock = home.dial()
    both = greet(sock)
    heard = home.link.state()["bytes_in"]
    sock.sendall(said(both) + PING)
    assert is_sent_away(sock)
    assert not home.is_connected()
    assert home.link.state()["bytes_in"] == heard


def test_a_proof_counts_once(home: Home) -> None:
    """Home's bytes are fresh each time, so what was said before is wrong then."""
    ours = secrets.token_bytes(32)
    answers = []
    with home.dial() as sock:
        sock.sendall(GREETING + ours)
        answers.append(receive(sock, 64))
        right = proof(b"dialled", ours + answers[0][:32])
        sock.sendall(right)
        wait_until(home.is_connected)
    assert isinstance(next_event(home.link, PATIENCE), LinkBroken)
    again = home.dial()
    again.sendall(GREETING + ours)
    answers.append(receive(again, 64))
    again.sendall(right)
    assert is_sent_away(again)
    assert not home.is_connected()
    assert answers[0][:32] != answers[1][:32]


def test_who_sends_homes_own_words_back_is_sent_away(home: Home) -> None:
    """By one connection what is said over the other, in both ways."""
    one, other = home.dial(), home.dial()
    one.sendall(GREETING + secrets.token_bytes(32))
    answer = receive(one, 64)
    other.sendall(GREETING + answer[:32])
    mirrored = receive(other, 64)
    one.sendall(mirrored[32:])
    other.sendall(answer[32:])
    assert is_sent_away(one)
    assert is_sent_away(other)
    assert not home.is_connected()


def test_strangers_do_not_keep_the_right_one_from_coming_back(home: Home) -> None:
    """Some say nothing, some stop in the middle; whoever is too many is sent away."""
    with contextlib.ExitStack() as strangers:
        for number in range(100):
            sock = strangers.enter_context(home.dial())
            if number % 3 == 1:
                sock.sendall(GREETING[:7])
            elif number % 3 == 2:
                greet(sock)
        with home.dial() as sock:
            sock.sendall(proof(b"dialled", greet(sock)))
            wait_until(home.is_connected)
        assert isinstance(next_event(home.link, PATIENCE), LinkBroken)


def test_whatever_strangers_say_nobody_of_them_is_let_in(home: Home) -> None:
    chance = random.Random(2)
    for _ in range(STRANGERS):
        with home.dial() as sock:
            greeting = bytearray(GREETING + chance.randbytes(32))
            if chance.random() < 0.5:
                greeting[chance.randrange(len(GREETING))] ^= 1 << chance.randrange(8)
            with contextlib.suppress(ConnectionError):
                sock.sendall(greeting[: chance.choice([5, 48, 48, 48])])
                if chance.random() < 0.5:
                    sock.sendall(chance.randbytes(chance.choice([1, 31, 32, 33, 5000])))
        assert not home.is_connected()


def test_a_link_that_is_closed_is_not_come_back_to(home: Home) -> None:
    with home.dial() as sock:
        greet(sock)
        home.link.close()
        assert receive(sock, 1) == b""
    with pytest.raises(ConnectionRefusedError):
        home.dial()


def test_a_forked_child_keeps_nothing_of_the_way_back(home: Home) -> None:
    with home.dial() as sock:
        greet(sock)
        ready, end = os.pipe(), os.pipe()
        child = os.fork()
        if not child:
            os.write(ready[1], b"-")
            os.close(end[1])
            os.read(end[0], 1)
            os._exit(0)
        os.read(ready[0], 1)
        home.link.close()
        assert receive(sock, 1) == b""  # the child lives, and so would its copy
        with pytest.raises(ConnectionRefusedError):
            home.dial()
        for fd in (*end[::-1], *ready):
            os.close(fd)
        assert os.waitpid(child, 0)[1] == 0


# --- the end that dials ---


def lies(sock: socket.socket, both: bytes) -> bytes:
    return both[32:] + proof(b"listens", both, OTHER)


def mirrors(sock: socket.socket, both: bytes) -> bytes:
    return both[32:] + proof(b"dialled", both)


def sends_frames(sock: socket.socket, both: bytes) -> bytes:
    return PING * 4


def says_half(sock: socket.socket, both: bytes) -> bytes:
    return (both[32:] + proof(b"listens", both))[:50]


@contextlib.contextmanager
def coming_back() -> Iterator[tuple[Any, socket.socket]]:
    """A link whose connection has broken, and whom it dials."""
    away = _core.Link(False)
    with listen("127.0.0.1:0") as first, listen("127.0.0.1:0") as again:
        away.dial_again(split(again.address)[1], KEY)
        away.attach(dial(first.address, PATIENCE).detach())
        first.accept(PATIENCE).close()
        with again.accept(PATIENCE) as sock:
            sock.settimeout(PATIENCE)
            yield away, sock
    away.close()


@pytest.mark.parametrize("answer", [lies, mirrors, sends_frames, says_half])
def test_who_does_not_prove_the_key_is_not_come_back_to(
    answer: Callable[[socket.socket, bytes], bytes],
) -> None:
    """Nothing that it says is heard; then it is told that the connection broke."""
    with coming_back() as (away, sock):
        greeting = receive(sock, 48)
        assert greeting.startswith(GREETING)
        sock.sendall(answer(sock, greeting[16:] + secrets.token_bytes(32)))
        assert is_sent_away(sock)
        assert isinstance(next_event(away, PATIENCE), LinkBroken)
        assert away.state()["bytes_in"] == 0


def test_a_link_that_is_closed_while_it_comes_back_ends() -> None:
    with coming_back() as (away, sock):
        assert len(receive(sock, 48)) == 48
        away.close()
        assert is_sent_away(sock)


# --- both ---


class Returning(Linked):
    """Two ends over loopback that come back to each other. When they can't, they are connected as at first,
    which is counted in ``helped``."""

    def __init__(self) -> None:
        super().__init__()
        self.first, again = listen("127.0.0.1:0"), listen("127.0.0.1:0")
        self.home.listen_again(again.detach(), KEY)
        self.away.dial_again(split(again.address)[1], KEY)
        self.helped = 0
        self._keeping = threading.Thread(target=self._keep)

    def connect(self) -> None:
        there = dial(self.first.address, PATIENCE)
        attaching = threading.Thread(target=self.home.attach, args=(self.first.accept(PATIENCE).detach(),))
        attaching.start()
        self.away.attach(there.detach())
        attaching.join()

    def __enter__(self) -> Returning:
        super().__enter__()
        self._keeping.start()
        return self

    def __exit__(self, *exc: object) -> None:
        super().__exit__(*exc)
        self._keeping.join(PATIENCE)
        self.first.close()

    def _keep(self) -> None:
        while not isinstance(event := next_event(self.away, PATIENCE), LinkClosed):
            if isinstance(event, LinkBroken):
                self.helped += 1
                self.connect()

    def are_connected(self) -> bool:
        return bool(self.home.state()["connected"] and self.away.state()["connected"])


def test_what_crosses_while_a_link_comes_back_comes_once_and_in_order() -> None:
    with Returning() as linked:
        source, results = Channel[Any](100, across="processes"), Channel[Any](100, across="processes")
        working = FarWorker(linked, 1, source, results, ordered=True).start(lambda item: [(0, item)])
        feeder = feeding(source, range(20_000))
        found = []
        for item in results:
            found.append(item)
            if item % 200 == 100:
                cut()
        assert found == list(range(20_000))
        feeder.join(PATIENCE)
        working.join(PATIENCE)
        assert linked.home.state()["breaks"] > 20


def test_a_link_comes_back_without_help() -> None:
    """At least at times: where everything is slow, it may need help."""
    with Returning() as linked:

        def comes_back() -> bool:
            helped, breaks = linked.helped, linked.away.state()["breaks"]
            assert cut() > 0
            wait_until(lambda: linked.away.state()["breaks"] > breaks and linked.are_connected())
            return linked.helped == helped

        wait_until(comes_back)


def test_it_comes_back_by_ipv6_too() -> None:
    try:
        listener = listen("[::1]:0")
    except OSError:
        pytest.skip("IPv6 is not there")
    with listener as first, listen(joined(("::1", 0))) as again:
        away = _core.Link(False)
        away.dial_again(split(again.address)[1], KEY)
        away.attach(dial(first.address, PATIENCE).detach())
        first.accept(PATIENCE).close()
        with again.accept(PATIENCE) as sock:
            assert receive(sock, 16) == GREETING
        away.close()


def test_each_life_of_an_agent_has_a_key_of_its_own() -> None:
    """So one that was given up does not come back as its successor, nor as another one."""
    secrets_of_runs = (secrets.token_bytes(32), secrets.token_bytes(32))
    lives = list(itertools.product(secrets_of_runs, (0, 1, 11), (0, 1, 10)))
    keys = {key_to_come_back(*life) for life in lives}
    assert len(keys) == len(lives)
    assert {len(key) for key in keys} == {32}


def test_a_key_has_32_bytes() -> None:
    link = _core.Link(False)
    with pytest.raises(ValueError, match="a key has 32 bytes, not 5"):
        link.dial_again(1, b"short")
    link.close()
