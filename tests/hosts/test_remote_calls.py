"""Test that a channel server replies to random requests and keeps serving other clients."""

from __future__ import annotations

import random

import pytest
from support.peers import HostPeer

from flowchan import Channel
from flowchan.hosts import open_channel, serve
from flowchan.remote import connection
from flowchan.remote.messages import CallRequest, Cancel, Finished, ServerClosed

WORDS = [
    "make",
    "item_done",
    "open",
    "look",
    "offer",
    "room",
    "reader",
    "writer",
    "send",
    "drop",
    "close",
    "abort",
]


@pytest.fixture(autouse=True)
def impatient():
    serve(peer_timeout=2)
    yield
    serve()


def anything(draw: random.Random) -> object:
    return draw.choice([None, 0, 1, -1, 2**70, 0.0, "", "1", b"", (), {}, [1], CallRequest, object])


def use_randomly(address: str, secret: bytes, seed: int) -> int:
    """Send random requests, put 1 into the channel, and return how many requests failed."""
    draw = random.Random(seed)
    with connection.using(address.rpartition("/")[0], secret, False) as owner:
        wrong = send_random_requests(owner, draw)
        open_channel(address, secret).put(1)
        return wrong


def send_random_requests(owner: connection.Connection, draw: random.Random) -> int:
    wrong = 0
    for _ in range(300):
        what = draw.choice(WORDS) if draw.random() < 0.8 else anything(draw)
        channel = draw.choice([1000, -1, None, "1"])  # channels that do not exist
        owner._requests.put(
            draw.choice([Cancel(draw.randrange(400)), Finished(1), ServerClosed("over"), anything(draw)])
        )
        try:
            owner.ask(channel, what, *(anything(draw) for _ in range(draw.randrange(3))))
        except Exception:
            wrong += 1
    return wrong


@pytest.mark.parametrize("seed", range(2))
def test_server_answers_random_requests_and_keeps_serving_other_clients(seed: int) -> None:
    channel = Channel(across="hosts")
    other = HostPeer(lambda: [channel.get(), channel.get()])
    channel.put(0)
    assert HostPeer(use_randomly, channel.address, channel.secret, seed).result() > 100
    assert other.result() == [0, 1]
