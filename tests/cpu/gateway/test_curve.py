"""A gateway with a key: who has it is served as ever, who has not gets nothing."""

import os

import pytest
import zmq

from adp_kv.errors import ConfigError, GatewayError
from adp_kv.sdk.channel import Channel
from adp_kv.sdk.stats import ask_stats
from adp_kv.wire.curve import is_local, read_keys
from adp_kv.wire.frames import encode
from adp_kv.wire.messages import StatsRequest
from gateway.config import Settings
from tests.support.clients import Team, blocks_of, pools
from tests.support.process import free_port, wait_until
from tests.support.serving import Serving, random_chunks

REFUSED = "no gateway answers"


def key(folder, name="key", secret=b"k" * 44, mode=0o600):
    path = folder / name
    path.write_bytes(secret)
    path.chmod(mode)
    return str(path)


@pytest.fixture
def guarded(tmp_path):
    """A gateway on all interfaces, with a key."""
    address = f"tcp://0.0.0.0:{free_port()}"
    settings = {"shared_memory_size": 64 * 16384, "key_file": key(tmp_path), "listen": address}
    with Serving(**settings) as serving:
        serving.address = address.replace("0.0.0.0", "127.0.0.1")
        yield serving


def test_engine_with_the_key_saves_and_restores(guarded, tmp_path):
    chunks, blocks = random_chunks(4), blocks_of(0, 2, 4, 6)
    team = Team(guarded.address, pools(2))
    for client in team.clients:
        client.key_file = key(tmp_path, "copy")
    with team.start():
        team.save(1, chunks, blocks)
        before = [pool.pages(0, blocks) for pool in team.pools]
        for pool in team.pools:
            pool.clear()
        assert not any(job.failed_chunks.any() for job in team.restore(2, chunks, blocks))
        after = [pool.pages(0, blocks) for pool in team.pools]
        assert all((a == b).all() for a, b in zip(before, after, strict=True))
        assert ask_stats(guarded.address, 5.0, key(tmp_path))["gets"] > 0


def test_peer_without_the_key_gets_nothing(guarded):
    """Not a byte: neither an answer nor a sign that its message was read."""
    with pytest.raises(GatewayError, match=REFUSED):
        ask_stats(guarded.address, 0.5)
    assert guarded.server.counters.get("bad_messages", 0) == 0


def test_peer_with_another_key_gets_nothing(guarded, tmp_path):
    other = key(tmp_path, "other", b"o" * 44)
    with pytest.raises(GatewayError, match=REFUSED):
        ask_stats(guarded.address, 0.5, other)


def test_peer_that_knows_the_gateway_but_not_the_secret_is_refused(guarded, tmp_path):
    """The public key alone, seen somewhere, opens nothing: engines have a key too."""
    public = read_keys(key(tmp_path)).gateway_public
    own_public, own_secret = zmq.curve_keypair()
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    try:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.CURVE_SERVERKEY, public)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, own_public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, own_secret)
        socket.connect(guarded.address)
        socket.send(encode(StatsRequest()))
        assert not socket.poll(500)
        wait_until(lambda: guarded.server._gatekeeper.num_refused > 0, 5, "it was refused")
    finally:
        socket.close()
        context.term()
    assert guarded.server.snapshot().values["peers_refused"] > 0


def test_engine_with_a_key_does_not_speak_to_a_gateway_without(tmp_path):
    """Somebody else who listens at the address learns nothing either."""
    with Serving(listen=f"tcp://127.0.0.1:{free_port()}") as serving:
        with pytest.raises(GatewayError, match=REFUSED):
            ask_stats(serving.address, 0.5, key(tmp_path))
        assert ask_stats(serving.address, 5.0) is not None


def test_off_reason_names_the_key(guarded):
    team = Team(guarded.address, pools(1), connect_timeout_s=0.5)
    with team.start(settle=False):
        assert not team.ranks[0].wait_settled()
        assert "key_file" in team.ranks[0].off_reason


@pytest.mark.parametrize(
    "listen",
    ["tcp://0.0.0.0:5557", "tcp://gateway:5557", "tcp://*:1", "tcp://127.example.org:5557"],
)
def test_address_beyond_this_host_needs_a_key(listen, tmp_path):
    from adp_kv.config import connector_settings

    with pytest.raises(ConfigError, match="set key_file on both sides"):
        Settings(listen=listen)
    assert Settings(listen=listen, key_file="k").key_file == "k"
    with pytest.raises(ConfigError, match="set key_file on both sides"):
        connector_settings({"gateway": listen})


def test_default_is_local():
    from adp_kv.config import ConnectorSettings

    assert is_local(Settings().listen)
    assert is_local(ConnectorSettings().gateway)
    local = ["ipc:///x", "tcp://localhost:1", "tcp://[::1]:1", "tcp://127.8.0.1:1"]
    assert all(is_local(address) for address in local)
    assert not is_local("tcp://[::]:1")
    assert not is_local("tcp://1.127.0.1:1")


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"mode": 0o640}, "chmod 600"),
        ({"mode": 0o604}, "chmod 600"),
        ({"secret": b"short"}, "less than 32 bytes; make one with"),
        ({"secret": b" " * 100}, "less than 32 bytes"),
    ],
)
def test_unfit_key_file_is_named(tmp_path, how, message):
    path = key(tmp_path, **how)
    with pytest.raises(ConfigError, match=message):
        read_keys(path)
    with pytest.raises(ConfigError, match=message):
        Channel("tcp://127.0.0.1:1", 1.0, key_file=path)
    with pytest.raises(ConfigError, match=message):
        Serving(key_file=path)


def test_absent_key_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        read_keys(str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="others may read it"):
        read_keys(os.devnull)
