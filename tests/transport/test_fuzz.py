"""Send random bytes in handshakes: each handshake is refused with a reason, or its bytes were valid.

Nothing is unpickled, and no other error is raised.
"""

from __future__ import annotations

import hmac
import json
import pickle
import random
from collections.abc import Callable

import pytest
from ends import OTHER, SECRET

import flowchan
from flowchan.transport import authentication
from flowchan.transport.authentication import DIALLED, GREETING, HELLO, LISTENS, PROOF, Handshake

INPUTS = 50_000
MUCH_TIME = pytest.mark.timeout(3600)
TRAP = b"\x80\x04c_pickle\nloads\n(S'x'\ntR."
"""A pickle that would load another pickle if it were ever loaded."""

Change = Callable[[random.Random, bytes], bytes]


def flip(chance: random.Random, message: bytes) -> bytes:
    place = chance.randrange(len(message))
    return message[:place] + bytes([message[place] ^ (1 << chance.randrange(8))]) + message[place + 1 :]


def noise(chance: random.Random, message: bytes) -> bytes:
    """Replace the bytes from a random offset to the end."""
    place = chance.randrange(len(message)) if chance.random() < 0.5 else 0
    return message[:place] + chance.randbytes(len(message) - place)


def shift(chance: random.Random, message: bytes) -> bytes:
    place = chance.randrange(1, len(message))
    return message[place:] + message[:place]


def pickled(chance: random.Random, message: bytes) -> bytes:
    place = chance.randrange(len(message) - min(len(TRAP), len(message) - 1))
    return (message[:place] + TRAP + message[place:])[: len(message)]


def one_byte(chance: random.Random, message: bytes) -> bytes:
    return bytes([chance.choice(b'\x00\xff {["9')]) * len(message)


def as_it_is(_: random.Random, message: bytes) -> bytes:
    return message


CHANGES: list[Change] = [flip, noise, shift, pickled, one_byte, as_it_is]


class End:
    """One end of a handshake without a socket, with its messages and its outcome."""

    def __init__(self, steps: Handshake) -> None:
        self._steps = steps
        self.sent: list[bytes] = []
        self.received_hello: object = None
        self.refused = ""
        self.over = False
        self.receive(None)

    def receive(self, message: bytes | None) -> None:
        try:
            step = next(self._steps) if message is None else self._steps.send(message)
            while isinstance(step, bytes):
                self.sent.append(step)
                step = next(self._steps)
        except StopIteration as done:
            self.received_hello, self.over = done.value, True
        except flowchan.Refused as refused:
            self.refused, self.over = str(refused), True


def meeting(chance: random.Random, seen: list[bytes]) -> int:
    """Run two ends, and return how many messages were delivered.

    Messages from one end may be changed, or replaced by messages from an earlier handshake.
    """
    other = SECRET if chance.random() < 0.95 else OTHER
    ends = [
        End(authentication.handshake(SECRET, {"end": 0}, dialled=True)),
        End(authentication.handshake(other, {"end": 1}, dialled=False)),
    ]
    victim, delivered, changed = chance.randrange(1, 8), 0, False
    while any(end.sent for end in ends):
        for end, peer in zip(ends, reversed(ends), strict=True):
            if not end.sent or peer.over:
                end.sent.clear()
                continue
            message = end.sent.pop(0)
            delivered += 1
            if delivered == victim:
                put = tampered(chance, message, seen)
                changed = put != message
                message = put
            peer.receive(message)
            if changed and delivered == victim:
                assert peer.refused or delivered <= 2, message
            if changed or other != SECRET:
                assert peer.received_hello is None or delivered > victim
    right = not changed and other == SECRET
    assert [end.received_hello for end in ends] == [{"end": 1}, {"end": 0}] if right else some_refused(ends)
    return delivered


def some_refused(ends: list[End]) -> bool:
    """Return whether at least one end refused with a reason. The other end must have a genuine hello."""
    assert all(end.received_hello in (None, {"end": 1 - number}) for number, end in enumerate(ends))
    return any(end.refused for end in ends)


def tampered(chance: random.Random, message: bytes, seen: list[bytes]) -> bytes:
    """Return a changed message, or an earlier message of the same size, and keep the given message for
    later."""
    earlier = [one for one in seen if len(one) == len(message)]
    put = chance.choice(earlier) if earlier and chance.random() < 0.2 else message
    seen[chance.randrange(len(seen))] = message
    return chance.choice(CHANGES)(chance, put)


def absurd_hello(chance: random.Random) -> bytes:
    """Return a hello that a peer with the secret may send."""
    text = json.dumps({"a": [1, {"b": None}], "c": 1e99, "d": "\u00e9" * 40}).encode()
    return chance.choice(CHANGES)(
        chance, chance.choice([text, b"[" * 4096, b"9" * 4096, b'{"a":' * 500, TRAP])
    )


def from_one_that_knows(chance: random.Random) -> int:
    """Run one end against a peer that knows the secret and sends an arbitrary hello."""
    end = End(authentication.handshake(SECRET, {}, dialled=False))
    own = authentication.greeting(DIALLED)
    key = hmac.digest(SECRET, own + end.sent.pop(), "sha256")
    end.receive(own)
    end.receive(authentication.proof(key, DIALLED, b"proof"))
    sent = absurd_hello(chance)[:HELLO].ljust(HELLO)
    end.receive(sent + authentication.proof(key, DIALLED, b"hello", sent))
    assert end.over
    assert isinstance(end.received_hello, dict) or end.refused == "its hello is not a JSON object"
    return 3


def from_a_foreign_peer(chance: random.Random) -> int:
    """Send arbitrary bytes to one end until it stops receiving."""
    dialled = chance.random() < 0.5
    end = End(authentication.handshake(SECRET, {}, dialled=dialled))
    greeting = authentication.greeting(LISTENS if dialled else DIALLED)
    messages = [chance.choice(CHANGES)(chance, greeting), chance.choice(CHANGES)(chance, bytes(PROOF))]
    for number, message in enumerate(messages, 1):
        end.receive(message)
        if end.over:
            assert end.refused
            return number
    raise AssertionError(messages)


@pytest.mark.parametrize("much", [False, pytest.param(True, marks=[pytest.mark.long, MUCH_TIME])])
def test_fuzzed_handshakes_succeed_or_are_refused(
    much: bool, monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config
) -> None:
    number = 10 * pytestconfig.getoption("--frames") // 3 if much else INPUTS  # ten million in make soak
    loaded: list[str] = []
    for name in ("loads", "load", "Unpickler", "_loads"):
        monkeypatch.setattr(pickle, name, lambda *_, name=name: loaded.append(name))
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    seen = [bytes(GREETING)] * 64
    given = 0
    while given < number:
        given += chance.choice(KINDS)(chance, seen)
    assert not loaded


KINDS: list[Callable[[random.Random, list[bytes]], int]] = [
    meeting,
    lambda chance, _: from_one_that_knows(chance),
    lambda chance, _: from_a_foreign_peer(chance),
]
