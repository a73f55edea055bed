"""Only silence that the client could have heard ends a channel."""

import pytest

from adp_kv.errors import GatewayError
from adp_kv.sdk.channel import Channel

TIMEOUT_S = 5.0


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def channel(monkeypatch):
    opened = Channel("tcp://127.0.0.1:1", TIMEOUT_S, clock := Clock())
    opened.clock = clock
    monkeypatch.setattr(opened, "send", lambda message: None)
    yield opened
    opened.close()


def test_silence_while_looking_ends_the_channel(channel):
    with pytest.raises(GatewayError, match="silent for 5 s"):  # noqa: PT012  a loop is the point
        for _ in range(20):
            channel.clock.now += channel.heartbeat()
    assert TIMEOUT_S <= channel.clock.now - 100 <= TIMEOUT_S + 2.5


def test_thread_held_up_longer_than_the_timeout_looks_again(channel):
    """A loaded machine: the answer to the last ping may be in the socket, unread."""
    channel.heartbeat()
    for _ in range(3):
        channel.clock.now += 2 * TIMEOUT_S
        channel.heartbeat()
        channel.heartbeat()
