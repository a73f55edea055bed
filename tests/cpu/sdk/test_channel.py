"""One connection: its heartbeat, its handshake, its end."""

import threading
import time

import pytest
import zmq

from adp_kv.errors import GatewayError
from adp_kv.sdk.channel import Channel
from adp_kv.wire.frames import decode_at_gateway, encode
from adp_kv.wire.messages import Goodbye, Hello, Ping, Pong, Refused
from tests.support.clients import Team, pools
from tests.support.clock import FakeClock
from tests.support.process import free_port, wait_until
from tests.support.serving import random_chunks

CLOCK_TIMEOUT_S = 5.0
HELLO = Hello(1, "test", "engine", 0, 1, bytes(16), [], 1)


class Gateway:
    """A ROUTER that says what a test wants."""

    def __init__(self):
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.address = f"tcp://127.0.0.1:{self.socket.bind_to_random_port('tcp://127.0.0.1')}"

    def receive(self):
        assert self.socket.poll(2000), "nothing came"
        self.peer, *frames = self.socket.recv_multipart()
        return decode_at_gateway(frames)

    def send(self, message):
        self.socket.send_multipart([self.peer, encode(message)])

    def close(self):
        self.socket.close()
        self.context.term()


@pytest.fixture
def gateway():
    made = Gateway()
    yield made
    made.close()


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def channel(gateway, clock):
    with Channel(gateway.address, CLOCK_TIMEOUT_S, clock) as made:
        clock.advance(2)
        wait_until(lambda: sent(made), 2, "connected")
        assert gateway.receive() == Ping(0)
        gateway.send(Pong(0))
        heard(made)
        yield made


def sent(channel):
    try:
        channel.heartbeat()
    except GatewayError:
        channel._last_ping = -1e9
        return False
    return True


def heard(channel):
    assert channel._socket.poll(2000)
    return channel.receive()


def test_heartbeat_pings_when_it_is_time(channel, gateway, clock):
    left = channel.heartbeat()
    assert 0 < left <= 1
    clock.advance(left)
    channel.heartbeat()
    assert gateway.receive() == Ping(0)


def test_silence_beyond_the_timeout_is_death(channel, gateway, clock):
    for _ in range(6):
        clock.advance(1)
        channel.heartbeat()
    clock.advance(0.5)
    with pytest.raises(GatewayError, match="silent for 5 s"):
        channel.heartbeat()


def test_answers_keep_it_alive(channel, gateway, clock):
    for _ in range(20):
        clock.advance(1)
        channel.heartbeat()
        gateway.receive()
        gateway.send(Pong(0))
        assert heard(channel) is None


def test_own_stall_is_not_the_gateway_s_silence(channel, gateway, clock):
    clock.advance(60)  # this process was stopped
    channel.heartbeat()
    clock.advance(0.001)  # and looks again before the answer can be there
    channel.heartbeat()
    assert gateway.receive() == Ping(0)
    gateway.send(Pong(0))
    heard(channel)
    channel.heartbeat()


def test_answer_that_waits_unread_counts(channel, gateway, clock):
    clock.advance(1)
    channel.heartbeat()
    gateway.receive()
    gateway.send(Pong(0))
    assert channel._socket.poll(2000)
    clock.advance(6)  # this process was stopped before it could read
    channel.heartbeat()
    assert heard(channel) is None
    channel.heartbeat()


def test_pings_of_the_gateway_are_answered(channel, gateway):
    gateway.send(Ping(9))
    assert heard(channel) is None
    assert gateway.receive() == Pong(9)


def test_nonsense_and_goodbye_end_it(channel, gateway):
    gateway.socket.send_multipart([gateway.peer, b"nonsense"])
    with pytest.raises(GatewayError, match="nonsense"):
        heard(channel)
    gateway.send(Goodbye("enough"))
    with pytest.raises(GatewayError, match="enough"):
        heard(channel)


def test_close_says_goodbye_once(channel, gateway):
    channel.close("done")
    channel.close("done again")
    assert gateway.receive() == Goodbye("done")
    assert not gateway.socket.poll(100)


def test_refusal_ends_the_handshake_a_retry_does_not(gateway):
    with Channel(gateway.address, 2.0) as channel:

        def answer():
            gateway.receive()
            gateway.send(Refused("retry: busy"))
            gateway.receive()
            gateway.send(Refused("wrong release"))

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(GatewayError, match="refuses rank 0: wrong release"):
            channel.handshake(HELLO, time.monotonic() + 1.5)
        thread.join()


def test_retry_until_the_end_gives_its_reason(gateway):
    with Channel(gateway.address, 2.0) as channel:

        def answer():
            gateway.receive()
            gateway.send(Refused("retry: busy with another"))

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(GatewayError, match=r"^busy with another"):
            channel.handshake(HELLO, time.monotonic() + 0.6)
        thread.join()


def test_questions_while_connecting_cost_no_cpu():
    team = Team(f"tcp://127.0.0.1:{free_port()}", pools(1), connect_timeout_s=20)
    with team.start(settle=False):
        team.lookup.ask(random_chunks(1), 1.0)
        time.sleep(0.1)
        began = time.process_time()
        time.sleep(0.5)
        assert time.process_time() - began < 0.25


def test_close_while_connecting_is_quick():
    team = Team(f"tcp://127.0.0.1:{free_port()}", pools(1), connect_timeout_s=60)
    team.start(settle=False)
    time.sleep(0.1)
    team.close()  # asserts that it is quick, and that no thread is left


def test_close_before_start_is_harmless():
    Team(f"tcp://127.0.0.1:{free_port()}", pools(1)).close()
