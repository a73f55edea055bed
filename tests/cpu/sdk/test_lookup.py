"""What the scheduler side makes of answers, late and strange ones too."""

import pytest

from adp_kv.sdk.lookup import LookupClient
from adp_kv.wire.messages import Hello, LookupReply
from tests.support.serving import random_chunks

HELLO = Hello(1, "test", "engine", -1, 1, bytes(16), [], 1)


class Sent:
    """A channel that keeps what is sent."""

    def __init__(self):
        self.messages = []

    def send(self, message):
        self.messages.append(message)


@pytest.fixture
def client():
    made = LookupClient(HELLO, "tcp://127.0.0.1:1", 1.0, 1.0)  # never started
    made._channel = Sent()
    yield made
    made.close()


def ask(client, num_chunks, timeout_s=60.0):
    ticket = client.ask(random_chunks(num_chunks), timeout_s)
    client._queue.popleft()()
    return ticket, client._channel.messages[-1].request


def test_answers_reach_their_questions_in_any_order(client):
    (first, one), (second, two) = ask(client, 2), ask(client, 3)
    client.on_message(LookupReply(two, b"\x01\x00\x01"))
    assert first.stored is None
    client.on_message(LookupReply(one, b"\x00\x01"))
    assert first.stored.tolist() == [False, True]
    assert second.stored.tolist() == [True, False, True]
    assert not client._tickets


@pytest.mark.parametrize("stored", [b"", b"\x01", b"\x01\x01\x01"])
def test_answer_of_another_length_is_none(client, stored):
    ticket, request = ask(client, 2)
    client.on_message(LookupReply(request, stored))
    assert ticket.stored is None


def test_question_that_expired_is_forgotten(client):
    (late, request), (other, _) = ask(client, 1, timeout_s=-1.0), ask(client, 1)
    assert late.expired
    client.on_turn()
    assert list(client._tickets.values()) == [other]
    client.on_message(LookupReply(request, b"\x01"))
    assert late.stored is None
